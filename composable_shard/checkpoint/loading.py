"""`load_checkpoint`."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composable_shard.checkpoint.background_save import quiet_group
from composable_shard.checkpoint.draft import check_same
from composable_shard.checkpoint.file_format import METADATA
from composable_shard.checkpoint.garbage import garbage_collection_paused
from composable_shard.checkpoint.objects import (
    Change,
    OneOrMore,
    as_dict,
    check_kinds,
    check_names,
    check_rng_state,
    find_stored,
    rng_name,
    set_rng_state,
    stage_objects,
)
from composable_shard.checkpoint.peer_reader import PeerReader
from composable_shard.checkpoint.reader import (
    PARSE_ERRORS,
    CheckpointReader,
    TensorReader,
    digest_of,
    find_checkpoint,
    has_checkpoints,
    read_bytes,
    read_history,
    reading,
)
from composable_shard.checkpoint.run_state import (
    StagedModel,
    StagedOptimizer,
    compare_names,
    list_names,
    read_extra,
)
from composable_shard.comm import HostGroup, Messages
from composable_shard.options import StateDictOptions, check_path_order
from composable_shard.peers import OwnGroup, Rename, named_as, open_run, read_generators
from composable_shard.state_dict import (
    ModelRanks,
    canonical,
    check_optimizers,
    check_values,
    get_model_state_dict,
    json_tree,
    params_by_fqn,
    prepare_load,
    view_optimizers,
)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """Facts about a checkpoint that `load_checkpoint` has loaded.

    Attributes:
        step: Number of steps taken when it was saved.
        extra: Rank 0's `extra` of the save; tensors are whole, on the CPU. Shards that were cut as
            a parameter is are shards again, cut as it is now, on its device.
        path: Its directory.
        world_size: Number of ranks that saved it.
        is_rng_restored: Whether the states of random number generators were restored.
        nbytes_read: Bytes of tensors that this rank read, those that it read twice counted twice.
        kind: The library and the form that saved it.
        version: The version of that library, as far as its files say it.
        taken: The parts of the run that were loaded: "model", "optimizer", "scheduler", "scaler",
            "step", "rng".
        left: What is in the files and was not loaded.
        notes: What was decided about names and values, as sentences.
    """

    step: int
    extra: Any
    path: Path
    world_size: int
    is_rng_restored: bool
    nbytes_read: int
    kind: str = "composable_shard"
    version: str = ""
    taken: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def load_checkpoint(  # noqa: PLR0913 -- the parts of a run, each by name
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: OneOrMore = None,
    *,
    scheduler: OneOrMore = None,
    scaler: Any = None,
    step: int | None = None,
    strict: bool = True,
    rename: Rename | None = None,
) -> LoadedCheckpoint:
    """Load a checkpoint into any sharding and world size; call it on all ranks.

    Checkpoints of other libraries are known by their files: `torch.save` (torch, DDP,
    `ZeroRedundancyOptimizer`, fairscale, accelerate, `Trainer`, Lightning),
    `torch.distributed.checkpoint` (FSDP2, FSDP1, torchtitan, accelerate, Lightning), DeepSpeed
    as saved and as universal checkpoint, and safetensors.

    Each rank reads only its own shards. All ranks read and verify everything before anything
    changes, and then read it again, directly into its place. So a load allocates memory only for
    state that an optimizer does not have yet. A model or optimizer with code of its own in a load
    (`_load_from_state_dict`, hooks) is read once, into host memory. Parameters and buffers on the
    meta device get memory on the mesh's device and their values, one flat parameter at a time, so
    that a rank never holds more than its shards and one unit. Random number generators are restored
    if the world size is the same. State of objects that are not passed is not read. Nothing in the
    files is executed.

    Args:
        path: The directory given to `save_checkpoint`, or one checkpoint in it.
        model: The model, sharded in any way or not at all; on the meta device only with units.
        optimizer: As in the save: one, or a list or dict of several.
        scheduler: Likewise.
        scaler: A `torch.amp.GradScaler`; a warning if only one of it and the checkpoint has one.
        step: Which checkpoint. Default: the one saved last.
        strict: False keeps parameters and buffers that the checkpoint lacks, ignores those that no
            rank's model has, casts dtypes, and gives optimizers and schedulers other kinds' states.
        rename: From names of parameters in another library's files to those of the model: a
            function or a dict. Default: the prefixes of wrappers are dropped, and `notes` says so.

    Raises:
        ValueError: On all ranks, if there is no such checkpoint, if a file is damaged, naming it,
            if the checkpoint does not fit, naming parameters, or if ranks pass different values of
            `step` or `strict`. Nothing has changed then.
        RuntimeError: If a model without units is on the meta device, or in a forward or backward.
            On all ranks, if a rank can't read its verified part a second time, or if code of the
            program raises (`load_state_dict` of a scheduler, a hook): a checkpoint must be loaded
            again.
    """
    check_path_order(model, path, "load_checkpoint(path, model, optimizer)")
    group = quiet_group()
    step = _compare_arguments(group, step, strict=strict)
    optimizers, schedulers = as_dict(optimizer), as_dict(scheduler)
    with garbage_collection_paused():
        reader = _open(group, model, optimizers, step, (path, rename))
    with group.agreed():
        reader.check_files(group.rank, group.size)
    check_names(group, reader, {"optimizer": optimizers, "scheduler": schedulers})
    with garbage_collection_paused(), group.agreed(), _parsing(reader.folder / METADATA):
        trees = [find_stored(reader, "optimizer")[name] for name in optimizers]
        own = get_model_state_dict(model)
        views = {name: view_optimizers(model, [each]) for name, each in optimizers.items()}
        names = list_names(reader, own, views, trees)
    if strict:
        with group.agreed(), _parsing(reader.folder / METADATA):
            check_kinds(reader, optimizers)
        compare_names(group, reader.folder, names)
    with reader, torch.inference_mode(False):
        with garbage_collection_paused(), group.agreed(), _parsing(reader.folder / METADATA):
            staged = StagedModel.read(reader, model, own, is_strict=strict)
            cuts = reader.metadata.tree.get("optimizer_cuts", {})
            states = {
                name: StagedOptimizer.read(
                    reader,
                    _cut_like(model, own),
                    view,
                    (tree, cuts.get(name, {})),
                    is_strict=strict,
                )
                for (name, view), tree in zip(views.items(), trees, strict=True)
            }
            given = {"scheduler": schedulers, "scaler": as_dict(scaler)}
            objects = stage_objects(reader, given, is_strict=strict)
            extra = read_extra(reader, own)
            rng_state = _read_rng_state(reader, group)
        _change(group, reader, staged, states, objects)
    if rng_state is not None:
        set_rng_state(rng_state)
    if not isinstance(reader, PeerReader):
        group.continue_run(read_history(reader.folder.parent).get(reader.folder.name, ""))
    loaded = LoadedCheckpoint(
        reader.metadata.step,
        extra,
        reader.folder,
        reader.metadata.world_size,
        rng_state is not None,
        reader.nbytes_read,
        taken=("model", "step"),
    )
    return _told(loaded, reader, {"optimizer": optimizers, **given})


def _compare_arguments(group: HostGroup, step: int | None, *, strict: bool) -> int | None:
    """Check that all ranks pass the same arguments; return the step, also numpy's, as an int."""

    def check(told: Messages) -> None:
        arguments = [each for each, _ in told]
        check_same(arguments, "step", "strict")
        if isinstance(text := arguments[0]["step"], str):
            raise ValueError(f"expected step to be an int, the number of steps taken, got {text}")

    with suppress(TypeError):
        step = None if step is None else operator.index(step)
    known = step if step is None or isinstance(step, int) else repr(step)
    group.join({"step": known, "strict": bool(strict)}, check)
    return step


