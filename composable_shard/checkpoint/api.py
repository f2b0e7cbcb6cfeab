"""`save_checkpoint` and `load_checkpoint`."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from composable_shard.checkpoint import json_tree
from composable_shard.checkpoint.file_format import METADATA
from composable_shard.checkpoint.reader import CheckpointReader, find_checkpoint, reading
from composable_shard.checkpoint.run_state import (
    StagedModel,
    check_rng_state,
    describe_model,
    get_rng_state,
    read_optimizer,
    set_rng_state,
)
from composable_shard.checkpoint.writer import list_items, plan_save, write_checkpoint
from composable_shard.comm import HostGroup, get_host_group
from composable_shard.options import StateDictOptions
from composable_shard.state_dict import get_optimizer_state_dict, prepare_load

__all__ = ["CheckpointSave", "LoadedCheckpoint", "load_checkpoint", "save_checkpoint"]


class CheckpointSave:
    """A save that goes on in the background.

    `wait()` returns the directory when it is published, or raises what went wrong, the same on
    every rank. An error nobody waited for is raised by the next save or load. A process that ends
    waits for its save first. The save has a process group of its own, which outlives
    `destroy_process_group()`.
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
        """Wait; return the error that nobody has been told of."""
        self._thread.join()
        error = None if self._is_told else self._error
        self._is_told = True
        return error


_OneOrMore = Any  # of something: itself, a list or a dict of them


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What `load_checkpoint` found besides what it loaded.

    Attributes:
        step: Number of steps taken when it was saved.
        extra: What the saving ranks passed as `extra`; tensors are whole, on the CPU.
        path: Its directory.
        world_size: Ranks that saved it.
        is_rng_restored: Whether random number generators go on where they were.
        nbytes_read: Bytes of tensors that this rank read.
    """

    step: int
    extra: Any
    path: Path
    world_size: int
    is_rng_restored: bool
    nbytes_read: int


def save_checkpoint(  # noqa: PLR0913 -- all that makes up a run, each by name
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: _OneOrMore = None,
    *,
    step: int,
    scheduler: _OneOrMore = None,
    scaler: Any = None,
    extra: Any = None,
    keep_last: int | None = None,
    async_op: bool = False,
) -> Path | CheckpointSave:
    """Save everything a run needs to go on, as a directory of `path`; for all ranks together.

    Each rank writes what it holds, and what several ranks hold is written once: nothing is
    gathered. The states of random number generators (Python, torch, the accelerator, numpy if it
    is loaded) are saved for each rank. The directory appears, and becomes what `load_checkpoint`
    finds, when all of it is on disk: whatever interrupts a save leaves the checkpoint before it.
    The ranks communicate through a gloo group of all ranks, made by the first call. Call it
    between steps, not while full parameters are shown.

    Args:
        path: The directory of all checkpoints of the run, on a file system that all ranks share.
        model: The model, sharded or not.
        optimizer: An optimizer of its parameters, or a list or dict of several.
        step: Number of steps taken.
        scheduler: A learning rate scheduler, or a list or dict; anything with a `state_dict()`.
        scaler: A `torch.amp.GradScaler`, or anything with a `state_dict()`.
        extra: Numbers, strings, bytes, None, tensors, and lists, tuples, sets and dicts of them;
            the data position for example. Rank 0's is saved.
        keep_last: Remove all checkpoints but so many of the last that were written.
        async_op: Copy this rank's part to host memory and return; a thread writes it. One such copy
            exists at a time: the next call waits for the save before.

    Returns:
        The checkpoint's directory; with `async_op` a handle to wait for it, also after
        `destroy_process_group()`.

    Raises:
        ValueError: For something that can't be saved.
        RuntimeError: If it could not be written, or an earlier save in the background was not. On
            all ranks alike, and nothing is left behind.
    """
    group = _quiet_group()
    with group.agreed():
        _check_arguments(step, keep_last)
        objects = {"scheduler": _as_dict(scheduler), "scaler": _as_dict(scaler)}
        tree, tensors = _describe(model, objects, extra, group.rank)
    with group.agreed():
        # Collectives of training's groups, which raise on all ranks: all of them have got here.
        states = {
            name: get_optimizer_state_dict(model, each)
            for name, each in _as_dict(optimizer).items()
        }
        tree["optimizer"] = {
            name: json_tree.encode(state, _prefix("optimizer", name), tensors)
            for name, state in states.items()
        }
        items = list_items(tensors)
    plan = plan_save(group, step, tree, items)
    error: Exception | None = None
    folder = Path(path).absolute()
    if not async_op:
        return write_checkpoint(group, folder, plan, keep_last, None)
    try:
        plan.copy_to_host()
    except Exception as caught:  # out of memory: all ranks hear of it in the background
        error = caught
    save = CheckpointSave(lambda: write_checkpoint(group, folder, plan, keep_last, error))
    group.pending = save
    return save


def load_checkpoint(  # noqa: PLR0913 -- all that makes up a run, each by name
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: _OneOrMore = None,
    *,
    scheduler: _OneOrMore = None,
    scaler: Any = None,
    step: int | None = None,
    strict: bool = True,
) -> LoadedCheckpoint:
    """Load what `save_checkpoint` saved, with any sharding and world size; for all ranks together.

    Each rank reads the parts of the files that hold its shards, once, and no more. Everything is
    read into host memory and verified on all ranks before anything is changed: that takes as many
    bytes as this rank's part of the model, and of the optimizers' new state, which then is theirs.
    Parameters and buffers on the meta device get memory on the mesh's device and the values of one
    flat parameter after another: a rank never holds more than its shards and one unit. Random
    number generators go on where they were if the world size is the same, and are left alone
    otherwise. What the call does not ask for (an optimizer in the checkpoint, when none is passed)
    is not read. Nothing in the files is executed.

    Args:
        path: What `save_checkpoint` got, or one checkpoint in it.
        model: The model, sharded in any way or not at all; on the meta device if it has units.
        optimizer: As it was saved: one, or a list or dict of several.
        scheduler: Likewise.
        scaler: A `torch.amp.GradScaler`; where the checkpoint has none, there is a warning.
        step: Which checkpoint. Default: the one saved last.
        strict: False leaves parameters and buffers alone that the checkpoint does not have, ignores
            those that the model does not have, and casts dtypes.

    Raises:
        ValueError: If there is no such checkpoint, if it is damaged or something else, naming the
            file, or if it does not fit, naming parameters. Raised by all ranks alike, and nothing
            has been changed.
        RuntimeError: If a model without units is on the meta device, or in a forward or backward.
    """
    group = _quiet_group()
    text: list[str] = group.on_first(lambda: _find(path, step))
    with group.agreed():
        reader = CheckpointReader(Path(text[0]), text[1].encode())
    group.on_first(reader.check_files)
    with reader, group.agreed(), _parsing(reader.folder / METADATA):
        staged = StagedModel.read(reader, model, is_strict=strict)
        optimizers = _as_dict(optimizer)
        stored = _stored(reader, "optimizer", optimizers)
        states = [
            read_optimizer(reader, model, each, stored[name], is_strict=strict)
            for name, each in optimizers.items()
        ]
        apply = _stage_objects(reader, "scheduler", _as_dict(scheduler))
        apply += _stage_objects(reader, "scaler", _as_dict(scaler))
        tree = reader.metadata.tree
        extra = json_tree.decode(tree["extra"], reader.read_whole)
        rng_state = _read_rng_state(reader, group)
    if staged.meta is not None:
        staged.apply()  # optimizers look at their parameters
    else:
        apply.insert(0, staged.apply)
    lenient = StateDictOptions(strict=False)
    with group.agreed(), torch.no_grad():
        # Collectives of training's groups, which raise on all ranks: all of them have got here.
        apply += [
            prepare_load(model, [each], state, lenient, is_given_away=True)
            for each, state in zip(optimizers.values(), states, strict=True)
        ]
    for function in apply:
        function()
    if rng_state is not None:
        set_rng_state(rng_state)
    return LoadedCheckpoint(
        reader.metadata.step,
        extra,
        reader.folder,
        reader.metadata.world_size,
        rng_state is not None,
        reader.nbytes_read,
    )


# Preparations of both


def _quiet_group() -> HostGroup:
    """Return the group of all ranks when no save uses it in the background.

    Raises:
        RuntimeError: On all ranks, if that save failed and nobody has been told.
    """
    group = get_host_group()
    pending: CheckpointSave | None = group.pending
    group.pending = None
    error = None if pending is None else pending.untold_error()
    if error is not None:
        error = RuntimeError(f"the save before this call failed: {error}")
    group.agree(error)
    return group


def _as_dict(objects: _OneOrMore) -> dict[str, Any]:
    """Return one object, or several, by name."""
    if objects is None:
        return {}
    if isinstance(objects, Mapping):
        return {str(name): each for name, each in objects.items()}
    if isinstance(objects, Sequence):
        return {str(number): each for number, each in enumerate(objects)}
    return {"": objects}


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
    tree["extra"] = json_tree.encode(extra, "extra", tensors)
    # Read back by the rank that wrote it alone, so it is no part of the tree that all ranks read.
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
    """Name the file where the body finds something that no save has written."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        if isinstance(error, ValueError) and str(path.parent) in str(error):
            raise
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _find(path: str | os.PathLike[str], step: int | None) -> list[str]:
    """Return the directory to read, and the text of its metadata."""
    folder = find_checkpoint(path, step)
    if folder is None:
        which = "" if step is None else f" of step {step}"
        raise ValueError(f"there is no complete checkpoint{which} in {Path(path).absolute()}")
    with reading(folder / METADATA):
        text = (folder / METADATA).read_bytes()
    return [str(folder.absolute()), text.decode(errors="replace")]


