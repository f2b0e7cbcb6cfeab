"""Functions that users call on a sharded module: `unshard`, `unshard_params`, settings.

Read `unsharding` first, then `full_params` (`unshard_params`).
"""

from composable_shard.module_api.forward_methods import register_forward_method
from composable_shard.module_api.full_params import (
    register_flat_param,
    register_orig_params,
    unshard_params,
    writeback,
)
from composable_shard.module_api.pending_gradients import (
    drop_pending_gradients,
    get_pending_gradients,
    reduce_pending_gradients,
)
from composable_shard.module_api.settings import (
    no_sync,
    register_comm_hook,
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
)
from composable_shard.module_api.unsharding import UnshardWork, reshard, unshard

__all__ = ["UnshardWork"]
