"""Units and trees: one forward, one backward, prefetch, lazy init.

Read `state` (a unit, a tree), `forward` and `backward` first.
"""

from composable_shard.runtime.buckets import Buckets
from composable_shard.runtime.buffers import (
    BufferBroadcast,
    check_can_broadcast,
    place_buffers,
    watch_meta_buffers,
)
from composable_shard.runtime.calls import check_is_idle
from composable_shard.runtime.casts import Boundary, cast_arguments, cast_buffers, cast_output
from composable_shard.runtime.forward import post_forward, pre_forward
from composable_shard.runtime.initialization import lazy_init, lazy_init_params, share_context
from composable_shard.runtime.ownership import settle_owners
from composable_shard.runtime.prefetch import (
    apply_policy,
    find_small_group,
)
from composable_shard.runtime.state import (
    ShardState,
    StateRef,
    TrainingState,
    attach_state,
    find_applied,
    read_state,
)
from composable_shard.runtime.traversal import (
    ModuleTree,
    get_handles,
    get_root_states,
    get_states,
    has_forward,
    is_sharded,
    iter_unmanaged_modules,
    rename,
    select_states,
    tensor_groups,
)
from composable_shard.runtime.unit_end import release_handle

__all__ = [
    "Boundary",
    "Buckets",
    "BufferBroadcast",
    "ModuleTree",
    "ShardState",
    "StateRef",
    "TrainingState",
    "apply_policy",
    "attach_state",
    "cast_arguments",
    "cast_buffers",
    "cast_output",
    "check_can_broadcast",
    "check_is_idle",
    "find_applied",
    "find_small_group",
    "get_handles",
    "get_root_states",
    "get_states",
    "has_forward",
    "is_sharded",
    "iter_unmanaged_modules",
    "lazy_init",
    "lazy_init_params",
    "place_buffers",
    "post_forward",
    "pre_forward",
    "read_state",
    "release_handle",
    "rename",
    "select_states",
    "settle_owners",
    "share_context",
    "tensor_groups",
    "watch_meta_buffers",
]
