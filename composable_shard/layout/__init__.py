"""Integers only: where parameters lie in a flat parameter, and which rank holds what.

Read `flat_layout`: where ranks cut, who owns what, and the arithmetic of ranges and boxes.
"""

from composable_shard.layout.flat_layout import (
    Bounds,
    Box,
    FlatLayout,
    Region,
    balance,
    block_numel,
    cut_buckets,
    fullest,
    intersect,
    is_owned,
    memory_order,
    overlap,
    round_up,
    whole,
    whole_box,
)
