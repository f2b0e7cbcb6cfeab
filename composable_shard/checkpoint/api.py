"""`save_checkpoint` and `load_checkpoint`."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from composable_shard.checkpoint.draft import ModelOwners, SaveArguments, check_same, list_items
from composable_shard.checkpoint.file_format import METADATA
from composable_shard.checkpoint.objects import (
    Change,
    OneOrMore,
    as_dict,
    check_kinds,
    check_names,
    check_rng_state,
    find_stored,
    get_rng_state,
    kind_of,
    optimizer_kinds,
    set_rng_state,
    stage_objects,
    take_parts,
    wraps_state,
)
from composable_shard.checkpoint.reader import (
    CheckpointReader,
    find_checkpoint,
    read_bytes,
    read_history,
    reading,
)
from composable_shard.checkpoint.run_state import (
    StagedModel,
    StagedOptimizer,
    check_optimizers,
    compare_names,
    describe_model,
    list_names,
)
from composable_shard.checkpoint.writer import plan_save, write_checkpoint
from composable_shard.comm import HostGroup, get_host_group
from composable_shard.options import StateDictOptions, check_path_order
from composable_shard.state_dict import (
    check_values,
    get_model_state_dict,
    get_optimizer_state_dict,
    json_tree,
    prepare_load,
    view_optimizers,
)


class CheckpointSave:
    """A save in the background.

    `wait()` returns the directory when it is published, or raises the save's error, the same on
    every rank. If nobody waits, the next save or load raises the error. A process waits for its
    save before it ends. The save's own process group outlives `destroy_process_group()`.
    """

    def __init__(self, write: Callable[[], Path]) -> None:
        self._write = write
        self._path: Path | None = None
        self._error: Exception | None = None
        self._is_told = False
        # Not a daemon: the interpreter joins it before it ends.
        self._thread = threading.Thread(target=self._run, name="save_checkpoint", daemon=False)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._path = self._write()
        except Exception as error:
            self._error = error
        finally:
            del self._write  # with the copies of the values

    @property
    def is_done(self) -> bool:
        """Whether `wait()` returns at once."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint is published, and return its directory.

        Raises:
            RuntimeError: If it could not be written.
        """
        self._thread.join()
        if self._error is not None:
            self._is_told = True
            raise RuntimeError(f"a checkpoint was not saved: {self._error}") from self._error
        assert self._path is not None
        return self._path

    def untold_error(self) -> Exception | None:
        """Wait; return the error if no call has raised it yet."""
        self._thread.join()
        error = None if self._is_told else self._error
        self._is_told = True
        return error


@dataclass(frozen=True)
class LoadedCheckpoint:
    """Facts about a checkpoint that `load_checkpoint` has loaded.

    Attributes:
        step: Number of steps taken when it was saved.
        extra: Rank 0's `extra` of the save; tensors are whole, on the CPU.
        path: Its directory.
        world_size: Number of ranks that saved it.
        is_rng_restored: Whether the states of random number generators were restored.
        nbytes_read: Bytes of tensors that this rank read, those that it read twice counted twice.
    """

    step: int
    extra: Any
    path: Path
    world_size: int
    is_rng_restored: bool
    nbytes_read: int


def save_checkpoint(  # noqa: PLR0913 -- the parts of a run, each by name
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: OneOrMore = None,
    *,
    step: int,
    scheduler: OneOrMore = None,
    scaler: Any = None,
    extra: Any = None,
    keep_last: int | None = None,
    async_op: bool = False,
) -> Path | CheckpointSave:
    """Save the state of a run as a new directory in `path`; call it on all ranks.

    Each rank writes its own shards, and replicated values are written once; nothing is gathered.
    Ranks may own different parameters (pipeline stages, expert parallelism): the checkpoint has
    what any rank has, and loads on another split.
    The states of random number generators (Python, torch, the accelerator, numpy if loaded) are
    saved for each rank. The directory appears, and `load_checkpoint` finds it, only when all of it
    is on disk, so an interrupted save leaves the previous checkpoint in place. While another job
    saves into `path`, rank 0 waits for it. The first call makes a gloo group of all ranks for
    communication. Call it between steps, not inside `unshard_params`.

    Args:
        path: The directory of all checkpoints of the run, on a file system that all ranks share; a
            relative one is rank 0's.
        model: The model, sharded or not.
        optimizer: An optimizer of its parameters, or a list or dict of several.
        step: Number of steps taken.
        scheduler: A learning rate scheduler, or a list or dict of several; anything with a
            `state_dict()`.
        scaler: A `torch.amp.GradScaler`, or anything with a `state_dict()`.
        extra: Numbers, strings, bytes, None, tensors, and lists, tuples, sets and dicts of them,
            for example the position in the data. Rank 0's is saved.
        keep_last: Keep only the last n checkpoints of this run, and of the one it was loaded from.
            Default: keep all.
        async_op: Copy this rank's part to host memory and return; a thread writes it. At most one
            such copy exists: the next call waits for the previous save.

    Returns:
        The checkpoint's directory; with `async_op` a `CheckpointSave` to wait for, also after
        `destroy_process_group()`.

    Raises:
        ValueError: For a value that can't be saved, if ranks pass different arguments, or if they
            have different tensors under one name.
        RuntimeError: If this save, or an earlier one in the background, could not be written. On
            all ranks, and nothing is left behind.
    """
    check_path_order(model, path, "save_checkpoint(path, model, optimizer, step=step)")
    group = _quiet_group()
    with group.agreed():
        _check_arguments(step, keep_last)
        optimizers = as_dict(optimizer)
        objects = {"scheduler": as_dict(scheduler), "scaler": as_dict(scaler)}
        tree, tensors = _describe(model, objects, extra, group.rank)
        model_owners = ModelOwners(model)
        owners = model_owners.of_model(tree["model"], tensors)
    with group.agreed():
        # After the check above, because its collectives use training's groups.
        check_optimizers(model, optimizers)
        states = {name: get_optimizer_state_dict(model, each) for name, each in optimizers.items()}
        tree["optimizer_kinds"] = optimizer_kinds(optimizers)
        tree["optimizer"] = {}
        for name, state in states.items():
            own: dict[str, Tensor] = {}
            if wraps_state(optimizers[name]):
                state["parts"] = take_parts(state["state"])
            encoded = json_tree.encode(state, _prefix("optimizer", name), own)
            tree["optimizer"][name] = encoded
            tensors |= own
            owners |= model_owners.of_optimizer(encoded, own)
        items = list_items(tensors, owners)
    plan = plan_save(group, step, tree, items, SaveArguments(os.fspath(path), keep_last, async_op))
    error: Exception | None = None
    if not async_op:
        return write_checkpoint(group, plan, keep_last, None)
    try:
        plan.copy_to_host()
    except Exception as caught:  # out of memory: raised on all ranks in the background
        error = caught
    save = CheckpointSave(lambda: write_checkpoint(group, plan, keep_last, error))
    group.take_pending(save)
    return save


def load_checkpoint(  # noqa: PLR0913 -- the parts of a run, each by name
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: OneOrMore = None,
    *,
    scheduler: OneOrMore = None,
    scaler: Any = None,
    step: int | None = None,
    strict: bool = True,
) -> LoadedCheckpoint:
    """Load a checkpoint into any sharding and world size; call it on all ranks.

    Each rank reads only its own shards. All of it is read and verified on all ranks before anything
    changes, and then read again, straight into its place, so that a load takes no memory but for
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
    group = _quiet_group()
    told = group.all_messages({"step": step, "strict": strict})
    with group.agreed():
        check_same(told, "step", "strict")
    text: list[str] = group.on_first(lambda: _find(path, step))
    with group.agreed():
        reader = CheckpointReader(Path(text[0]), text[1].encode())
    group.on_first(reader.check_files)
    optimizers, schedulers = as_dict(optimizer), as_dict(scheduler)
    check_names(group, reader, {"optimizer": optimizers, "scheduler": schedulers})
    with group.agreed(), _parsing(reader.folder / METADATA):
        trees = [find_stored(reader, "optimizer")[name] for name in optimizers]
        own = get_model_state_dict(model)
        views = {name: view_optimizers(model, [each]) for name, each in optimizers.items()}
        names = list_names(reader, own, views, trees)
    if strict:
        with group.agreed(), _parsing(reader.folder / METADATA):
            check_kinds(reader, optimizers)
        compare_names(group, reader.folder, names)
    with reader, torch.inference_mode(False):
        with group.agreed(), _parsing(reader.folder / METADATA):
            staged = StagedModel.read(reader, model, own, is_strict=strict)
            states = {
                name: StagedOptimizer.read(reader, own, view, tree, is_strict=strict)
                for (name, view), tree in zip(views.items(), trees, strict=True)
            }
            objects = stage_objects(reader, "scheduler", schedulers, is_strict=strict)
            objects += stage_objects(reader, "scaler", as_dict(scaler), is_strict=strict)
            extra = json_tree.decode(reader.metadata.tree["extra"], reader.read_whole)
            rng_state = _read_rng_state(reader, group)
        _change(group, reader, staged, states, objects)
    if rng_state is not None:
        set_rng_state(rng_state)
    group.continue_run(read_history(reader.folder.parent).get(reader.folder.name, ""))
    return LoadedCheckpoint(
        reader.metadata.step,
        extra,
        reader.folder,
        reader.metadata.world_size,
        rng_state is not None,
        reader.nbytes_read,
    )


