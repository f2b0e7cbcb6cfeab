"""Copies of what a save in the background writes, so that training may overwrite it.

[Note: Staging memory]
Training waits while a save copies what it will write. Most of that time goes to fresh memory, whose
pages the system must find and clear. So a rank's copies stay where they are, and the next save
overwrites them: it has waited for the one before. Of shards in host memory, which nobody can write
unseen, the copies are made late, [Note: Late reads]: by the thread that writes, beside the next
forward, and of what it has not come to before the optimizer's step, by the step.

From an accelerator the copies go to pinned memory, in the order of the current stream: the call
only issues them, what the program issues next comes after them, and the thread waits for them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from composable_shard.checkpoint.draft import Item
from composable_shard.comm import HostGroup, alloc_host
from composable_shard.flat_param import FlatParamHandle
from composable_shard.tensor import (
    FlatShard,
    FlatShardOfDTensor,
    WriteGuard,
    begin_late_reads,
    end_late_reads,
    is_alone_in_memory,
    kind_of,
    local_part,
)
from composable_shard.torch_private import no_dispatch, storage_of

_BLOCK_NBYTES = 1 << 28  # of pinned memory, if so much is needed
_ALIGNMENT = 64  # bytes, of tensors in a block
_LATE_NBYTES = 1 << 16  # of the smallest copy that is made late; others take no longer than a note


class _LateCopy:
    """A copy that is made once, by the thread of the save or before the source is written.

    A write waits for the thread, but the thread for no write: the handler of a signal may wait for
    the save, and the write that it has interrupted goes on after that. So the thread makes a copy
    that is under way once more. Either it sees that the copy is made, or the write sees the thread.
    """

    __slots__ = ("_both", "_lock", "_process", "_thread_has_left")

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._both: tuple[Tensor, Tensor] | None = source, target
        self._lock = threading.RLock()  # of writes; the handler of a signal may write, too
        self._thread_has_left: threading.Event | None = None  # None: it has not come
        self._process = os.getpid()

    def make(self) -> None:
        """Make it for a write, or wait until it is made."""
        if self._process != os.getpid():
            return  # in a fork, whose memory is its own, nobody would release the lock
        self._wait_for_thread()
        with self._lock:
            self._copy()
        self._wait_for_thread()  # it may have come meanwhile

    def make_in_thread(self) -> None:
        """Make it for the save, or nothing if it is made."""
        self._thread_has_left = threading.Event()
        try:
            self._copy()
        finally:
            self._thread_has_left.set()

    def give_up(self) -> None:
        """Let the source go, whose copy nobody will need, and the target."""
        self._both = None

    def _copy(self) -> None:
        if self._both is None:
            return
        with no_dispatch(), torch.inference_mode(False), torch.no_grad():
            if self._both is not None:  # asked again: a handler may have made it, and written
                source, target = self._both
                target.copy_(source)
        self._both = None  # last: what an interrupt has left out is made by the next call

    def _wait_for_thread(self) -> None:
        if self._thread_has_left is not None:
            self._thread_has_left.wait()


class LateCopies:
    """The copies of one save that are not done when its call returns.

    Late ones, a parameter's beside those of its state, and those that devices were given.
    """

    def __init__(self) -> None:
        self._by_spec: dict[int, list[_LateCopy]] = {}  # by address
        self._by_guard: dict[WriteGuard, list[_LateCopy]] = {}
        self._by_storage: dict[int, Callable[[], None]] = {}
        self._issued: list[torch.Event] = []  # after the copies from each device
        self._is_given_up = False

    def add_issued(self, device: torch.device) -> None:
        """Note the copies from a device that its current stream has been given."""
        self._issued.append(torch.accelerator.current_stream(device).record_event())

    def add(self, shard: FlatShard, target: Tensor) -> None:
        """Note a copy to make."""
        made = _LateCopy(local_part(shard), target)
        self._by_spec.setdefault(id(shard._shard_spec), []).append(made)
        if shard._guard is None:
            self._by_storage[storage_of(shard._local)] = made.make
        else:
            self._by_guard.setdefault(shard._guard, []).append(made)

    def begin(self) -> None:
        """From now on a write makes the copies of what it overwrites."""
        for guard, copies in self._by_guard.items():
            guard.add_read(partial(_make, copies))
        if self._by_storage:
            begin_late_reads(self._by_storage)

    def make(self) -> None:
        """Make all that are not made yet, and wait for those of devices."""
        try:
            for event in self._issued:
                event.synchronize()
            for each in self._all():
                each.make_in_thread()
        finally:
            self._end()
        if self._is_given_up:
            raise RuntimeError("save_checkpoint was interrupted on this rank")

    def give_up(self) -> None:
        """Let `make` raise, if it is under way, and leave writes alone."""
        self._is_given_up = True  # first: `make` must not return if a copy has been left out
        self._end()

    def _all(self) -> list[_LateCopy]:
        return [each for copies in self._by_spec.values() for each in copies]

    def _end(self) -> None:
        for each in self._all():
            each.give_up()
        if self._by_storage:
            end_late_reads()


def _make(copies: Sequence[_LateCopy]) -> None:
    for each in copies:
        each.make()


class _PinnedMemory:
    """Pinned memory for several tensors, as torch rounds each block up to a power of two."""

    def __init__(self, nbytes: int) -> None:
        self._block = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._start = 0
        self._left = nbytes  # that will be taken

    def take(self, like: Tensor) -> Tensor:
        """Return memory for a tensor like another one."""
        end = self._start + like.nbytes
        if end > len(self._block):
            numel = max(like.nbytes, min(self._left, _BLOCK_NBYTES))
            self._block = alloc_host(numel, torch.uint8, is_pinned=True)
            self._start, end = 0, like.nbytes
        found = self._block[self._start : end].view(like.dtype).view(like.shape)
        self._start = _aligned(end)
        self._left -= _aligned(like.nbytes)
        return found


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def copy_to_host(group: HostGroup, items: Sequence[Item]) -> LateCopies:
    """Give items memory for copies, and make those that can't be late. [Note: Staging memory]"""
    names = {item.name for item in items}
    kept = {name: x for name, x in group.swap_staging({}).items() if name in names}  # frees others
    pinned = _PinnedMemory(sum(_pinned_nbytes(x, kept) for x in items if not x.values.is_cpu))
    late, devices = LateCopies(), set[torch.device]()
    # No inference tensor, which a later save, outside of inference mode, could not write.
    with torch.inference_mode(False), torch.no_grad():
        for item in items:
            value, memory = item.values, kept.pop(item.name, None)
            # First: a part is another tensor on the same memory.
            shard = value if isinstance(value, FlatShard) and _is_written_in_sight(value) else None
            part = local_part(value)
            if type(part) is not Tensor:
                item.values = part.to("cpu", copy=True)
                continue
            if memory is None or (memory.shape, memory.dtype) != (part.shape, part.dtype):
                memory = _alloc(part) if part.is_cpu else pinned.take(part)
            elif not part.is_cpu and not memory.is_pinned():  # the model has been moved
                memory = pinned.take(part)
            item.values = memory
            if shard is not None:
                late.add(shard, memory)
            elif part.is_cpu:
                memory.copy_(part)
            else:  # torch would conjugate on the host, before the copy has arrived
                memory.copy_(part.resolve_conj().resolve_neg(), non_blocking=True)
                devices.add(part.device)
        for device in devices:
            late.add_issued(device)
    group.swap_staging({x.name: x.values for x in items if type(x.values) is Tensor})
    return late


