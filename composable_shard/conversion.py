"""Convert and describe saved models in one process: without ranks, a model or its code.

[Note: Formats]
A checkpoint (of `save_checkpoint`) has the model and optimizers. So have those of other libraries
that `load_checkpoint` reads; none of their code is needed or run. A directory of DCP has them under
"model" and "optimizer": `dcp.save({"model": ..., "optimizer": ...})` writes it, given the dicts of
`get_model_state_dict` and `get_optimizer_state_dict`. A directory of safetensors has only the
model's tensors.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

from composable_shard.checkpoint import (
    CheckpointReader,
    PeerReader,
    TensorReader,
    find_ties,
    has_checkpoints,
    open_checkpoint,
    read_model,
    read_objects,
    read_optimizers,
    tensors_of,
    verify,
    write_state,
)
from composable_shard.huggingface import TensorWriter, parse_nbytes
from composable_shard.peers import named_by_order, open_run, write_universal

FORMATS = ("checkpoint", "dcp", "deepspeed", "safetensors", "torch")
_KINDS = ("optimizer", "scheduler", "scaler")


def _open(path: Path, step: int | None) -> CheckpointReader | PeerReader:
    """Open a checkpoint of this package or of another library."""
    if has_checkpoints(path):
        return open_checkpoint(path, step)
    run = open_run(path, step)
    if run is None:
        which = "" if step is None else f" of step {step}"
        raise ValueError(
            f"expected a checkpoint{which}, a directory of torch.distributed.checkpoint, one of "
            f"safetensors, or a checkpoint of another library in {path.absolute()}"
        )
    reader = PeerReader(run)
    reader.check_files()
    return reader


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    *,
    step: int | None = None,
    max_shard_size: int | str = "5GB",
) -> list[str]:
    """Write a saved model in another format; see [Note: Formats].

    Holds everything in host memory; from a checkpoint to safetensors, only one file's tensors.

    Args:
        source: A directory of any format.
        target: A directory, or a file for "torch". A checkpoint becomes a new directory in it.
        to: One of `FORMATS`.
        step: Which checkpoint to read, or the step of the one that is written; default: the last,
            or 0.
        max_shard_size: Limit of a file of safetensors.

    Returns:
        What is in the source and not in the target.

    Raises:
        ValueError: If the source is missing, damaged or of no known format, if it is the target, if
            the target is there already, or if the format has no place for something. Nothing is
            written then.
    """
    path, goal = Path(source), Path(target)
    max_nbytes = parse_nbytes(max_shard_size)
    _check_target(path, goal, to)
    with ExitStack() as stack:
        # Of a checkpoint that becomes another one, `step` is the new one's.
        opened = _open(path, step if to != "checkpoint" else None)
        if isinstance(opened, PeerReader) and to != "safetensors":
            opened = PeerReader(named_by_order(opened.run))
        reader = stack.enter_context(opened)
        left = [] if reader.metadata.tree.get("extra") is None else ["extra"]
        left += ["rng"] if _has_generators(reader) else []
        left += reader.left if isinstance(reader, PeerReader) else []
        if to == "safetensors":
            _write_files(goal, read_model(reader, with_ties=False), max_nbytes)
            return left + [kind for kind in _KINDS if reader.metadata.tree.get(kind)]
        return left + _write_run(goal, reader, to, reader.metadata.step if step is None else step)


def _has_generators(reader: TensorReader) -> bool:
    if isinstance(reader, PeerReader):
        return bool(reader.run.generators)
    return bool(tensors_of(reader, "rng"))


def _check_target(path: Path, goal: Path, to: str) -> None:
    if path.resolve() == goal.resolve():
        raise ValueError(f"expected another directory for the result than the source, {path}")
    if to == "dcp" and (goal / ".metadata").exists():
        raise ValueError(f"{goal} has a checkpoint of torch.distributed.checkpoint: choose another")
    if to == "torch" and goal.exists():
        raise ValueError(f"{goal} exists: choose another file")


def _write_run(path: Path, reader: TensorReader, to: str, step: int) -> list[str]:
    """Write model, optimizers, schedulers and scaler; return what the format has no place for."""
    model = dict(read_model(reader, with_ties=True))
    objects = {
        "optimizer": read_optimizers(reader),
        **{kind: read_objects(reader, kind) for kind in ("scheduler", "scaler")},
    }
    if to == "checkpoint":
        write_state(path, model, objects, step)
        return []
    if to == "deepspeed":
        return _write_universal(path, reader, model, objects, step)
    if to == "torch":
        optimizers = objects["optimizer"]
        objects["optimizer"] = {name: _counted(each) for name, each in optimizers.items()}
    state: dict[str, Any] = {"model": model, "step": step}
    state |= {
        kind: states[""] if states.keys() == {""} else states
        for kind, states in objects.items()
        if states
    }
    if to == "torch":
        torch.save(state, path)
    else:
        _write_dcp(path, state)
    return []


def _write_files(path: Path, model: Iterable[tuple[str, Any]], max_nbytes: int) -> None:
    writer = TensorWriter(path, max_nbytes)
    try:
        for name, value in model:
            if isinstance(value, Tensor):
                writer.add(name, value)
        writer.publish()
    finally:
        writer.discard()


def _counted(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state by number, as `Optimizer.load_state_dict` takes it."""
    numbers: dict[str, int] = {}
    groups = []
    for group in found["param_groups"]:
        names = list(group["params"])
        numbers |= {name: len(numbers) + index for index, name in enumerate(names)}
        groups.append({**group, "params": [numbers[name] for name in names], "param_names": names})
    state = {numbers[name]: values for name, values in found["state"].items()}
    return {"state": state, "param_groups": groups}


