"""Units and trees: one forward, one backward, prefetch, lazy init.

Read `unit` (a unit, a tree), `forward` and `backward_pass` first.
"""

from composable_shard.runtime.buffer_broadcast import BufferBroadcast, check_can_broadcast
from composable_shard.runtime.casts import Boundary, cast_arguments, cast_buffers, cast_output
from composable_shard.runtime.containers import iter_tensors
from composable_shard.runtime.forward import check_is_idle, post_forward, pre_forward
from composable_shard.runtime.gathers import release_handle
from composable_shard.runtime.initialization import lazy_init, lazy_init_params
from composable_shard.runtime.launched_gathers import divide_in_runs
from composable_shard.runtime.lockstep import compare_setting
from composable_shard.runtime.membership import join_owners, new_context, remember_trees
from composable_shard.runtime.meta_buffers import place_buffers, watch_meta_buffers
from composable_shard.runtime.names import first_names, remember_names, rename
from composable_shard.runtime.reshard_policy import ReshardPolicy
from composable_shard.runtime.training_state import TrainingState
from composable_shard.runtime.tree import (
    attach_state,
    attach_unit,
    find_applied,
    get_handles,
    get_root_states,
    get_states,
    is_sharded,
    iter_unmanaged_modules,
    managed_params,
    read_state,
    select_states,
    tensor_groups,
)
from composable_shard.runtime.unit import ShardState
from composable_shard.runtime.whole_model import check_whole