# Before both


def _quiet_group() -> HostGroup:
    """Return the group of all ranks when no save uses it; raise the error of one that failed."""
    group = get_host_group()
    pending: CheckpointSave | None = group.take_pending(None)
    error = None if pending is None else pending.untold_error()
    if error is not None:
        error = RuntimeError(f"the save before this call failed: {error}")
    group.agree(error)
    return group


def _check_arguments(step: int, keep_last: int | None) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**12:
        raise ValueError(f"expected step to be the number of steps taken, got {step!r}")
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"expected keep_last to be at least 1, or None for all, got {keep_last}")


# Saving


def _describe(
    model: nn.Module, objects: dict[str, dict[str, Any]], extra: Any, rank: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the tree of all values but the optimizers', and this rank's tensors by name."""
    tensors: dict[str, Tensor] = {}
    tree: dict[str, Any] = {"model": describe_model(model, tensors)}
    for kind, named in objects.items():
        tree[kind] = {
            name: json_tree.encode(each.state_dict(), _prefix(kind, name), tensors)
            for name, each in named.items()
        }
    tree["scheduler_kinds"] = {name: kind_of(each) for name, each in objects["scheduler"].items()}
    # The other ranks' is checked, and not saved.
    tree["extra"] = json_tree.encode(extra, "extra", tensors if rank == 0 else {})
    # Only the rank that wrote it reads it, so it is not in the tree, which all ranks read.
    text = json.dumps(json_tree.encode(get_rng_state(), "rng", {})).encode()
    tensors[_rng_name(rank)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return tree, tensors


def _prefix(kind: str, name: str) -> str:
    return f"{kind}/{name}" if name else kind


def _rng_name(rank: int) -> str:
    return f"rng/{rank}"


# Loading


@contextmanager
def _parsing(path: Path) -> Iterator[None]:
    """Name the file if the body fails on content that no save has written."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        if isinstance(error, ValueError) and str(path.parent) in str(error):
            raise
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _change(
    group: HostGroup,
    reader: CheckpointReader,
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
        check_optimizers(staged.model, optimizers)
        lenient = StateDictOptions(strict=False)
        load_optimizers = [
            prepare_load(staged.model, [each.optimizer], each.state, lenient, is_given_away=True)
            for each in optimizers.values()
        ]

    def fill() -> None:
        staged.fill(reader)
        for each in optimizers.values():
            each.fill(reader)

    with group.agreed(), _half_loaded(reader.folder):
        # Code of users runs before the rest is read.
        for write, state in [*objects, *staged.extra_changes()]:
            write(state)
        for load in load_optimizers:
            load()
        reader.read_again(fill)
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


def _find(path: str | os.PathLike[str], step: int | None) -> list[str]:
    """Return the directory to read, and the text of its metadata."""
    folder = find_checkpoint(path, step)
    if folder is None:
        which = "" if step is None else f" of step {step}"
        raise ValueError(f"there is no complete checkpoint{which} in {Path(path).absolute()}")
    with reading(folder / METADATA):
        text = read_bytes(folder / METADATA)
    return [str(folder.absolute()), text.decode(errors="replace")]


def _read_rng_state(reader: CheckpointReader, group: HostGroup) -> dict[str, Any] | None:
    name = _rng_name(group.rank)
    # A converted checkpoint has none.
    if reader.metadata.world_size != group.size or name not in reader.metadata.tensors:
        return None
    text = bytes(reader.read(name).tolist())
    state: dict[str, Any] = json_tree.decode(json.loads(text), lambda name: None)
    check_rng_state(state)
    return state