def _write_universal(
    path: Path,
    reader: TensorReader,
    model: Mapping[str, Any],
    objects: Mapping[str, Mapping[str, Any]],
    step: int,
) -> list[str]:
    optimizers, schedulers = objects["optimizer"], objects["scheduler"]
    if len(optimizers) != 1:
        raise ValueError(
            f"{reader.folder} has {len(optimizers)} optimizers, and DeepSpeed's form has one: "
            "convert it to another form"
        )
    write_universal(
        path,
        model,
        find_ties(reader),
        *optimizers.values(),
        scheduler=schedulers.get("", {}),
        step=step,
        world_size=reader.metadata.world_size,
    )
    others = [f"scheduler '{name}'" for name in schedulers if name]
    return others + (["the scaler"] if objects["scaler"] else [])


def _write_dcp(path: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # what `no_dist` says, as wanted
        dcp.save(state, checkpoint_id=path, no_dist=True)


def describe_checkpoint(
    path: str | os.PathLike[str], *, step: int | None = None, lists_tensors: bool = False
) -> str:
    """Verify a checkpoint, and return its contents as lines of text.

    Raises:
        ValueError: If there is none, or if a file is damaged, naming it.
    """
    with _open(Path(path), step) as reader:
        if isinstance(reader, PeerReader):
            return "\n".join(_describe_peer(reader, lists_tensors=lists_tensors))
        verify(reader)
        lines = [*_summary(reader)]
        for name, each in reader.metadata.tensors.items() if lists_tensors else ():
            shape = "x".join(map(str, each.shape)) or "scalar"
            number = reader.metadata.num_pieces(name)
            lines.append(f"  {name}: {shape} {_short(each.dtype)}, {number} pieces")
    return "\n".join(lines)


def _summary(reader: CheckpointReader) -> Iterator[str]:
    found, tree = reader.metadata, reader.metadata.tree
    files = [file.nbytes for file in found.files if file.nbytes]
    yield f"{reader.folder}: step {found.step}, saved by {found.world_size} ranks"
    yield f"{len(files)} files, {sum(files):,} bytes; all checksums match"
    for kind, title in (("model", "model"), ("optimizer", "optimizers"), ("extra", "extra")):
        yield _count_tensors(reader, kind, title)
    for kind in ("optimizer", "scheduler"):
        for name, told in sorted(tree.get(f"{kind}_kinds", {}).items()):
            yield f"{kind} {name!r}: {told[0] if isinstance(told, list) else told}"
    if tree.get("scaler"):
        yield "a scaler"


def _count_tensors(reader: TensorReader, kind: str, title: str) -> str:
    tensors = tensors_of(reader, kind)
    dtypes = Counter(_short(each.dtype) for each in tensors.values())
    numel = sum(each.shape.numel() for each in tensors.values())
    texts = ", ".join(f"{number} {name}" for name, number in sorted(dtypes.items()))
    return f"{title}: {len(tensors)} tensors, {numel:,} elements" + (texts and f" ({texts})")


def _describe_peer(reader: PeerReader, *, lists_tensors: bool) -> Iterator[str]:
    """Yield what another library's checkpoint has."""
    run = reader.run
    made_by = f" {run.version}" if run.version else ""
    yield f"{run.path}: {run.kind}{made_by}: step {run.step}, saved by {run.world_size} ranks"
    yield "no checksums: names, shapes and sizes of files were checked"
    yield _count_tensors(reader, "model", "model")
    for name, each in run.optimizers.items():
        counts = " and ".join(str(len(group["params"])) for group in each.groups)
        how = "counted" if each.is_numbered else "named"
        title = f"optimizer {name!r}" if name else "optimizer"
        keys = sorted({key for values in each.state.values() for key in values})
        yield f"{title}: {len(each.groups)} groups of {counts} {how} parameters, state {keys}"
    for what in ("scheduler", "scaler"):
        if reader.metadata.tree[what]:
            yield f"a {what}"
    if run.generators:
        yield f"random number generators of {len(run.generators)} ranks"
    for text in run.notes:
        yield f"note: {text}"
    if reader.left:
        yield f"not read: {', '.join(reader.left)}"
    # Last: there may be thousands.
    for key, stored in reader.metadata.tensors.items() if lists_tensors else ():
        shape = "x".join(map(str, stored.shape)) or "scalar"
        yield f"  {key}: {shape} {_short(stored.dtype)}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
