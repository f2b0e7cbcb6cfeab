"""Gradients that wait for a reduction: show them, reduce them now, drop them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from composable_shard.comm import FlagReduction
from composable_shard.flat_param import (
    FlatParamHandle,
    drop_pending,
    drop_unpublished,
    pending_values,
    run_gradient_hooks,
    unmark_pending,
    unmarked,
)
from composable_shard.runtime import (
    ShardState,
    check_is_idle,
    first_names,
    select_states,
)
from composable_shard.torch_private import named_modules_in


def get_pending_gradients(module: nn.Module, *, recurse: bool = True) -> dict[str, Tensor]:
    """Return copies of the gradients that wait for a reduction, as whole tensors by name.

    Each is this rank's own sum over the microbatches, not divided, as plain PyTorch has it in
    `.grad` without data parallelism. If only its all-reduce is postponed
    (`set_requires_all_reduce`), it is the mean over the shard group. For a parameter with tensor
    parallelism it is the local part. Parameters without a pending gradient are left out.

    No communication, except for one all-gather for each handle with such an all-reduce: then call
    it on all ranks.

    Args:
        module: A module with sharded units.
        recurse: Also the units below `module`.

    Raises:
        ValueError: If there is no unit.
        RuntimeError: Inside forward or backward.
    """
    values = {}
    with torch.no_grad():
        for _, handle in _idle_handles(module, recurse, "gradients can't be shown"):
            with unmarked(handle):
                values[handle] = pending_values(handle)
    names = first_names(named_modules_in(module), values)
    pending = {name: values[handle][index] for (handle, index), name in names.items()}
    return {name: value for name, value in pending.items() if value is not None}


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
    handles = _idle_handles(module, recurse, "gradients can't be reduced")
    if not handles:
        return
    try:
        due = _reduce_all(handles)
    except BaseException:
        # Drop all gradients, as after an error in a backward: `zero_grad` would not see them.
        for _, handle in handles:
            drop_unpublished(handle)
        raise
    for handle in due:
        run_gradient_hooks(handle.shown)


def _reduce_all(handles: list[tuple[ShardState, FlatParamHandle]]) -> list[FlatParamHandle]:
    """Reduce the gradients that wait on any rank; return their handles."""
    for _, handle in handles:
        unmark_pending(handle)
    flags = FlagReduction(
        [
            (
                handle.shard_group,
                [int(flag) for flag in (handle.grads.waits_for_reduction, *handle.grads.used)],
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
    grads.issue(state.context.streams, state.context.scratch, keeps_values=True)
    grads.free_input()
    grads.add_result()
    grads.publish(used)


def drop_pending_gradients(module: nn.Module, *, recurse: bool = True) -> None:
    """Drop the gradients that wait for a reduction, and free their memory; no communication.

    Gradients reduced before stay in `.grad`. `zero_grad()` of a module or optimizer, and setting
    `.grad` to None, drop both, but keep the memory until the next backward. Call it on all ranks.

    Args:
        module: A module with sharded units.
        recurse: Also the units below `module`.

    Raises:
        ValueError: If there is no unit.
        RuntimeError: Inside forward or backward.
    """
    for _, handle in _idle_handles(module, recurse, "gradients can't be dropped"):
        drop_pending(handle)


def _idle_handles(
    module: nn.Module, recurse: bool, what: str
) -> list[tuple[ShardState, FlatParamHandle]]:
    """Return the handles that can have pending gradients, each with its unit."""
    states = select_states(module, recurse)
    for context in dict.fromkeys(state.context for state in states):
        if context is not None:
            check_is_idle(context, what)
    handles = [
        (state, handle)
        for state in states
        for handle in state.handles
        if state.context is not None and handle.grads.packing is not None
    ]
    for _, handle in handles:
        handle.adopt_changes()
    return handles
