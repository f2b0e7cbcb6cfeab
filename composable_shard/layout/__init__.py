"""Integers only: where parameters lie in a flat parameter, and which rank holds what.

Read `flat_layout` first, then `owners` and `ranges`.
"""

from composable_shard.layout.flat_layout import (
    FlatLayout,
    GranularityOption,
    block_numel,
    check_option,
    cut_buckets,
    granularity_of,
    intersect,
)
from composable_shard.layout.owners import balance, fullest
from composable_shard.layout.ranges import Box, boxes_of_range

__all__ = [
    "Box",
    "FlatLayout",
    "GranularityOption",
    "balance",
    "block_numel",
    "boxes_of_range",
    "check_option",
    "cut_buckets",
    "fullest",
    "granularity_of",
    "intersect",
]