def _stored(reader: CheckpointReader, kind: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the encoded states of all objects of a kind.

    Raises:
        ValueError: If they are others than those wanted.
    """
    stored = reader.metadata.tree.get(kind)
    if not isinstance(stored, dict):
        raise ValueError(f"{reader.folder / METADATA} is damaged: it has no '{kind}'")
    if wanted and wanted.keys() != stored.keys():
        names = {side: sorted(each) for side, each in (("got", wanted), ("saved", stored))}
        raise ValueError(
            f"expected the same {kind}s as in {reader.folder}: {names['saved']} were saved (one "
            f"alone is called ''), got {names['got']}"
        )
    return stored


def _stage_objects(
    reader: CheckpointReader, kind: str, objects: dict[str, Any]
) -> list[Callable[[], None]]:
    """Return what loads schedulers or a scaler."""
    if kind == "scaler" and objects and not reader.metadata.tree.get(kind):
        warnings.warn(
            f"{reader.folder} has no state of a scaler: it begins anew", UserWarning, stacklevel=4
        )
        return []
    stored = _stored(reader, kind, objects)
    states = {name: json_tree.decode(stored[name], reader.read_whole) for name in objects if stored}

    def apply() -> None:
        for name, each in objects.items():
            each.load_state_dict(states[name])

    return [apply]


def _read_rng_state(reader: CheckpointReader, group: HostGroup) -> dict[str, Any] | None:
    if reader.metadata.world_size != group.size:
        return None
    text = bytes(reader.read(_rng_name(group.rank)).tolist())
    state: dict[str, Any] = json_tree.decode(json.loads(text), lambda name: None)
    check_rng_state(state)
    return state
