"""What users call on a sharded module: `unshard`, `unshard_params`, settings.

Read `controls` first, then `full_params` (`unshard_params`).
"""

from composable_shard.module_api.controls import (
    UnshardWork,
    drop_pending_gradients,
    get_pending_gradients,
    no_sync,
    reduce_pending_gradients,
    register_comm_hook,
    register_forward_method,
    reshard,
    set_backward_prefetch,
    set_forward_prefetch,
    set_gradient_divide_factor,
    set_is_last_backward,
    set_requires_all_reduce,
    set_requires_gradient_sync,
    set_reshard_after_backward,
    set_reshard_after_forward,
    set_unshard_in_backward,
    unshard,
)
from composable_shard.module_api.full_params import (
    ParamRange,
    get_param_ranges,
    register_flat_param,
    register_orig_params,
    unshard_params,
    writeback,
)

__all__ = ["ParamRange", "UnshardWork"]
