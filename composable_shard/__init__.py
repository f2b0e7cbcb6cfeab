"""Composable sharded training for PyTorch: `fully_shard(module)`, and parameters stay yours."""

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
from composable_shard._layout import FlatLayout
from composable_shard._lazy_init import lazy_init
from composable_shard._op_rules import register_op_rules
from composable_shard._optimizer_state import shard_optimizer_state
from composable_shard._traversal import get_handles, get_root_states, get_states, is_sharded
from composable_shard.api import ShardingStrategy
from composable_shard.fully_shard import fully_shard

__all__ = [
    "FlatLayout",
    "FlatParamHandle",
    "FlatShard",
    "ShardingStrategy",
    "UnshardWork",
    "clip_grad_norm_",
    "fully_shard",
    "get_handles",
    "get_root_states",
    "get_states",
    "is_sharded",
    "lazy_init",
    "no_sync",
    "reshard",
    "set_requires_gradient_sync",
    "shard_optimizer_state",
    "unshard",
]

register_op_rules()
