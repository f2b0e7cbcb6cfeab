"""The buffers of a new unit: cast, moved, watched and broadcast, as its options say."""

from __future__ import annotations

from composable_shard.comm import ShardGroup
from composable_shard.construct.originals import Plan
from composable_shard.runtime import (
    BufferBroadcast,
    cast_buffers,
    place_buffers,
    watch_meta_buffers,
)


def prepare_buffers(plan: Plan, shard_group: ShardGroup) -> BufferBroadcast | None:
    """Bring the buffers to their dtype and device; return what broadcasts them, if anything."""
    buffer_dtype = plan.options.mp_policy.buffer_dtype
    if buffer_dtype is not None:
        cast_buffers(plan.unmanaged_modules, plan.kept_modules, buffer_dtype)
    for module in plan.unmanaged_modules:
        watch_meta_buffers(module)
        place_buffers(module, shard_group.device)
    if plan.options.broadcast_buffers:
        return BufferBroadcast(plan.unmanaged_modules, shard_group)
    return None
