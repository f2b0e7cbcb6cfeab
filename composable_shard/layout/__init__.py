"""Integers only: where parameters lie in a flat parameter, and which rank holds what.

Read `flat_layout` first: where ranks cut. `ownership` says who owns what, `regions` is arithmetic.
"""

from composable_shard.layout.flat_layout import (
    FlatLayout,
    block_numel,
    cut_buckets,
    is_owned,
    round_up,
)
from composable_shard.layout.ownership import balance, fullest
from composable_shard.layout.regions import (
    Bounds,
    Box,
    Region,
    intersect,
    memory_order,
    overlap,
    whole,
    whole_box,
)
