"""Composable sharded training for PyTorch: `fully_shard(module)`, and parameters stay yours."""

from composable_shard._background_save import CheckpointSave
from composable_shard._checkpoint import LoadedCheckpoint, load_checkpoint, save_checkpoint
from composable_shard._checkpoint_reader import find_checkpoint
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
from composable_shard._safetensors_load import load_safetensors
from composable_shard._safetensors_save import save_safetensors
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
from composable_shard._state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from composable_shard._state_options import StateDictOptions
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
    "CheckpointSave",
    "FlatLayout",
    "FlatParamHandle",
    "FlatShard",
    "LoadedCheckpoint",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReductionStage",
    "ShardedGradScaler",
    "ShardingPlan",
    "ShardingStrategy",
    "StateDictOptions",
    "UnshardWork",
    "by_class",
    "by_size",
    "clip_grad_norm_",
    "count_collectives",
    "find_checkpoint",
    "fully_shard",
    "get_handles",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_root_states",
    "get_states",
    "is_sharded",
    "lazy_init",
    "load_checkpoint",
    "load_safetensors",
    "no_sync",
    "register_comm_hook",
    "register_flat_param",
    "register_orig_params",
    "reshard",
    "save_checkpoint",
    "save_safetensors",
    "set_backward_prefetch",
    "set_forward_prefetch",
    "set_gradient_divide_factor",
    "set_is_last_backward",
    "set_model_state_dict",
    "set_optimizer_state_dict",
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