def _told(
    loaded: LoadedCheckpoint, reader: TensorReader, given: dict[str, dict[str, Any]]
) -> LoadedCheckpoint:
    """Return the facts with what was taken and what was left."""
    has = {kind: bool(reader.metadata.tree.get(kind)) for kind in given}
    taken = [kind for kind, objects in given.items() if objects and has[kind]]
    left = [kind for kind, objects in given.items() if has[kind] and not objects]
    if loaded.is_rng_restored:
        taken.append("rng")
    loaded = replace(loaded, taken=(*loaded.taken, *taken), left=tuple(left))
    if not isinstance(reader, PeerReader):
        return loaded
    run = reader.run
    if run.generators and not loaded.is_rng_restored:
        left.append("rng")
    return replace(
        loaded,
        kind=run.kind,
        version=run.version,
        left=(*left, *reader.left),
        notes=tuple(run.notes),
    )


def _open(
    group: HostGroup,
    model: nn.Module,
    optimizers: dict[str, Any],
    step: int | None,
    source: tuple[str | os.PathLike[str], Rename | None],
) -> TensorReader:
    """Open what rank 0 finds: a checkpoint of this library, or another library's."""
    folder, digest = group.on_first(lambda: _find(source[0], step))
    if digest is None:
        return _open_peers(group, model, optimizers, step, source)
    with group.agreed():
        reader = CheckpointReader(Path(folder), digest)
    return reader


