"""Gradients of a flat parameter that wait for a reduction, between two backwards.

[Note: Pending gradients] says what users see of them. A backward begins with `settle_pending`,
which drops what was set to None since, and ends with `mark_pending`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from composable_shard.flat_param.grad_pieces import move_shard
from composable_shard.flat_param.handle import FlatParamHandle
from composable_shard.tensor import PendingNotice, hide_pending, show_pending


def needs_reduction(handle: FlatParamHandle) -> bool:
    """Return whether gradients of the handle wait for a reduction.

    The same on all ranks that ran the same backwards, whatever each of them has dropped since.
    """
    return handle.grads.is_unsynced or handle.grads.reduction.partial is not None


def mark_pending(handle: FlatParamHandle, notice: PendingNotice) -> None:
    """Let `.grad` at rest stand for what waits, of each parameter that any of it is about."""
    grads, shown = handle.grads, handle.shown
    used = [index for index, is_used in enumerate(grads.used) if is_used]
    if grads.marks or not used:
        return
    if shown.shows_flat and shown.flat is not None:
        flat = shown.flat.sharded
        grads.marks.append((flat, show_pending(flat, notice), used))
        return
    for index in used:
        param = handle.entries[index].sharded
        grads.marks.append((param, show_pending(param, notice), [index]))


def keep_left_gradients(handle: FlatParamHandle) -> None:
    """Let gradients that somebody has set on the full parameters wait for a reduction."""
    grads = handle.grads
    params = enumerate(entry.unsharded for entry in handle.entries)
    left = [index for index, param in params if param is not None and param.grad is not None]
    if grads.is_bound and (left or (True in grads.arrived and not grads.is_unsynced)):
        settle_pending(handle)
        with torch.no_grad():
            for index in left:
                grads.pack(index, may_overwrite=False)
        grads.postpone()
        mark_pending(handle, PendingNotice())


def settle_pending(handle: FlatParamHandle) -> None:
    """Undo `mark_pending`; drop what was dropped since, or set to zero."""
    grads = handle.grads
    with torch.no_grad():
        while grads.marks:
            param, state, indices = grads.marks.pop()
            is_kept = hide_pending(param, state)
            if is_kept and not state.is_zeroed:
                continue
            for index in indices:
                _drop_one(handle, index, keeps_zeros=is_kept)


def _drop_one(handle: FlatParamHandle, index: int, *, keeps_zeros: bool) -> None:
    """Drop what waits of the gradient of parameter `index`, or make it zeros."""
    grads, partial = handle.grads, handle.grads.reduction.partial
    if keeps_zeros and grads.views is not None and grads.arrived[index]:
        grads.views[index].zero_()
    if partial is not None:
        start, end = grads.layout.local_range(index, handle.shard_group.rank)
        partial[start:end].zero_()
    grads.local.drop_one(index, keeps_zeros=keeps_zeros)
    if not keeps_zeros:
        grads.arrived[index] = grads.was_used[index] = False
    if grads.views is not None and True not in grads.arrived:
        grads.close()
        grads.free_buffers()


@contextmanager
def settled(handle: FlatParamHandle) -> Iterator[None]:
    """Let `.grad` be the reduced part inside the block, and stand for what waits again after it."""
    marks = handle.grads.marks
    notice = marks[0][1].notice if marks else None
    settle_pending(handle)
    try:
        yield
    finally:
        if notice is not None:
            mark_pending(handle, notice)


def drop_pending(handle: FlatParamHandle) -> None:
    """Drop all that waits; `.grad` is what was reduced before."""
    settle_pending(handle)
    with torch.no_grad():
        for index in range(len(handle.entries)):
            _drop_one(handle, index, keeps_zeros=False)


def pending_values(handle: FlatParamHandle) -> Sequence[Tensor | None]:
    """Return this rank's part of what waits, of each parameter in its dense shape.

    That is the sum of its own gradients; of those whose all-reduce was put off, the mean over the
    shard group. One all-gather where there are such.
    """
    grads, group = handle.grads, handle.shard_group
    found: list[Tensor | None] = []
    for index, has_arrived in enumerate(grads.arrived):
        value = grads.local.get(index)
        if grads.views is not None and has_arrived:
            value = grads.views[index] / grads.prescale
        found.append(None if value is None else value.to(handle.local_shard.dtype, copy=True))
    partial = grads.reduction.partial
    if partial is None:
        return found
    partial = move_shard(partial, grads.layout, handle.layout, group.rank)
    full = handle.shard.new_full()
    work = handle.shard.gather_into(full, partial, to_first=False)
    if work is not None:
        work.wait()
    full.mul_((grads.reduction.divide_factor or group.num_ranks) / group.size)
    for index, (entry, is_used) in enumerate(zip(handle.entries, grads.used, strict=True)):
        if is_used:
            spec, start = entry.spec, handle.layout.offsets[index]
            part = full.as_strided(spec.dense_shape, spec.dense_stride, start)
            own = found[index]
            found[index] = part if own is None else own.add_(part)
    return found
