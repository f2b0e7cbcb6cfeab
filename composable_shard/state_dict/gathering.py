"""Gather full values of shards, tensor by tensor, and scatter them again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard.comm import collectives
from composable_shard.dtensors import distribute, is_dtensor
from composable_shard.flat_param import FlatParamHandle
from composable_shard.runtime import tensor_groups
from composable_shard.tensor import ShardSpec, is_distributed


def copied(value: Any, device: torch.device | None) -> Any:
    """Return a whole copy of a tensor; `device` None keeps its device. Other values stay."""
    if is_distributed(value):
        value = value.full_tensor()
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(value.device if device is None else device, copy=True)


class Shares(NamedTuple):
    """Shards to gather, in the layout of a handle."""

    handle: FlatParamHandle  # gives the layout
    # This rank's, shape `(own_numel,)`, any dtype; None for the handle's own
    shard: Tensor | None = None
    # Parameters to return, the same on all ranks; None for all
    indices: Sequence[int] | None = None
    kind: str = ""  # a label for the caller


def gather_full(
    shares: Iterable[Shares],
    *,
    to_first: bool,
    device: torch.device | None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[Shares, dict[int, Tensor]]]:
    """Gather shards; yield the full tensors of one handle after another.

    One all-gather for each item. Nothing is gathered where the unsharded buffer already holds the
    main values. No rank holds more than one handle's full values besides the result.

    Args:
        shares: In the same order on all ranks.
        to_first: Only the first rank keeps values.
        device: Of the result; None for the unit's device.
        dtype: Of floating-point tensors in the result; None keeps theirs.

    Yields:
        Each item with full tensors by index, each in its own memory; no tensors on ranks that do
        not keep them.
    """
    for each in shares:
        yield each, _gather(each, device, dtype, to_first=to_first)


def _gather(
    shares: Shares, device: torch.device | None, dtype: torch.dtype | None, *, to_first: bool
) -> dict[int, Tensor]:
    handle, layout, group = shares.handle, shares.handle.layout, shares.handle.shard_group
    full = _full_buffer(handle, shares.shard)
    if to_first and not group.is_first:
        return {}
    keeps = not to_first or all(each.rank() == 0 for each in tensor_groups([handle]))
    found: dict[int, Tensor] = {}
    for index in range(len(handle.entries)) if shares.indices is None else shares.indices:
        part = full[layout.offsets[index] :][: layout.numels[index]]
        value = handle.entries[index].spec.unflatten(part)
        if is_dtensor(value):
            value = value.full_tensor()  # a collective of the ranks that receive
        if keeps:
            new_dtype = dtype if dtype and value.is_floating_point() else value.dtype
            found[index] = value.to(device or handle.shard.device, new_dtype, copy=True)
    return found


def _full_buffer(handle: FlatParamHandle, shard: Tensor | None) -> Tensor:
    """Return the full values of a shard, None for the handle's own."""
    if shard is None:
        handle.adopt_changes()
        shard = handle.shard.values
        if handle.is_sharded and handle.full.is_current and not handle.full.is_cast:
            handle.full.wait()
            return handle.unsharded
    if not handle.is_sharded:
        return shard
    numel = handle.layout.padded_numel
    full = torch.empty(numel, dtype=shard.dtype, device=handle.shard.device)
    handle.shard.gather_into(full, shard)
    return full


def scatter_full(
    handle: FlatParamHandle,
    given: Mapping[int, Tensor],
    indices: Sequence[int],
    dtype: torch.dtype,
    *,
    groups: Sequence[dist.ProcessGroup] = (),
) -> Tensor:
    """Send the first rank's full tensors; return this rank's shard of them, zero elsewhere.

    One broadcast of `layout.padded_numel` elements for each process group, and one for each
    parameter and axis of tensor-parallel meshes.

    Args:
        given: Full tensors by index; empty on all ranks but the first.
        indices: Of `given` on the first rank; the same on all ranks.

    Returns:
        Shape `(own_numel,)`.
    """
    shard = torch.zeros_like(handle.shard.values, dtype=dtype)
    full = None
    if handle.shard_group.is_first:
        full = torch.zeros(handle.layout.padded_numel, dtype=dtype, device=handle.shard.device)
        for index in indices:
            spec, start = handle.entries[index].spec, handle.layout.offsets[index]
            dense = _dense_part(given.get(index), spec, full, groups)
            full[start : start + spec.numel].copy_(spec.flatten(dense))
    handle.shard.write_slice(shard, full, from_first=True)
    return shard


def _dense_part(
    value: Tensor | None, spec: ShardSpec, like: Tensor, groups: Sequence[dist.ProcessGroup]
) -> Tensor:
    """Return the dense tensor of this rank's shard group, cut from the first rank's full one."""
    if not groups:
        assert value is not None
        return value.reshape(spec.shape)
    whole = torch.empty(spec.shape, dtype=like.dtype, device=like.device)
    if value is not None:
        whole.copy_(value.reshape(spec.shape))
    for group in groups:
        collectives.broadcast(whole, 0, group).wait()
    if spec.tensor_parallel is None:
        return whole
    mesh, placements = spec.tensor_parallel
    return distribute(whole, mesh, placements).to_local()
