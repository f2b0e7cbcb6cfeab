"""Whole parameters, and what has their shape, to the first rank and from it, a unit at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from composable_shard import _collectives
from composable_shard._flat_param import FlatParamHandle
from composable_shard._param_names import tensor_meshes
from composable_shard._shard_spec import ShardSpec

__all__ = ["ReceiveBuffer", "gather_full", "gather_full_params", "is_first", "scatter_full"]


def is_first(handle: FlatParamHandle) -> bool:
    """Return whether this rank is the first of the handle's ranks, tensor-parallel ones too."""
    is_first_part = all(not any(mesh.get_coordinate() or ()) for mesh in tensor_meshes([handle]))
    return handle.shard_group.is_first and is_first_part


class ReceiveBuffer:
    """Memory that one gather after another receives into: fresh memory costs more than a copy."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory of shape `(numel,)` that holds anything; what was taken before is lost."""
        nbytes = numel * dtype.itemsize
        if self._memory.numel() < nbytes or self._memory.device != device:
            self._memory = self._memory.new_empty(0)  # before the larger one is there
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._memory[:nbytes].view(dtype)


def gather_full_params(
    handle: FlatParamHandle,
    *,
    to_first: bool,
    device: torch.device | None,
    buffer: ReceiveBuffer | None = None,
) -> list[Tensor] | None:
    """Return the full main values of a handle's parameters, as `gather_full` does.

    Nothing is gathered where the unsharded buffer holds them.
    """
    handle.adopt_changes()
    if handle.is_sharded and handle.is_current and not handle.is_cast:
        handle.wait_unshard()
        full = handle.unsharded if handle.shard_group.is_first or not to_first else None
        return _cut(handle, full, range(len(handle.entries)), device, to_first)
    indices = range(len(handle.entries))
    return gather_full(
        handle, handle.local_shard, indices, to_first=to_first, device=device, buffer=buffer
    )


def gather_full(
    handle: FlatParamHandle,
    shard: Tensor,
    indices: Sequence[int],
    *,
    to_first: bool,
    device: torch.device | None,
    buffer: ReceiveBuffer | None = None,
) -> list[Tensor] | None:
    """Return full tensors of which the ranks hold shards laid out as the handle's.

    One gather, or without `to_first` one all-gather, of `layout.padded_numel` elements.

    Args:
        handle: Whose layout it is.
        shard: Shape `(layout.shard_numel,)`, of any dtype.
        indices: Of the parameters that are wanted.
        to_first: Only the first rank gets them.
        device: Where to; None: where the unit computes.
        buffer: What receives. Default: fresh memory.

    Returns:
        For each index a tensor of the parameter's shape, in memory of its own; None on the other
        ranks.
    """
    is_receiver = handle.shard_group.is_first or not to_first
    output = None
    if not handle.is_sharded:
        output = shard if is_receiver else None
    else:
        if is_receiver:
            memory = buffer or ReceiveBuffer()
            output = memory.take(handle.layout.padded_numel, shard.dtype, handle.device)
        gather = handle.gather_into(output, shard, to_first=to_first)
        if gather is not None:
            gather.wait()
    return _cut(handle, output, indices, device, to_first)


def _cut(
    handle: FlatParamHandle,
    full: Tensor | None,
    indices: Sequence[int],
    device: torch.device | None,
    to_first: bool,
) -> list[Tensor] | None:
    if full is None:
        return None
    device = handle.device if device is None else device
    keeps = is_first(handle) or not to_first
    pieces = []
    for index in indices:
        start = handle.layout.offsets[index]
        part = full[start : start + handle.layout.numels[index]]
        value = handle.entries[index].spec.unflatten(part)
        if isinstance(value, DTensor):
            value = value.full_tensor()  # of all ranks that hold parts of it and came here
        if keeps:
            pieces.append(value.to(device, copy=True))
    return pieces if keeps else None


def scatter_full(
    handle: FlatParamHandle,
    given: Mapping[int, Tensor],
    indices: Sequence[int],
    dtype: torch.dtype,
    *,
    meshes: Sequence[DeviceMesh] = (),
) -> Tensor:
    """Give each rank its shard of full tensors that the first rank has.

    One scatter of `layout.padded_numel` elements, and a broadcast for each axis of copies; where
    there are tensor-parallel meshes, one more for each parameter and axis of those.

    Args:
        handle: Whose layout the shard gets.
        given: By index, each of the parameter's shape; empty on the other ranks.
        indices: What the first rank has; the same on all ranks. The rest of the shard is zero.
        dtype: Of the shard.
        meshes: The tensor-parallel ones of the model.

    Returns:
        Shape `(layout.shard_numel,)`.
    """
    shard = torch.zeros_like(handle.local_shard, dtype=dtype)
    full = None
    if handle.shard_group.is_first:
        full = torch.zeros(handle.layout.padded_numel, dtype=dtype, device=handle.device)
        for index in indices:
            spec, start = handle.entries[index].spec, handle.layout.offsets[index]
            dense = _dense_part(given.get(index), spec, full, meshes)
            full[start : start + spec.numel].copy_(spec.flatten(dense))
    handle.write_slice(shard, full, from_first=True)
    return shard


def _dense_part(
    value: Tensor | None, spec: ShardSpec, like: Tensor, meshes: Sequence[DeviceMesh]
) -> Tensor:
    """Return what this rank's data-parallel group shares of a tensor that the first rank has."""
    groups = [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)]
    if not groups:
        assert value is not None
        return value.reshape(spec.shape)
    whole = torch.empty(spec.shape, dtype=like.dtype, device=like.device)
    if value is not None:
        whole.copy_(value.reshape(spec.shape))
    for group in groups:
        _collectives.broadcast(whole, 0, group).wait()
    if spec.tensor_parallel is None:
        return whole
    mesh, placements = spec.tensor_parallel
    # src_data_rank=None: cut locally, as every rank has the same values.
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
