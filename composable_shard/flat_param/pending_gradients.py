"""Gradients that wait for a reduction between two backwards, and what users see of them.

[Note: Pending gradients] says what that is. A backward begins with `unmark_pending`, which drops
gradients set to None since, and ends with `mark_pending`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from composable_shard.flat_param.grad_pieces import move_shard
from composable_shard.flat_param.handle import FlatParamHandle
from composable_shard.tensor import hide_pending, own_gradient, show_pending


def mark_pending(handle: FlatParamHandle) -> None:
    """Make `.grad` a PendingGradient for each parameter at rest with a waiting gradient."""
    grads = handle.grads
    used = [index for index, is_used in enumerate(grads.used) if is_used]
    if grads.marks or not used:
        return
    for param, indices in handle.shown.form.holders(used):
        show_pending(param)
        grads.marks.append((param, indices))


def keep_left_gradients(handle: FlatParamHandle) -> None:
    """Keep gradients that users set on the full parameters, to wait for a reduction."""
    grads = handle.grads
    params = enumerate(entry.unsharded for entry in handle.entries)
    left = [index for index, each in params if each is not None and own_gradient(each) is not None]
    if grads.packing is not None and (left or (True in grads.arrived and not grads.is_unsynced)):
        with torch.inference_mode(False), torch.no_grad():
            unmark_pending(handle)
            for index in left:
                grads.pack(index, may_overwrite=False)
            grads.leave_unsynced()
            mark_pending(handle)
    handle.full.params.aliases.left.clear()


def unmark_pending(handle: FlatParamHandle) -> None:
    """Undo `mark_pending`; drop waiting gradients whose `.grad` users set or deleted since."""
    with torch.no_grad():
        while handle.grads.marks:
            param, indices = handle.grads.marks.pop()
            if not hide_pending(param):
                drop_waiting(handle, indices)


def drop_unpublished(handle: FlatParamHandle) -> None:
    """Drop all gradients but the published ones after an error, those that wait and in flight too.

    Parameters at rest show none that wait, even after an interrupted `mark_pending`.
    """
    for each in handle.shown.at_rest:
        hide_pending(each.sharded)
    handle.grads.marks.clear()
    handle.grads.drop()


def drop_waiting(handle: FlatParamHandle, indices: Iterable[int]) -> None:
    """Drop the waiting gradients of some parameters."""
    grads, deferred = handle.grads, handle.grads.reduction.deferred
    for index in indices:
        grads.arrived[index] = grads.was_used[index] = False
        if deferred is not None:
            start, end = grads.layout.local_range(index, handle.shard_group.rank)
            deferred[start:end].zero_()
    if grads.places is not None and True not in grads.arrived:
        grads.end_round()
        grads.free_buffers()


@contextmanager
def unmarked(handle: FlatParamHandle) -> Iterator[None]:
    """Make `.grad` the reduced part inside the block; PendingGradients are back after it."""
    is_shown = bool(handle.grads.marks)
    try:
        unmark_pending(handle)
        yield
    finally:
        if is_shown:
            mark_pending(handle)


def drop_pending(handle: FlatParamHandle) -> None:
    """Drop all waiting gradients; `.grad` keeps the part that was reduced before."""
    unmark_pending(handle)
    with torch.no_grad():
        drop_waiting(handle, range(len(handle.entries)))


def pending_values(handle: FlatParamHandle) -> Sequence[Tensor | None]:
    """Return this rank's waiting gradients, for each parameter in its dense shape.

    Each is the sum of the rank's own gradients; for gradients whose all-reduce was postponed, the
    mean over the shard group, which costs one all-gather.
    """
    grads, group = handle.grads, handle.shard_group
    found: list[Tensor | None] = []
    for index, has_arrived in enumerate(grads.arrived):
        value = None
        if grads.places is not None and grads.packing is not None and has_arrived:
            value = (grads.places[index] / grads.packing.scale).to(handle.shard.values.dtype)
        found.append(value)
    deferred = grads.reduction.deferred
    if deferred is None:
        return found
    deferred = move_shard(deferred, grads.layout, handle.layout, group.rank)
    # The gather is a collective, so all ranks come here, also those that have dropped their own
    # gradients: `deferred` outlives them, with zeros in their place.
    full = handle.shard.new_full()
    handle.shard.gather_into(full, deferred)
    full.mul_((handle.settings.gradient_divide_factor or group.num_ranks) / group.size)
    for index, (entry, is_used) in enumerate(zip(handle.entries, grads.used, strict=True)):
        if is_used:
            spec, start = entry.spec, handle.layout.offsets[index]
            part = full.as_strided(spec.dense_shape, spec.dense_stride, start)
            own = found[index]
            found[index] = part if own is None else own.add_(part)
    return found
