"""The handle of one flat parameter: its shard, its full values, its gradients.

Read `handle`, `flat_storage` (memory) and `gradient` (reductions) first.
"""

from composable_shard.flat_param.entries import Precision, UnshardedParameter
from composable_shard.flat_param.flat_mode import (
    check_can_show_flat,
    check_can_show_originals,
    check_requires_grad,
    gradient_shard,
    has_gradients,
    keep_requires_grad,
    make_flat_entry,
    set_gradients,
    show_flat,
    show_originals,
    write_unsharded_gradients,
)
from composable_shard.flat_param.full_params import FullParams, is_shown_by_scope
from composable_shard.flat_param.handle import FlatParamHandle, ParamEntry, plan_layout
from composable_shard.flat_param.reduction import ScratchPool
from composable_shard.flat_param.storage import (
    FlatSlot,
    Slot,
    dense_stride,
    find_slots,
    slot_key,
    take_place,
)

__all__ = [
    "FlatParamHandle",
    "FlatSlot",
    "FullParams",
    "ParamEntry",
    "Precision",
    "ScratchPool",
    "Slot",
    "UnshardedParameter",
    "check_can_show_flat",
    "check_can_show_originals",
    "check_requires_grad",
    "dense_stride",
    "find_slots",
    "gradient_shard",
    "has_gradients",
    "is_shown_by_scope",
    "keep_requires_grad",
    "make_flat_entry",
    "plan_layout",
    "set_gradients",
    "show_flat",
    "show_originals",
    "slot_key",
    "take_place",
    "write_unsharded_gradients",
]
