"""Which elements of a tensor one rank holds, whatever it is: a shard, a DTensor or a plain tensor.

[Note: Regions]
A region is a range of the elements of a box of the logical tensor, counted in the order in which
they lie in memory. A FlatShard is a range of the whole tensor, one of a DTensor of a
tensor-parallel mesh is a range of this rank's box, a DTensor is a whole box, and a plain tensor is
everything. Between two regions of the same box and order the overlap is one range; otherwise each
element's place is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from composable_shard.layout import intersect
from composable_shard.tensor.flat_shard import FlatShard
from composable_shard.torch_private import compute_local_shape_and_global_offset

__all__ = ["Box", "Overlap", "Region", "find_places", "local_part", "overlap", "region_of"]


Box = tuple[tuple[int, int], ...]


class Overlap(NamedTuple):
    """What two regions share, where it is one range in both."""

    target_start: int  # counted from the target's first element
    source_start: int  # likewise
    numel: int


@dataclass(frozen=True)
class Region:
    """Elements `[start, end)` of a box of a tensor, in memory order. [Note: Regions]

    Attributes:
        box: A half-open range of indices for each dim of the logical tensor.
        order: The dims, that with the largest stride first.
        start: Counted in the box.
        end: Likewise.
    """

    box: Box
    order: tuple[int, ...]
    start: int
    end: int

    @property
    def numel(self) -> int:
        """Elements of the range."""
        return self.end - self.start


def whole(shape: Sequence[int]) -> Region:
    """Return the region of all elements, row by row."""
    return Region(whole_box(shape), tuple(range(len(shape))), 0, torch.Size(shape).numel())


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box of all elements."""
    return tuple((0, size) for size in shape)


def region_of(tensor: Tensor) -> Region:
    """Return which of the logical tensor's elements this rank holds.

    Raises:
        ValueError: For a DTensor whose local values are terms of a sum, or whose layout torch can
            not tell.
    """
    if isinstance(tensor, FlatShard):
        spec = tensor._shard_spec
        box = whole_box(spec.shape)
        if spec.tensor_parallel is not None:
            box = _local_box(spec.shape, *spec.tensor_parallel)
        return Region(box, _memory_order(spec.dense_shape, spec.dense_stride), *spec.local_range)
    if isinstance(tensor, DTensor):
        box = _local_box(tensor.shape, tensor.device_mesh, tensor.placements)
        numel = tensor.to_local().numel()
        return Region(box, tuple(range(tensor.ndim)), 0, numel)
    return whole(tensor.shape)


def local_part(tensor: Tensor) -> Tensor:
    """Return the elements of `region_of(tensor)`, 1-D and dense, without copying if it can."""
    if isinstance(tensor, FlatShard):
        return tensor._local.detach()  # 1-D also where this rank holds all of it
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().contiguous().view(-1)


def _local_box(shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]) -> Box:
    if any(placement.is_partial() for placement in placements):
        raise ValueError(
            f"expected a DTensor of shards or replicas, got placements {tuple(placements)}: "
            "redistribute it first"
        )
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple((offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def _memory_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return the dims in the order of memory; where their order makes no difference, ascending."""
    dims = [dim for dim, size in enumerate(shape) if size > 1]
    by_stride = sorted(dims, key=lambda dim: -stride[dim])
    if by_stride == dims or 0 in shape:
        return tuple(range(len(shape)))
    return (*by_stride, *(dim for dim, size in enumerate(shape) if size == 1))


def overlap(target: Region, source: Region) -> Overlap | None:
    """Return what two regions share, or None where that need not be one range."""
    if target.box != source.box or target.order != source.order:
        return None
    start, end = intersect((target.start, target.end), (source.start, source.end))
    return Overlap(start - target.start, start - source.start, end - start)


def find_places(target: Region, source: Region, start: int, end: int) -> tuple[Tensor, Tensor]:
    """Find the elements of a part of one region in another.

    Args:
        target: A region.
        source: Another one, of the same tensor.
        start: The part's first element, counted from the target's first.
        end: Its end.

    Returns:
        The places of those that are in `source`, counted from the target's first element, and
        their places there, counted from the source's first; both int64, 1-D.
    """
    rest = torch.arange(target.start + start, target.start + end)
    indices: dict[int, Tensor] = {}
    for dim in reversed(target.order):
        low, high = target.box[dim]
        indices[dim] = rest % (high - low) + low
        rest = rest // (high - low)
    place = torch.zeros_like(rest)
    is_there = torch.ones_like(rest, dtype=torch.bool)
    for dim in source.order:
        low, high = source.box[dim]
        is_there &= (indices[dim] >= low) & (indices[dim] < high)
        place = place * (high - low) + (indices[dim] - low)
    is_there &= (place >= source.start) & (place < source.end)
    found = is_there.nonzero().view(-1)
    return found + start, place[found] - source.start