def _open_peers(
    group: HostGroup,
    model: nn.Module,
    optimizers: dict[str, Any],
    step: int | None,
    source: tuple[str | os.PathLike[str], Rename | None],
) -> PeerReader:
    """Open another library's checkpoint under the names of the model. [Note: Peers' checkpoints]"""
    path, rename = source
    with group.agreed():
        run = open_run(Path(path), step)
        if run is None:
            raise ValueError(f"rank 0 found a checkpoint in {path}, and this rank finds none")
        views = {name: view_optimizers(model, [each]) for name, each in optimizers.items()}
        groups = {
            name: [OwnGroup([m.fqn for m in each.members], each.options) for each in view]
            for name, view in views.items()
        }
        own = get_model_state_dict(model)
        reader = PeerReader(named_as(run, own, _tied_names(model), groups, rename))

    def check_same_files(told: Messages) -> None:
        if len(told) > 1:
            text = f"the ranks see different files in {path}: give all ranks the same ones"
            raise ValueError(text)

    group.join(reader.digest, check_same_files)
    return reader


def _tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter, by each of them."""
    found: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(param), []).append(canonical(name))
    plain = {name: names for names in found.values() for name in names}
    managed = params_by_fqn(model).values()
    return plain | {fqn: param.names for param in managed for fqn in param.names}


def _cut_like(model: nn.Module, own: dict[str, Any]) -> dict[str, Any]:
    """Return what state is cut like: also parameters that hooks rename in state dicts."""
    return {fqn: each.entry.sharded for fqn, each in params_by_fqn(model).items()} | own


@contextmanager
def _parsing(path: Path) -> Iterator[None]:
    """Name the file if the body fails on content that no save has written."""
    try:
        yield
    except PARSE_ERRORS as error:
        if isinstance(error, ValueError) and str(path.parent) in str(error):
            raise
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _change(
    group: HostGroup,
    reader: TensorReader,
    staged: StagedModel,
    optimizers: dict[str, StagedOptimizer],
    objects: list[Change],
) -> None:
    """Load all parts of a run; an error from here on leaves them half loaded, and says so."""
    # After the first pass, because its collectives use training's groups.
    with group.agreed():
        if staged.meta is None:
            check_values(staged.model, staged.state, is_strict=False)
        else:
            staged.apply()  # optimizers look at their parameters
    with group.agreed(), torch.no_grad():
        check_optimizers(ModelRanks(staged.model).all_messages(sorted(optimizers)))
        lenient = StateDictOptions(strict=False)
        load_optimizers = [
            prepare_load(staged.model, [each.optimizer], each.state, lenient, is_given_away=True)
            for each in optimizers.values()
        ]

    with group.agreed(), _half_loaded(reader.folder):
        # Code of users runs before the rest is read.
        for write, state in [*objects, *staged.extra_changes()]:
            write(state)
        for load in load_optimizers:
            load()
        staged.fill(reader)
        for each in optimizers.values():
            each.fill(reader)
    if staged.meta is None:
        with group.agreed(), _half_loaded(reader.folder):
            staged.apply()


@contextmanager
def _half_loaded(folder: Path) -> Iterator[None]:
    """Say what has been changed if the body fails. [Note: Two passes]"""
    try:
        with torch.inference_mode(False), torch.no_grad():
            yield
    except Exception as error:
        raise RuntimeError(
            f"the load of {folder} was cut off in the middle: {error}. All of it had been read and "
            "verified before. Each part of the run may have the checkpoint's state now or that of "
            "before. Call load_checkpoint again before anything else."
        ) from error


def _find(path: str | os.PathLike[str], step: int | None) -> list[str | None]:
    """Return the directory to read, and a digest of its metadata, None if it is a peer's."""
    if not has_checkpoints(Path(path)) and open_run(Path(path), step) is not None:
        return [str(Path(path).absolute()), None]
    folder = find_checkpoint(path, step)
    if folder is None:
        which = "" if step is None else f" of step {step}"
        raise ValueError(f"there is no complete checkpoint{which} in {Path(path).absolute()}")
    with reading(folder / METADATA):
        return [str(folder.absolute()), digest_of(read_bytes(folder / METADATA))]


def _read_rng_state(reader: TensorReader, group: HostGroup) -> dict[str, Any] | None:
    if isinstance(reader, PeerReader):
        files = reader.run.generators
        is_of_as_many = sorted(files) == list(range(group.size))
        states = read_generators(files[group.rank]) if is_of_as_many else None
        if states is not None:
            check_rng_state(states)
        return states
    name = rng_name(group.rank)
    # A converted checkpoint has none.
    if reader.metadata.world_size != group.size or name not in reader.metadata.tensors:
        return None
    text = bytes(reader.read(name).tolist())
    state: dict[str, Any] = json_tree.decode(json.loads(text), lambda name: None)
    check_rng_state(state)
    return state
