"""Integers only: where parameters lie in a flat parameter, and which rank holds what.

Read `flat_layout` first, then `granularity` (who owns what) and `ranges`.
"""

from composable_shard.layout.flat_layout import FlatLayout, cut_buckets, round_up
from composable_shard.layout.granularity import balance, block_numel, fullest, is_owned
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
