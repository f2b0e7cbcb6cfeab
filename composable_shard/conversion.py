"""Convert and describe saved models in one process: without ranks, a model or its code.

[Note: Formats]
A checkpoint (of `save_checkpoint`) has the model and optimizers. A directory of DCP has them under
"model" and "optimizer", or "optim": `dcp.save({"model": ..., "optimizer": ...})` writes it, given
the dicts of `get_model_state_dict` and `get_optimizer_state_dict`, FSDP2's included. A directory of
safetensors has only the model's tensors. A directory of DCP pickles everything that is not a
tensor: read only directories that you trust.
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
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from composable_shard.checkpoint import (
    CheckpointReader,
    find_checkpoint,
    open_checkpoint,
    read_model,
    read_optimizers,
    tensors_of,
    verify,
    write_state,
)
from composable_shard.huggingface import TensorFiles, TensorWriter, parse_nbytes

FORMATS = ("checkpoint", "dcp", "safetensors")


def find_format(path: Path, step: int | None = None) -> str:
    """Return which of `FORMATS` a directory has."""
    if (path / ".metadata").is_file():
        return "dcp"
    if find_checkpoint(path, step) is not None:
        return "checkpoint"
    if path.is_file() or any(path.glob("*.safetensors*")):
        return "safetensors"
    which = "" if step is None else f" of step {step}"
    raise ValueError(
        f"expected a checkpoint{which}, a directory of torch.distributed.checkpoint or one of "
        f"safetensors in {path.absolute()}"
    )


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    *,
    step: int | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a saved model in another format; see [Note: Formats].

    Holds everything in host memory; from a checkpoint to safetensors, only one file's tensors.

    Args:
        source: A directory of any format.
        target: A directory. A checkpoint becomes a new directory in it.
        to: One of `FORMATS`.
        step: Which checkpoint to read, or the step of the one that is written; default: the last,
            or 0.
        max_shard_size: Limit of a file of safetensors.

    Raises:
        ValueError: If the source is missing, damaged or of no known format, if it is the target, or
            if the target is a directory of DCP with a checkpoint in it. Nothing is written then.
    """
    path, goal = Path(source), Path(target)
    found = find_format(path, step if to != "checkpoint" else None)
    max_nbytes = parse_nbytes(max_shard_size)
    if path.resolve() == goal.resolve():
        raise ValueError(f"expected another directory for the result than the source, {path}")
    if to == "dcp" and (goal / ".metadata").exists():
        raise ValueError(f"{goal} has a checkpoint of torch.distributed.checkpoint: choose another")
    with ExitStack() as stack:
        model: Iterable[tuple[str, Any]]
        optimizers: dict[str, Any] = {}
        if found == "checkpoint":
            reader = stack.enter_context(open_checkpoint(path, None if to == found else step))
            model = read_model(reader, with_ties=to != "safetensors")
            if to != "safetensors":
                optimizers = read_optimizers(reader)
            step = reader.metadata.step if step is None else step
        elif found == "dcp":
            model, optimizers = _read_dcp(path)
        else:
            model = _read_files(stack.enter_context(TensorFiles(path)))
        if to == "safetensors":
            _write_files(goal, model, max_nbytes)
        elif to == "checkpoint":
            write_state(goal, dict(model), optimizers, step or 0)
        else:
            _write_dcp(goal, dict(model), optimizers)


def _read_files(files: TensorFiles) -> Iterator[tuple[str, Tensor]]:
    for name in files.tensors:
        yield name, files.read(name, ()).clone()


def _write_files(path: Path, model: Iterable[tuple[str, Any]], max_nbytes: int) -> None:
    writer = TensorWriter(path, max_nbytes)
    try:
        for name, value in model:
            if isinstance(value, Tensor):
                writer.add(name, value)
        writer.publish()
    finally:
        writer.discard()


def _write_dcp(path: Path, model: Mapping[str, Any], optimizers: Mapping[str, Any]) -> None:
    state = {"model": dict(model)}
    if optimizers:
        state["optimizer"] = optimizers[""] if optimizers.keys() == {""} else dict(optimizers)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # what `no_dist` says, as wanted
        dcp.save(state, checkpoint_id=path, no_dist=True)


def _read_dcp(path: Path) -> tuple[Iterable[tuple[str, Any]], dict[str, Any]]:
    metadata = dcp.FileSystemReader(path).read_metadata()
    flat: dict[str, Any] = {}
    for name, each in metadata.state_dict_metadata.items():
        flat[name] = None
        if isinstance(each, TensorStorageMetadata):
            flat[name] = torch.empty(each.size, dtype=each.properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")
        dcp.load(flat, checkpoint_id=path, no_dist=True)
    paths = metadata.planner_data or {}
    nested: dict[Any, Any] = {}
    for name, value in flat.items():
        *outer, last = paths.get(name, (name,))
        place = nested
        for key in outer:
            place = place.setdefault(key, {})
        place[last] = value
    nested = _with_lists(nested)
    if not isinstance(nested.get("model"), dict):
        raise ValueError(
            f"expected 'model', and 'optimizer' or 'optim', in {path}, found {sorted(nested)}"
        )
    state = nested.get("optimizer", nested.get("optim"))
    optimizers = {} if state is None else {"": state} if "state" in state else state
    return nested["model"].items(), optimizers


def _with_lists(value: Any) -> Any:
    """Return nested dicts, with a list for each dict whose keys are 0, 1, 2, ..."""
    if not isinstance(value, dict):
        return value
    inside = {key: _with_lists(each) for key, each in value.items()}
    is_list = bool(inside) and all(isinstance(key, int) for key in inside)
    return [inside[number] for number in sorted(inside)] if is_list else inside


def describe_checkpoint(
    path: str | os.PathLike[str], *, step: int | None = None, lists_tensors: bool = False
) -> str:
    """Verify a checkpoint, and return its contents as lines of text.

    Raises:
        ValueError: If there is none, or if a file is damaged, naming it.
    """
    with open_checkpoint(path, step) as reader:
        verify(reader)
        lines = [*_summary(reader)]
        for name, each in reader.metadata.tensors.items() if lists_tensors else ():
            shape = "x".join(map(str, each.shape)) or "scalar"
            lines.append(f"  {name}: {shape} {_short(each.dtype)}, {len(each.pieces)} pieces")
    return "\n".join(lines)


def _summary(reader: CheckpointReader) -> Iterator[str]:
    found, tree = reader.metadata, reader.metadata.tree
    nbytes = sum(found.files.values())
    yield f"{reader.folder}: step {found.step}, saved by {found.world_size} ranks"
    yield f"{len(found.files)} files, {nbytes:,} bytes; all checksums match"
    for kind, title in (("model", "model"), ("optimizer", "optimizers"), ("extra", "extra")):
        tensors = tensors_of(reader, kind)
        dtypes = Counter(_short(each.dtype) for each in tensors.values())
        numel = sum(each.shape.numel() for each in tensors.values())
        texts = ", ".join(f"{number} {name}" for name, number in sorted(dtypes.items()))
        yield f"{title}: {len(tensors)} tensors, {numel:,} elements" + (texts and f" ({texts})")
    for kind in ("optimizer", "scheduler"):
        for name, told in sorted(tree.get(f"{kind}_kinds", {}).items()):
            yield f"{kind} {name!r}: {told[0] if isinstance(told, list) else told}"
    if tree.get("scaler"):
        yield "a scaler"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
