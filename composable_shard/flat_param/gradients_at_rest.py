"""The reduced gradients of a handle, as its parameters at rest have them."""

from __future__ import annotations

from itertools import compress, count

import torch
from torch import Tensor

from composable_shard.flat_param.grad_pieces import checked_gradient, local_gradient
from composable_shard.flat_param.handle import FlatParamHandle
from composable_shard.tensor import (
    FlatShard,
    note_write_to_local,
    own_gradient,
    reduced_gradient,
    set_gradient,
)


def drop_gradient(handle: FlatParamHandle, index: int) -> None:
    """Drop the gradient at rest of one parameter, or of `ALL`, also one that waits."""
    handle.shown.form.drop_gradient(handle, index)


def has_gradients(handle: FlatParamHandle) -> list[bool]:
    """Return which parameters have a sharded gradient on this rank."""
    for shown in handle.shown.at_rest:
        grad = reduced_gradient(shown.sharded)
        if grad is not None:
            checked_gradient(shown.sharded, grad)
    return handle.shown.form.has_gradients()


def gradient_shard(handle: FlatParamHandle) -> Tensor:
    """Return a copy of all sharded gradients, shape `(own_numel,)`, zero where none is."""
    whole = torch.zeros_like(handle.shard.values)
    for shown in handle.shown.at_rest:
        grad = reduced_gradient(shown.sharded)
        if isinstance(grad, FlatShard):
            shown.slice_of(whole).copy_(grad._local)
    return whole


def set_gradients(handle: FlatParamHandle, shard: Tensor, dropped: list[bool]) -> None:
    """Overwrite the sharded gradients that exist, from shape `(own_numel,)`.

    Gradients that are `dropped` are set to None instead.
    """
    for shown in handle.shown.at_rest:
        grad = reduced_gradient(shown.sharded)
        if isinstance(grad, FlatShard):
            note_write_to_local(grad)
            grad._local.copy_(shown.slice_of(shard))
    for index in compress(count(), dropped):
        drop_gradient(handle, index)


def write_unsharded_gradients(handle: FlatParamHandle) -> None:
    """Add `.grad` of full parameters to the gradients at rest; drop those where there was none."""
    whole, used = torch.zeros_like(handle.shard.values), has_gradients(handle)
    form, left = handle.shown.form, handle.full.params.aliases.left
    for index, entry in enumerate(handle.entries):
        gradient = None if entry.unsharded is None else own_gradient(entry.unsharded)
        used[index] = gradient is not None and (used[index] or left.pop(index, False))
        if gradient is None or entry.unsharded is None:
            continue
        set_gradient(entry.unsharded, None)
        if used[index] and not entry.spec.is_owned_by_other_rank:  # its owner has the same
            piece = entry.spec.slice(local_gradient(gradient, entry.spec))
            entry.slice_of(whole).copy_(piece)
    form.add_gradients([each.slice_of(whole) for each in form.at_rest], used)
