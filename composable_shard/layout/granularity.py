"""The meaning of each granularity: how many elements of a parameter stay together."""

from __future__ import annotations

from math import prod

from torch import Tensor

from composable_shard.options import Block, Granularity


def is_owned(granularity: Granularity) -> bool:
    """Return whether one rank holds the whole parameter; its owner is balanced over the ranks."""
    return granularity == "param"


def block_numel(dense: Tensor, granularity: Granularity) -> int:
    """Return how many consecutive elements of a dense tensor, in memory order, stay together.

    A row is what one index of the outermost dimension in memory selects: of the first one, unless
    the tensor is laid out otherwise (channels_last, a transposed weight).
    """
    if isinstance(granularity, Block):
        return granularity.numel
    if granularity == "element" or dense.numel() == 0:
        return 1
    if is_owned(granularity):
        return dense.numel()
    outermost = max(range(dense.dim()), key=lambda dim: dense.stride(dim), default=None)
    if outermost is None:
        return 1
    return prod(size for dim, size in enumerate(dense.shape) if dim != outermost)