def _pinned_nbytes(item: Item, kept: Mapping[str, Tensor]) -> int:
    """Return about how many bytes of pinned memory an item on a device needs anew."""
    memory, numel, dtype = kept.get(item.name), item.region.numel, item.values.dtype
    if memory is not None and (memory.numel(), memory.dtype) == (numel, dtype):
        return 0 if memory.is_pinned() else _aligned(numel * dtype.itemsize)
    return _aligned(numel * dtype.itemsize)


def _alloc(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="cpu")


def _is_written_in_sight(shard: FlatShard) -> bool:
    """Return whether every write to a shard comes by us: [Note: Late reads]."""
    spec, guard = shard._shard_spec, shard._guard
    is_usual = kind_of(shard) in (FlatShard, FlatShardOfDTensor)
    if spec.is_whole or spec.owner is not None or not is_usual:
        return False  # ops on whole shards may return plain views
    local = shard._local
    if not local.is_cpu or local.nbytes < _LATE_NBYTES:
        return False
    if guard is None:
        return is_alone_in_memory(local)
    handle = None if guard.owner is None else guard.owner()
    if not isinstance(handle, FlatParamHandle) or guard.is_handed_out:
        return False
    # Full parameters show the memory of a kept buffer, and other data may have been assigned.
    return storage_of(handle.unsharded) != storage_of(handle.shard.values) == storage_of(local)
