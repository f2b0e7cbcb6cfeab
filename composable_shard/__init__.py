"""Composable sharded training for PyTorch: `fully_shard(module)`, and parameters stay yours."""

from importlib import import_module
from typing import TYPE_CHECKING

from composable_shard.comm import count_collectives
from composable_shard.construct import fully_shard
from composable_shard.flat_param import FlatParamHandle
from composable_shard.layout import FlatLayout
from composable_shard.options import (
    Block,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictOptions,
)
from composable_shard.runtime import get_handles, get_root_states, get_states, is_sharded, lazy_init
from composable_shard.tensor import FlatShard, register_op_rules

if TYPE_CHECKING:
    from composable_shard.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
    from composable_shard.huggingface import load_safetensors, save_safetensors
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
    from composable_shard.optim import ShardedGradScaler, clip_grad_norm_, shard_optimizer_state
    from composable_shard.planning import describe, estimate, shard_model
    from composable_shard.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
        iter_full_params,
        set_model_state_dict,
        set_optimizer_state_dict,
    )
else:
    # A step needs none of these packages: they are imported when a name is first used. The names
    # of `module_api` are all others of `__all__`.
    _PACKAGES = {
        **dict.fromkeys(("find_checkpoint", "load_checkpoint", "save_checkpoint"), "checkpoint"),
        **dict.fromkeys(("load_safetensors", "save_safetensors"), "huggingface"),
        **dict.fromkeys(("ShardedGradScaler", "clip_grad_norm_", "shard_optimizer_state"), "optim"),
        **dict.fromkeys(("describe", "estimate", "shard_model"), "planning"),
        **dict.fromkeys(("get_model_state_dict", "set_model_state_dict"), "state_dict"),
        **dict.fromkeys(("get_optimizer_state_dict", "set_optimizer_state_dict"), "state_dict"),
        "iter_full_params": "state_dict",
    }

    def __getattr__(name):
        if name in _PACKAGES.values():
            return import_module(f"{__name__}.{name}")
        if name not in _PACKAGES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(f"{__name__}.{_PACKAGES[name]}"), name)
        return value

    def __dir__():
        return sorted({*globals(), *_PACKAGES, *_PACKAGES.values()})


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

if not TYPE_CHECKING:
    _LATE = {name for name in __all__ if name not in globals() and name not in _PACKAGES}
    _PACKAGES |= dict.fromkeys(_LATE, "module_api")

register_op_rules()
