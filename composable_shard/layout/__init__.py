"""Integers only: where parameters lie in a flat parameter, and which rank holds which elements.

Read `flat_layout` first: where ranks cut. `ownership` chooses owners of whole parameters; `regions`
is arithmetic of ranges and boxes.
"""

from composable_shard.layout.buckets import cut_buckets
from composable_shard.layout.flat_layout import (
    FlatLayout,
    block_numel,
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
