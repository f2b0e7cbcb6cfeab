"""Which elements of a tensor this rank holds: of a shard, a DTensor or a plain tensor.

[Note: Regions] says how that is counted.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composable_shard.layout import Region, whole
from composable_shard.tensor.flat_shard import FlatShard
from composable_shard.tensor.shard_spec import local_box

__all__ = ["find_places", "local_part", "region_of"]


def region_of(tensor: Tensor) -> Region:
    """Return which of the logical tensor's elements this rank holds.

    Raises:
        ValueError: For a DTensor whose local values are terms of a sum, or whose layout torch can
            not tell.
        NotImplementedError: For a FlatShard of such a DTensor.
    """
    if isinstance(tensor, FlatShard):
        return tensor._shard_spec.region
    if isinstance(tensor, DTensor):
        if any(placement.is_partial() for placement in tensor.placements):
            raise ValueError(
                "expected a DTensor of shards or replicas, got placements "
                f"{tuple(tensor.placements)}: redistribute it first"
            )
        box = local_box(tensor.shape, tensor.device_mesh, tensor.placements)
        return Region(box, tuple(range(tensor.ndim)), 0, tensor.to_local().numel())
    return whole(tensor.shape)


def local_part(tensor: Tensor) -> Tensor:
    """Return the elements of `region_of(tensor)`, 1-D and dense, without copying if it can."""
    if isinstance(tensor, FlatShard):
        return tensor._local.detach()  # 1-D also where this rank holds all of it
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().contiguous().view(-1)


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
