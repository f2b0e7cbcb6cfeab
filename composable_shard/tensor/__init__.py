"""`FlatShard` and the rules by which ops run on it.

Read `shard_spec` (which range), `flat_shard` (the tensor) and `pointwise_rules` (most rules) first.
`op_rules` fills the table.
"""

from composable_shard.tensor.flat_shard import (
    CutTensor,
    DTensorSlots,
    FlatShard,
    FlatShardOfDTensor,
    is_elsewhere,
    runs_of,
    wrap,
)
from composable_shard.tensor.gradient_rules import (
    JoinedShards,
    Slices,
    join_shards,
    norms_of,
    note_owned,
    total_norms,
)
from composable_shard.tensor.op_rules import register_op_rules
from composable_shard.tensor.operands import (
    has_fitting_shape,
    needs_gather,
    note_write,
    slice_given,
)
from composable_shard.tensor.reduction_rules import reduction_groups
from composable_shard.tensor.shard_spec import ParamLabel, ShardSpec, WriteGuard
from composable_shard.tensor.tensor_region import (
    Box,
    Region,
    find_places,
    local_part,
    overlap,
    region_of,
    whole,
    whole_box,
)

__all__ = [
    "Box",
    "CutTensor",
    "DTensorSlots",
    "FlatShard",
    "FlatShardOfDTensor",
    "JoinedShards",
    "ParamLabel",
    "Region",
    "ShardSpec",
    "Slices",
    "WriteGuard",
    "find_places",
    "has_fitting_shape",
    "is_elsewhere",
    "join_shards",
    "local_part",
    "needs_gather",
    "norms_of",
    "note_owned",
    "note_write",
    "overlap",
    "reduction_groups",
    "region_of",
    "register_op_rules",
    "runs_of",
    "slice_given",
    "total_norms",
    "whole",
    "whole_box",
    "wrap",
]
