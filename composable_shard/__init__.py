"""Composable sharded training for PyTorch: `fully_shard(module)`, and parameters stay yours."""

from composable_shard._collectives import count_collectives
from composable_shard._comm_hook import ReductionStage
from composable_shard._controls import (
    UnshardWork,
    no_sync,
    reshard,
    set_requires_gradient_sync,
    unshard,
)
from composable_shard._flat_param import FlatParamHandle
from composable_shard._flat_shard import FlatShard
from composable_shard._grad_norm import clip_grad_norm_
from composable_shard._grad_scaler import ShardedGradScaler
from composable_shard._layout import FlatLayout
from composable_shard._lazy_init import lazy_init
from composable_shard._op_rules import register_op_rules
from composable_shard._optimizer_state import shard_optimizer_state
from composable_shard._ready_rules import by_class, by_size, transformer_blocks
from composable_shard._setters import (
    register_comm_hook,
    set_backward_prefetch,
    set_forward_prefetch,
    set_gradient_divide_factor,
    set_is_last_backward,
    set_requires_all_reduce,
    set_reshard_after_backward,
    set_reshard_after_forward,
)
from composable_shard._sharding_plan import ShardingPlan
from composable_shard._traversal import get_handles, get_root_states, get_states, is_sharded
from composable_shard._unshard_params import (
    register_flat_param,
    register_orig_params,
    unshard_params,
    writeback,
)
from composable_shard.api import Block, MixedPrecisionPolicy, OffloadPolicy, ShardingStrategy
from composable_shard.fully_shard import fully_shard
from composable_shard.shard_model import shard_model

__all__ = [
    "Block",
    "FlatLayout",
    "FlatParamHandle",
    "FlatShard",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReductionStage",
    "ShardedGradScaler",
    "ShardingPlan",
    "ShardingStrategy",
    "UnshardWork",
    "by_class",
    "by_size",
    "clip_grad_norm_",
    "count_collectives",
    "fully_shard",
    "get_handles",
    "get_root_states",
    "get_states",
    "is_sharded",
    "lazy_init",
    "no_sync",
    "register_comm_hook",
    "register_flat_param",
    "register_orig_params",
    "reshard",
    "set_backward_prefetch",
    "set_forward_prefetch",
    "set_gradient_divide_factor",
    "set_is_last_backward",
    "set_requires_all_reduce",
    "set_requires_gradient_sync",
    "set_reshard_after_backward",
    "set_reshard_after_forward",
    "shard_model",
    "shard_optimizer_state",
    "transformer_blocks",
    "unshard",
    "unshard_params",
    "writeback",
]

register_op_rules()
