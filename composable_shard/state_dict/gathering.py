"""Gather full values of shards, tensor by tensor, and scatter them again."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from composable_shard.comm import DONE, Waitable, collectives, is_exchange
from composable_shard.flat_param import FlatParamHandle
from composable_shard.layout import FlatLayout, intersect
from composable_shard.runtime import tensor_groups
from composable_shard.tensor import FlatShard, ShardSpec


def copied(value: Any, device: torch.device | None) -> Any:
    """Return a whole copy of a value, on the device or where it is; what is no tensor as it is."""
    if isinstance(value, FlatShard | DTensor):
        value = value.full_tensor()
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(value.device if device is None else device, copy=True)


_MIN_ALONE_NBYTES = 1 << 16  # a message costs about as much as a copy of 40 kB


@dataclass(frozen=True)
class Shares:
    """Shards to gather, in the layout of a handle."""

    handle: FlatParamHandle  # gives the layout
    # This rank's, shape `(layout.shard_numel,)`, any dtype; None for the handle's own
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

    One gather for each item, or one all-gather without `to_first`. Nothing is gathered where the
    unsharded buffer already holds the main values.

    [Note: Straight to its place]
    On backends with point-to-point messages, each large parameter is received into the memory that
    is returned. Small neighbouring parameters are received together and copied out. The next
    handle's messages are in flight meanwhile, unless they need more memory than the tensors
    returned for them. So no rank holds more than one handle's full values besides the result.

    Args:
        shares: In the same order on all ranks.
        to_first: Only the first rank receives.
        device: Of the result; None for the unit's device.
        dtype: Of floating-point tensors in the result; None keeps theirs.

    Yields:
        Each item with full tensors by index, each in its own memory; no tensors on ranks that do
        not receive.
    """
    pending: deque[_Arrival] = deque()
    for each in shares:
        arrival = _start(each, to_first=to_first)
        pending.append(arrival)
        while len(pending) > int(arrival.leaves_room(dtype)):
            yield pending[0].shares, pending.popleft().finish(device, dtype, to_first=to_first)
    while pending:
        yield pending[0].shares, pending.popleft().finish(device, dtype, to_first=to_first)


@dataclass
class _Arrival:
    """Full values in flight."""

    shares: Shares  # the gathered shards
    # Memory, its offset in the layout, and its parameters; empty on ranks that do not receive
    parts: list[tuple[Tensor, int, Sequence[int]]]
    work: Waitable = DONE  # to wait for before the memory is read
    # Whether the memory has no other owner, so that it may be returned without a copy
    is_own: bool = False

    def leaves_room(self, dtype: torch.dtype | None) -> bool:
        """Return whether the memory in flight is at most that of the tensors returned for it."""
        if not self.parts:
            return True
        received = self.parts[0][0].dtype
        return self.is_own and (dtype is None or received.itemsize <= dtype.itemsize)

    def finish(
        self, device: torch.device | None, dtype: torch.dtype | None, *, to_first: bool
    ) -> dict[int, Tensor]:
        """Wait, and return the tensors by index."""
        handle = self.shares.handle
        self.work.wait()
        keeps = bool(self.parts) and (_is_first(handle) or not to_first)
        found: dict[int, Tensor] = {}
        while self.parts:
            memory, start, indices = self.parts.pop(0)
            may_keep = self.is_own and len(indices) == 1
            for index in indices:
                first = handle.layout.offsets[index] - start
                part = memory[first : first + handle.layout.numels[index]]
                value = handle.entries[index].spec.unflatten(part)
                if isinstance(value, DTensor):
                    value = value.full_tensor()  # a collective of the ranks that receive
                if keeps:
                    found[index] = value.to(
                        device or handle.shard.device,
                        dtype if dtype and value.is_floating_point() else value.dtype,
                        copy=not may_keep,
                    )
        return found


def _is_first(handle: FlatParamHandle) -> bool:
    """Return whether this rank is the first of the handle's ranks, tensor-parallel ones too."""
    groups = tensor_groups([handle])
    return handle.shard_group.is_first and all(group.rank() == 0 for group in groups)


def _indices(shares: Shares) -> Sequence[int]:
    return range(len(shares.handle.entries)) if shares.indices is None else shares.indices


