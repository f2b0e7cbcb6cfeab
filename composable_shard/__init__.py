"""Composable sharded training for PyTorch: `fully_shard(module)`, and parameters stay yours."""

from composable_shard.checkpoint import (
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from composable_shard.comm import count_collectives
from composable_shard.construct import fully_shard
from composable_shard.flat_param import FlatParamHandle
from composable_shard.huggingface import load_safetensors, save_safetensors
from composable_shard.layout import FlatLayout
from composable_shard.module_api import (
    drop_pending_gradients,
    get_pending_gradients,
    no_sync,
    reduce_pending_gradients,
    register_comm_hook,
    register_flat_param,
    register_forward_method,
    register_orig_params,
    reshard,
    set_backward_prefetch,
    set_forward_prefetch,
    set_gathers_at_rest,
    set_gradient_divide_factor,
    set_is_last_backward,
    set_requires_all_reduce,
    set_requires_gradient_sync,
    set_reshard_after_backward,
    set_reshard_after_forward,
    set_unshard_in_backward,
    unshard,
    unshard_params,
    writeback,
)
from composable_shard.optim import (
    ShardedGradScaler,
    clip_grad_norm_,
    shard_optimizer_state,
)
from composable_shard.options import (
    Block,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictOptions,
)
from composable_shard.planning import describe, estimate, shard_model
from composable_shard.runtime import get_handles, get_root_states, get_states, is_sharded, lazy_init
from composable_shard.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    iter_full_params,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from composable_shard.tensor import FlatShard, register_op_rules

__version__ = "0.1.0"


__all__ = [
    "Block",
    "FlatLayout",
    "FlatParamHandle",
    "FlatShard",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardedGradScaler",
    "ShardingStrategy",
    "StateDictOptions",
    "clip_grad_norm_",
    "count_collectives",
    "describe",
    "drop_pending_gradients",
    "estimate",
    "find_checkpoint",
    "fully_shard",
    "get_handles",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_pending_gradients",
    "get_root_states",
    "get_states",
    "is_sharded",
    "iter_full_params",
    "lazy_init",
    "load_checkpoint",
    "load_safetensors",
    "no_sync",
    "reduce_pending_gradients",
    "register_comm_hook",
    "register_flat_param",
    "register_forward_method",
    "register_orig_params",
    "reshard",
    "save_checkpoint",
    "save_safetensors",
    "set_backward_prefetch",
    "set_forward_prefetch",
    "set_gathers_at_rest",
    "set_gradient_divide_factor",
    "set_is_last_backward",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_requires_all_reduce",
    "set_requires_gradient_sync",
    "set_reshard_after_backward",
    "set_reshard_after_forward",
    "set_unshard_in_backward",
    "shard_model",
    "shard_optimizer_state",
    "unshard",
    "unshard_params",
    "writeback",
]

register_op_rules()
