"""The reduced gradients of a handle, as its parameters at rest have them in either form."""

from __future__ import annotations

from itertools import compress, count

import torch
from torch import Tensor

from composable_shard.flat_param.grad_pieces import (
    add_gradients,
    add_used,
    checked_gradient,
    local_gradient,
    wrap_all,
)
from composable_shard.flat_param.handle import FlatParamHandle
from composable_shard.flat_param.kept_params import ALL
from composable_shard.flat_param.pending_gradients import drop_waiting, unmarked
from composable_shard.tensor import FlatShard, own_gradient, reduced_gradient, set_gradient, wrap


def drop_gradient(handle: FlatParamHandle, index: int) -> None:
    """Drop the gradient at rest of one parameter, or of `ALL`, also one that waits."""
    flat = handle.shown.flat
    if not handle.shown.shows_flat or flat is None:
        handle.entries[index].sharded.grad = None
        return
    indices = range(len(handle.entries)) if index == ALL else [index]
    with torch.inference_mode(False), torch.no_grad(), unmarked(handle):
        drop_waiting(handle, indices)
        grad, used = flat.sharded.grad, has_gradients(handle)
        for each in indices:
            used[each] = False
            if isinstance(grad, FlatShard):
                handle.entries[each].slice_of(grad._local).zero_()
        flat.used, flat.sharded.grad = used, None
        if isinstance(grad, FlatShard) and any(used):
            flat.sharded.grad = wrap(grad._local, flat.spec)  # stand-ins know it by its identity


def has_gradients(handle: FlatParamHandle) -> list[bool]:
    """Return which parameters have a sharded gradient, in either form, on this rank."""
    for shown in handle.shown.at_rest:
        grad = reduced_gradient(shown.sharded)
        if grad is not None:
            checked_gradient(shown.sharded, grad)
    if handle.shown.shows_flat and handle.shown.flat is not None:
        flat = handle.shown.flat
        is_there, used = reduced_gradient(flat.sharded) is not None, flat.used
        # If no backward set it, the user did, and it counts for all parameters.
        return [is_there and (is_used or not any(used)) for is_used in used]
    return [reduced_gradient(entry.sharded) is not None for entry in handle.entries]


def gradient_shard(handle: FlatParamHandle) -> Tensor:
    """Return a copy of all sharded gradients, shape `(layout.shard_numel,)`, zero where none is."""
    whole = torch.zeros_like(handle.local_shard)
    for shown in handle.shown.at_rest:
        grad = reduced_gradient(shown.sharded)
        if isinstance(grad, FlatShard):
            shown.slice_of(whole).copy_(grad._local)
    return whole


def set_gradients(handle: FlatParamHandle, shard: Tensor, dropped: list[bool]) -> None:
    """Overwrite the sharded gradients that exist, from shape `(layout.shard_numel,)`.

    Works in either form; gradients that are `dropped` are set to None instead.
    """
    for shown in handle.shown.at_rest:
        grad = reduced_gradient(shown.sharded)
        if isinstance(grad, FlatShard):
            grad._local.copy_(shown.slice_of(shard))
    for index in compress(count(), dropped):
        drop_gradient(handle, index)


def write_unsharded_gradients(handle: FlatParamHandle) -> None:
    """Add `.grad` of full parameters to the gradients at rest; drop those where there was none."""
    whole, used = torch.zeros_like(handle.local_shard), has_gradients(handle)
    at_rest, left, flat = handle.shown.at_rest, handle.full.params.aliases.left, handle.shown.flat
    for index, entry in enumerate(handle.entries):
        gradient = None if entry.unsharded is None else own_gradient(entry.unsharded)
        used[index] = gradient is not None and (used[index] or left.pop(index, False))
        if gradient is None or entry.unsharded is None:
            continue
        set_gradient(entry.unsharded, None)
        if used[index] and not entry.spec.is_owned_by_other_rank:  # its owner has the same
            piece = entry.spec.slice(local_gradient(gradient, entry.spec))
            entry.slice_of(whole).copy_(piece)
    if handle.shown.shows_flat and flat is not None:
        used = add_used(flat, used)
    add_gradients(at_rest, wrap_all([each.slice_of(whole) for each in at_rest], at_rest), used)
