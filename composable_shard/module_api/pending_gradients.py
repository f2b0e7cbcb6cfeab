"""Reduce gradients that wait for a reduction, without another backward."""

from __future__ import annotations

import torch
from torch import nn

from composable_shard.comm import FlagReduction
from composable_shard.flat_param import (
    FlatParamHandle,
    forget_pending,
    needs_reduction,
    settle_pending,
)
from composable_shard.runtime import (
    ShardState,
    check_is_idle,
    select_states,
)


def reduce_pending_gradients(module: nn.Module, *, recurse: bool = True) -> None:
    """Reduce the pending gradients now, without another backward; sets `.grad`.

    For a step after microbatches that all ran under `no_sync`, or with a deferred all-reduce: at
    the end of an epoch, or after an exception. Does what the end of the backward would have done,
    also inside `no_sync`, and runs hooks of `register_post_accumulate_grad_hook`. No-op where
    nothing waits on any rank. Call it on all ranks.

    One small all-reduce for each process group; then for each handle with pending gradients on any
    rank one reduce-scatter, and one all-reduce over the ranks that hold copies of shards, if there
    are any.

    Args:
        module: A module with sharded units.
        recurse: Also the units below `module`.

    Raises:
        ValueError: If there is no unit.
        RuntimeError: Inside forward or backward.
    """
    states = select_states(module, recurse)
    for context in dict.fromkeys(state.context for state in states):
        if context is not None:
            check_is_idle(context, "gradients can't be reduced")
    handles = [
        (state, handle)
        for state in states
        for handle in state.handles
        if state.context is not None and handle.grads.packing is not None
    ]
    if not handles:
        return
    for _, handle in handles:
        handle.adopt_changes()
    try:
        due = _reduce_all(handles)
    except BaseException:
        # Drop all gradients, as after an error in a backward: `zero_grad` would not see them.
        for _, handle in handles:
            forget_pending(handle)
            handle.grads.drop()
        raise
    for handle in due:
        handle.shown.run_gradient_hooks()


def _reduce_all(handles: list[tuple[ShardState, FlatParamHandle]]) -> list[FlatParamHandle]:
    """Reduce the gradients that wait on any rank; return their handles."""
    for _, handle in handles:
        settle_pending(handle)
    flags = FlagReduction(
        [
            (
                handle.shard_group,
                [int(flag) for flag in (needs_reduction(handle), *handle.grads.used)],
            )
            for _, handle in handles
        ],
        highest=1,
    ).finish()
    due = []
    with torch.no_grad():
        for (state, handle), (is_due, *used) in zip(handles, flags, strict=True):
            if is_due:
                _reduce(state, handle, [bool(flag) for flag in used])
                due.append(handle)
    return due


def _reduce(state: ShardState, handle: FlatParamHandle, used: list[bool]) -> None:
    assert state.context is not None
    grads = handle.grads
    grads.issue(
        state.context.streams, state.context.scratch, keep_unsharded=True, is_deferred=False
    )
    grads.advance()
    grads.finish()
    grads.publish(used)
