"""The handle of one flat parameter: its shard, its full values, its gradients.

`handle` ties four parts together: the local shard and the full values (`full_values`: this rank's
part, the unsharded buffer and its states; `sources`: how the buffer is filled), `shown` (which
parameters modules show; `form`: which ones users hold) and `gradients` (packing, reduction,
`.grad`). Read `handle`, `full_values` and `gradients` first. Options are in rooms of their own:
`flat_form`, `pending_gradients`, `scopes` and `scope_params`, `user_hooks`, `precision`,
`host_gradient`, `two_stages`, `owners`, `extended_gathers`.
"""

import composable_shard.flat_param.profiler_ranges  # answers to profilers
from composable_shard.flat_param.entries import ParamEntry, dense_stride
from composable_shard.flat_param.extended_gathers import Extension
from composable_shard.flat_param.flat_form import (
    FORMS,
    check_can_show_flat,
    check_can_show_originals,
    show_flat,
    show_originals,
)
from composable_shard.flat_param.form import AskedForm
from composable_shard.flat_param.full_values import HAVE_VALUES, FullState, FullValues
from composable_shard.flat_param.gradient_reduction import ScratchPool
from composable_shard.flat_param.gradients import drop_unpacked
from composable_shard.flat_param.gradients_at_rest import (
    drop_gradient,
    gradient_shard,
    has_gradients,
    set_gradients,
    write_unsharded_gradients,
)
from composable_shard.flat_param.handle import FlatParamHandle, handle_of
from composable_shard.flat_param.kept_params import Kept, follow_writes
from composable_shard.flat_param.memory import MemoryPlan, plan_layout
from composable_shard.flat_param.owners import balance_owners
from composable_shard.flat_param.param_classes import UnshardedParameter
from composable_shard.flat_param.pending_gradients import (
    drop_pending,
    drop_unpublished,
    keep_left_gradients,
    mark_pending,
    pending_values,
    unmark_pending,
    unmarked,
)
from composable_shard.flat_param.precision import Precision
from composable_shard.flat_param.readers import (
    FORWARD,
    GRAPH,
    HELD,
    HIDDEN_ALIAS,
    LATE_GRAPH,
    NESTED,
    RESHARD,
)
from composable_shard.flat_param.round import Round
from composable_shard.flat_param.scope_params import ScopeParams, is_shown_by_scope
from composable_shard.flat_param.scopes import (
    check_scope,
    enter_scope,
    keep_scope_flags,
    leave_scope,
    shows_scope_originals,
)
from composable_shard.flat_param.shown import Shown
from composable_shard.flat_param.slots import (
    ModuleItems,
    Slot,
    find_kept_items,
    find_slots,
    slot_key,
)
from composable_shard.flat_param.swapping import give_back, swap_keeping_hooks
from composable_shard.flat_param.unsharded_params import LOCKED
from composable_shard.flat_param.user_hooks import has_gradient_hooks, run_gradient_hooks
