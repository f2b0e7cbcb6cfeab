"""Integers only: where parameters lie in a flat parameter, and which rank holds what.

Read `flat_layout` first (where ranks cut, who owns what), then `ranges`.
"""

from composable_shard.layout.flat_layout import (
    FlatLayout,
    balance,
    block_numel,
    cut_buckets,
    fullest,
    is_owned,
    round_up,
)
from composable_shard.layout.ranges import (
    Bounds,
    Box,
    Region,
    intersect,
    memory_order,
    overlap,
    whole,
    whole_box,
)

__all__ = [
    "Bounds",
    "Box",
    "FlatLayout",
    "Region",
    "balance",
    "block_numel",
    "cut_buckets",
    "fullest",
    "intersect",
    "is_owned",
    "memory_order",
    "overlap",
    "round_up",
    "whole",
    "whole_box",
]
