"""When units end in a backward: their gradients are reduced, their full parameters freed.

[Note: End of a unit]
A unit's gradients are reduced and its parameters freed when nothing in the backward needs it any
more. Gradients can't tell when that is: a parameter may get one on some ranks only, and all ranks
must issue the same collectives in the same order. The forward can: the autograd engine runs first
what was recorded last. Calls of units are numbered as they begin; when the backward reaches the
output of a call, every unit whose first call began after that one had ended is over, on all ranks
alike. What is left ends with the backward. A parameter without gradient counts as zero.
"""

from __future__ import annotations

from bisect import insort
from contextlib import suppress

from composable_shard.flat_param import FlatParamHandle
from composable_shard.runtime.early_gradients import collect, deliver, is_accumulating, start_early
from composable_shard.runtime.state import ShardState, TrainingState, TreeContext

__all__ = [
    "advance_in_flight",
    "end_handle",
    "end_units_after",
    "issue",
    "keeps_values",
    "open_unit",
    "release_after_backward",
    "release_handle",
]


def open_unit(context: TreeContext, state: ShardState, position: int) -> None:
    """Let a unit's handles end when the backward has passed the call of this number.

    A handle that several units compute with (tied weights) ends with the first of their calls;
    -1 stands for the end of the backward. [Note: End of a unit]
    """
    for handle in state.needed:
        if handle.end_position is not None and position >= handle.end_position:
            continue
        owner = context.owner_of(handle) if handle in state.borrowed else state
        if owner is not None:
            _open_handle(context, owner, handle, position)


def _open_handle(
    context: TreeContext, owner: ShardState, handle: FlatParamHandle, position: int
) -> None:
    if handle.end_position is not None:
        context.open_handles = [item for item in context.open_handles if item[2] is not handle]
    elif position >= 0 and handle in context.in_flight:
        # A late gradient waits for its last reduction, perhaps on this rank only: the second
        # stage must be issued before. [Note: Two stages]
        advance_in_flight(context)
    handle.end_position = position
    insort(context.open_handles, (position, owner, handle), key=lambda item: -item[0])


def end_units_after(context: TreeContext, position: int) -> None:
    """Reduce and free the units whose calls all began at this number or later."""
    while context.open_handles and context.open_handles[0][0] >= position:
        _, state, handle = context.open_handles.pop(0)
        end_handle(context, state, handle)


def end_handle(context: TreeContext, state: ShardState, handle: FlatParamHandle) -> None:
    """Reduce a handle that is over, or note that it waits for it; free its full parameters."""
    handle.end_position = None
    if state.buckets is not None and state.buckets.end(handle):
        pass  # reduced already
    elif handle.requires_grad and state.reduces(handle):
        if context.early:
            advance_in_flight(context)
            collect(context)
        # An earlier call of the unit was reached; all ranks know that nothing is to come.
        is_final = handle in context.delivered or any(h is handle for h, _ in context.ready)
        if handle.has_early_hooks and not is_final:
            handle.pack_rest(may_overwrite=not keeps_values(context, handle))
            start_early(context, state, handle)
        if not is_final and is_accumulating(context, handle):
            issue(context, state, handle, keeps=keeps_values(context, handle))
    elif handle.requires_grad and context.accumulates:
        handle.pack_small()
        handle.grad.small.close()
        handle.is_unsynced = True
    release_after_backward(context, handle)
    if state.training_state is TrainingState.PRE_BACKWARD:
        state.transition(TrainingState.POST_BACKWARD)


def issue(context: TreeContext, state: ShardState, handle: FlatParamHandle, *, keeps: bool) -> None:
    """Start the reduction of a handle.

    Args:
        context: The tree's.
        state: Its unit.
        handle: What to reduce.
        keeps: Whether the full values must stay, see `keeps_values`.
    """
    # One reduction in flight: ending the last one here bounds the buffers to two units.
    advance_in_flight(context)
    handle.issue_reduction(
        context.streams,
        context.scratch,
        keep_unsharded=keeps,
        is_deferred=state.defers_all_reduce(handle),
    )
    context.in_flight.append(handle)
    context.reduced[handle] = None
    if context.ready:
        deliver(context)


def keeps_values(context: TreeContext, handle: FlatParamHandle) -> bool:
    """Return whether the full values are still wanted when the handle's unit is over."""
    return context.keeps_unsharded or handle.num_holders > 0 or not handle.reshards_after_backward


def advance_in_flight(context: TreeContext) -> None:
    """Wait until the reduction in flight, if any, needs its buffers no more."""
    while context.in_flight:
        context.in_flight.pop(0).advance_reduction()


def release_handle(
    context: TreeContext, handle: FlatParamHandle, *, is_backward_next: bool = False
) -> None:
    """Show the sharded parameters and free the full ones, unless a forward still needs them.

    Args:
        context: The tree's.
        handle: What to release.
        is_backward_next: Keep what the policy keeps for a backward.
    """
    if handle.num_holders > 0:
        return
    handle.register_sharded()
    if context.keeps_unsharded:
        return
    if is_backward_next and handle.small_group is not None:
        handle.reshard_to_small_group()
    else:
        handle.reshard()


def release_after_backward(context: TreeContext, handle: FlatParamHandle) -> None:
    """Show the sharded parameters, and free the full ones unless the policy keeps them."""
    if handle.reshards_after_backward:
        release_handle(context, handle)
    elif handle.num_holders == 0:
        handle.register_sharded()
        # One that was issued ahead, for a unit that this backward did not run: it may be abandoned
        # for ever. An error is not ours to raise here, as in `reshard`.
        with suppress(RuntimeError):
            handle.wait_unshard()
