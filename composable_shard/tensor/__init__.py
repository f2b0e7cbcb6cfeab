"""`FlatShard` and the rules by which ops run on it.

Read `shard_spec` (which range), `flat_shard` (the tensor) and `pointwise_rules` (most rules) first.
`op_rules` fills the table, `rule_table`.
"""

from composable_shard.tensor.checkpointable import (
    cloned,
    copy_attributes,
    share_attributes,
    user_attributes,
)
from composable_shard.tensor.concatenation import is_joinable, joined, parts_of
from composable_shard.tensor.direct_ops import DIRECT_OPS
from composable_shard.tensor.flat_shard import (
    DTensorSlots,
    FlatShard,
    FlatShardOfDTensor,
    explain_read,
    is_distributed,
    is_owned_by_other_rank,
    is_trainable,
    kind_of,
    own_gradient,
    rebind,
    set_gradient,
    wrap,
)
from composable_shard.tensor.gathering import gathered_in_step
from composable_shard.tensor.gradient_rules import (
    NeverStepped,
    Slices,
    group_slices,
    step_hooks,
    total_norms,
)
from composable_shard.tensor.labels import ParamLabel, UnitLabel
from composable_shard.tensor.late_reads import LATE_READS, is_alone_in_memory
from composable_shard.tensor.op_rules import register_op_rules
from composable_shard.tensor.operands import (
    find_places,
    has_fitting_shape,
    local_part,
    needs_gather,
    note_write_to_local,
    region_of,
    slice_given,
)
from composable_shard.tensor.pending import (
    HiddenGradient,
    hide_pending,
    reduced_gradient,
    refuse_graphs,
    show_pending,
)
from composable_shard.tensor.reduction_rules import combine, reduction_groups
from composable_shard.tensor.shard_spec import ShardSpec, flat_spec, refuse_flat_dtensors
from composable_shard.tensor.watched_ops import begin_late_reads, end_late_reads
from composable_shard.tensor.write_guard import COMPARED, WriteGuard