def _start(shares: Shares, *, to_first: bool) -> _Arrival:
    handle, shard, indices = shares.handle, shares.shard, _indices(shares)
    group = handle.shard_group
    is_receiver = group.is_first or not to_first
    if shard is None:
        handle.adopt_changes()
        shard = handle.local_shard
        if handle.is_sharded and handle.full.is_current and not handle.full.is_cast:
            handle.full.wait()
            return _Arrival(shares, [(handle.unsharded, 0, indices)] if is_receiver else [])
    if not handle.is_sharded:
        return _Arrival(shares, [(shard, 0, indices)] if is_receiver else [])
    if is_exchange(group.group, handle.shard.device):
        return _start_straight(shares, shard, to_first=to_first)
    output = None
    if is_receiver:
        numel = handle.layout.padded_numel
        output = torch.empty(numel, dtype=shard.dtype, device=handle.shard.device)
    work = handle.shard.gather_into(output, shard, to_first=to_first)
    return _Arrival(shares, [] if output is None else [(output, 0, indices)], work)


def _start_straight(shares: Shares, shard: Tensor, *, to_first: bool) -> _Arrival:
    """Start receiving, each large parameter in its own memory. [Note: Straight to its place]"""
    layout, group = shares.handle.layout, shares.handle.shard_group
    if to_first and not group.is_first_replica:
        return _Arrival(shares, [])
    shard = shares.handle.shard.to_device(shard)
    runs = _runs(layout, _indices(shares), shard.itemsize)
    ranges = [
        (layout.offsets[run[0]], layout.offsets[run[-1]] + layout.numels[run[-1]]) for run in runs
    ]
    outputs: list[list[Tensor]] = []
    parts: list[tuple[Tensor, int, Sequence[int]]] = []
    if group.is_first or not to_first:
        memory = [shard.new_empty(end - start) for start, end in ranges]
        starts = [start for start, _ in ranges]
        parts = list(zip(memory, starts, runs, strict=True))
        for rank in range(group.size):
            owned = layout.shard_range(rank)
            outputs.append(_pieces(memory, starts, ranges, owned))
    owned = layout.shard_range(group.rank)
    pieces = _pieces([shard] * len(ranges), [owned[0]] * len(ranges), ranges, owned)
    nbytes = sum(end - start for start, end in ranges) * shard.itemsize
    work = collectives.gather_pieces(
        outputs, pieces, nbytes, group.group, to_first=to_first, device=shard.device
    )
    return _Arrival(shares, parts, work, is_own=True)


def _runs(layout: FlatLayout, indices: Sequence[int], itemsize: int) -> list[list[int]]:
    """Group the wanted parameters: each large one alone, neighbouring small ones together.

    Example: numels `(4, 4, 10**6, 4)` give `[[0, 1], [2], [3]]`.
    """
    wanted = set(indices)

    def key(index: int) -> int:
        return index if layout.numels[index] * itemsize >= _MIN_ALONE_NBYTES else -1

    runs = [
        [index for index in run if index in wanted]
        for _, run in itertools.groupby(range(len(layout.numels)), key)
    ]
    return [run for run in runs if run]


def _pieces(
    tensors: Sequence[Tensor],
    starts: Sequence[int],
    ranges: Sequence[tuple[int, int]],
    owned: tuple[int, int],
) -> list[Tensor]:
    """View the owned part of each range, where it is not empty, in the range's tensor."""
    found = []
    for tensor, start, each in zip(tensors, starts, ranges, strict=True):
        low, high = intersect(each, owned)
        if low < high:
            found.append(tensor[low - start : high - start])
    return found


def scatter_full(
    handle: FlatParamHandle,
    given: Mapping[int, Tensor],
    indices: Sequence[int],
    dtype: torch.dtype,
    *,
    groups: Sequence[dist.ProcessGroup] = (),
) -> Tensor:
    """Scatter the first rank's full tensors; return this rank's shard, zero elsewhere.

    One scatter of `layout.padded_numel` elements, one broadcast for each axis of replicas, and one
    for each parameter and axis of tensor-parallel meshes.

    Args:
        given: Full tensors by index; empty on all ranks but the first.
        indices: Of `given` on the first rank; the same on all ranks.

    Returns:
        Shape `(layout.shard_numel,)`.
    """
    shard = torch.zeros_like(handle.local_shard, dtype=dtype)
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
    # src_data_rank=None: cut locally, because every rank has the same values.
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
