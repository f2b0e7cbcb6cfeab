"""From one unsharded gradient to sharded gradients: when to reduce, in which order, when to stop.

[Note: End of a unit]
A unit's gradients are reduced and its parameters freed when nothing in the backward needs it any
more. Gradients can't tell when that is: a parameter may get one on some ranks only, and all ranks
must issue the same collectives in the same order. The forward can: the autograd engine runs first
what was recorded last. Calls of units are numbered as they begin; when the backward reaches the
output of a call, every unit whose first call began after that one had ended is over, on all ranks
alike. What is left ends with the backward. A parameter without gradient counts as zero.

[Note: End of backward]
The autograd engine calls back at the end of a backward pass, but only if it succeeds. The object
it would call is referenced weakly here: once it is dead without having been called, the backward
was aborted, and its unpublished gradients are dropped as a whole.
"""

from __future__ import annotations

import weakref
from bisect import insort
from functools import partial
from itertools import pairwise, takewhile

import torch
from torch.autograd import Variable

from composable_shard._flat_param import FlatParamHandle
from composable_shard._grad_use import LATE, exchange_use, is_any_rank
from composable_shard._state import ShardState, TrainingState, TreeContext

__all__ = [
    "abort_backward",
    "begin_backward",
    "check_not_in_scope",
    "end_units_after",
    "on_gradient",
    "open_unit",
    "release_handle",
]


class _BackwardPass:
    """Called by the autograd engine at the end of a successful backward pass."""

    def __init__(self, context: TreeContext) -> None:
        self.context = context

    def __call__(self) -> None:
        _finish_backward(self.context)


def begin_backward(context: TreeContext) -> None:
    """Note that a backward pass over the tree is running; no-op if that is known."""
    if context.backward is not None:
        if context.backward() is not None:
            return
        abort_backward(context)
    token = _BackwardPass(context)
    context.backward = weakref.ref(token, partial(_show_sharded, weakref.ref(context)))
    context.graph_task_id = torch._C._current_graph_task_id()
    Variable._execution_engine.queue_callback(token)
    order = [state for ref in reversed(context.armed) if (state := ref()) is not None]
    context.next_in_backward = {state.ref: following.ref for state, following in pairwise(order)}
    for state in context.live_states():
        for handle in state.handles:
            handle.guard.is_in_backward = True
    context.accumulates = any(
        handle.will_get_gradient() for state in context.live_states() for handle in state.handles
    )
    buckets = context.find_buckets()
    context.is_sure_to_reduce = bool(buckets) and is_any_rank(context.accumulates, buckets)
    context.accumulates |= context.is_sure_to_reduce
    for state in order:
        open_unit(context, state, state.forward_index)


def _show_sharded(context_ref: weakref.ref[TreeContext], _: object) -> None:
    """Show the sharded parameters at once when the engine has dropped an aborted backward.

    Nothing here can block or fail; buffers and collectives in flight are dealt with by the next
    call.
    """
    context = context_ref()
    if context is None or context.backward is None:
        return
    # They lead back to the context: a model deleted now must not wait for the collector.
    context.open_handles, context.reduced, context.in_flight = [], {}, []
    context.prefetched = {}
    for state in context.live_states():
        if state.depth == 0 and not state.is_held:
            for handle in state.handles:
                handle.register_sharded()


def open_unit(context: TreeContext, state: ShardState, position: int) -> None:
    """Let a unit's handles end when the backward has passed the call of this number.

    A handle that several units compute with (tied weights) ends with the first of their calls;
    -1 stands for the end of the backward. [Note: End of a unit]
    """
    owned = [(state, handle) for handle in state.handles]
    owned += [
        (owner, handle)
        for handle in state.borrowed
        for owner in context.live_states()
        if handle in owner.handles
    ]
    for owner, handle in owned:
        if handle.end_position is not None:
            if position >= handle.end_position:
                continue
            context.open_handles = [item for item in context.open_handles if item[2] is not handle]
        handle.end_position = position
        insort(context.open_handles, (position, owner, handle), key=lambda item: -item[0])


def end_units_after(context: TreeContext, position: int) -> None:
    """Reduce and free the units whose calls all began at this number or later."""
    while context.open_handles and context.open_handles[0][0] >= position:
        _, state, handle = context.open_handles.pop(0)
        _end_handle(context, state, handle)


def on_gradient(state_ref: weakref.ref[ShardState], handle: FlatParamHandle, index: int) -> None:
    """Take the gradient of one parameter."""
    state = state_ref()
    if state is None or state.context is None:
        return
    context = state.context
    if context.backward is None or context.backward() is None:
        check_not_in_scope(state)
        begin_backward(context)
    context.accumulates = True
    if handle.end_position is None:
        check_not_in_scope(state)
        open_unit(context, state, -1)
    if state.has_issued(handle):
        return  # [Note: Buckets]: a late gradient stays where it is
    if handle.grad.packs_always or state.reduces(handle):
        if torch.is_grad_enabled():
            # create_graph: the packed copy must not become part of the graph.
            with torch.no_grad():
                handle.pack_gradient(index, may_overwrite=False)
        elif not handle.grad.pack_further(index, handle.entries[index].unsharded):
            may_overwrite = handle.reshards_after_backward and _is_outermost(context)
            handle.pack_gradient(index, may_overwrite=may_overwrite)
    if state.buckets is not None:
        _end_full_buckets(context, state, handle, index)
    elif handle.end_position == -1 and handle.grad.awaited.count(index):
        _end_unannounced(context, state, handle)


def _end_unannounced(context: TreeContext, state: ShardState, handle: FlatParamHandle) -> None:
    """End a handle of which no call has told, as all its gradients are there: reentrant
    checkpointing.
    """
    context.open_handles = [item for item in context.open_handles if item[2] is not handle]
    _end_handle(context, state, handle)


def _end_full_buckets(
    context: TreeContext, state: ShardState, handle: FlatParamHandle, index: int
) -> None:
    """Reduce the buckets whose turn it is with this gradient, see [Note: Buckets]."""
    buckets, position = state.buckets, handle.end_position
    assert buckets is not None
    if position == -1:
        queue = [each for _, owner, each in context.open_handles if owner is state]
        for bucket in buckets.take_full(handle, index, queue):
            _end_unannounced(context, state, bucket)
    elif buckets.may_go_early(handle) and state.reduces(handle):
        first = takewhile(
            lambda item: item[0] == position and item[1] is state, context.open_handles
        )
        for bucket in buckets.take_full(handle, index, [item[2] for item in first]):
            buckets.note_issued(bucket)
            # Packed in place, its values are gone; else the unit may need them until its end.
            is_packed_in_place = bucket.grad.uses_shared
            _issue(context, state, bucket, keeps_values=not is_packed_in_place)
            if is_packed_in_place:
                _release_after_backward(context, bucket)


def check_not_in_scope(state: ShardState) -> None:
    """Check that a backward that reaches the unit can run.

    Raises:
        RuntimeError: Inside `unshard_params`.
    """
    if state.is_in_scope:
        raise RuntimeError(
            f"a backward reached unit '{state.name}' inside unshard_params. Call backward() "
            "before the scope opens or after it has closed."
        )


def _is_outermost(context: TreeContext) -> bool:
    """Return whether no node of this backward will want the value of a finished parameter.

    A backward nested in another, as reentrant checkpointing runs it, finishes a parameter that
    the outer one may use again.
    """
    return (
        not context.keeps_unsharded and torch._C._current_graph_task_id() == context.graph_task_id
    )


def _end_handle(context: TreeContext, state: ShardState, handle: FlatParamHandle) -> None:
    handle.end_position = None
    was_issued = state.buckets is not None and state.buckets.end(handle)
    if handle.requires_grad and context.accumulates and not was_issued:
        if state.reduces(handle):
            _issue(context, state, handle, keeps_values=_keeps_values(context, handle))
        else:
            handle.is_unsynced = True
    _release_after_backward(context, handle)
    if state.training_state is TrainingState.PRE_BACKWARD:
        state.transition(TrainingState.POST_BACKWARD)


def _issue(
    context: TreeContext, state: ShardState, handle: FlatParamHandle, *, keeps_values: bool
) -> None:
    # One reduction in flight: ending the last one here bounds the buffers to two units.
    _advance_in_flight(context)
    handle.issue_reduction(
        context.streams,
        context.scratch,
        keep_unsharded=keeps_values,
        is_deferred=state.defers_all_reduce(handle),
    )
    context.in_flight.append(handle)
    context.reduced[handle] = None


def _keeps_values(context: TreeContext, handle: FlatParamHandle) -> bool:
    return context.keeps_unsharded or handle.num_holders > 0 or not handle.reshards_after_backward


def _advance_in_flight(context: TreeContext) -> None:
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


def _release_after_backward(context: TreeContext, handle: FlatParamHandle) -> None:
    if handle.reshards_after_backward:
        release_handle(context, handle)
    elif handle.num_holders == 0:
        handle.register_sharded()


def _finish_backward(context: TreeContext) -> None:
    unsynced = _find_unsynced(context)
    still_open = [
        handle
        for _, state, handle in context.open_handles
        if handle.requires_grad and state.reduces(handle) and not state.has_issued(handle)
    ]
    late = [handle for _, handle in unsynced]
    for handle in still_open + late:
        handle.pack_rest(may_overwrite=not _keeps_values(context, handle))
    buckets = context.find_buckets()
    handles = list(dict.fromkeys([*context.reduced, *still_open, *late]))
    if context.is_sure_to_reduce:
        # Other ranks may have done so already, and wait for it.
        _issue_rest(context, unsynced)
    used = exchange_use(handles, buckets)
    # Another rank may accumulate where this one does not, a rank that skips a unit for example.
    context.accumulates |= any(any(flags) for flags in used)
    accumulates = context.accumulates
    if not context.is_sure_to_reduce:
        _issue_rest(context, unsynced)
    _issue_rest(context, _find_late(buckets, handles, used))
    if accumulates:
        _publish(context, handles, used)
    context.reduced = {}
    context.backward = None
    _return_to_idle(context)
    if accumulates:
        # Last of all: a user's hook may raise, or step an optimizer.
        for handle in handles:
            if not handle.grad.is_partial:
                handle.run_gradient_hooks()


def _publish(context: TreeContext, handles: list[FlatParamHandle], used: list[list[int]]) -> None:
    _advance_in_flight(context)
    for handle, flags in zip(handles, used, strict=True):
        handle.finish_reduction()
        handle.publish_gradients([flag > 0 for flag in flags])
    for ref in context.armed:
        if (state := ref()) is not None:
            state.forward_index = -1
    context.armed.clear()


def _issue_rest(context: TreeContext, others: list[tuple[ShardState, FlatParamHandle]]) -> None:
    """Reduce what the end of the backward has left open, and other handles."""
    end_units_after(context, -1)
    for owner, handle in others:
        _issue(context, owner, handle, keeps_values=_keeps_values(context, handle))


def _find_unsynced(context: TreeContext) -> list[tuple[ShardState, FlatParamHandle]]:
    """Return the handles with gradients of earlier microbatches that this backward reduces too.

    Those that it does not reach itself, that is, with their units.
    """
    if not context.accumulates:
        return []
    return [
        (state, handle)
        for state in context.live_states()
        for handle in state.handles
        if handle.end_position is None
        and handle not in context.reduced
        and state.reduces(handle)
        and (handle.is_unsynced or (handle.grad.is_partial and not state.defers_all_reduce(handle)))
    ]


def _find_late(
    buckets: dict[FlatParamHandle, ShardState],
    handles: list[FlatParamHandle],
    used: list[list[int]],
) -> list[tuple[ShardState, FlatParamHandle]]:
    """Return the buckets that are reduced once more, see [Note: Buckets]."""
    found = [h for h, flags in zip(handles, used, strict=True) if LATE in flags]
    late = [(buckets[handle], handle) for handle in found]
    for state, _ in late:
        if state.buckets is not None:
            state.buckets.note_late()
    return late


def _return_to_idle(context: TreeContext) -> None:
    context.accumulates = context.is_sure_to_reduce = False
    context.open_handles = []
    context.spans_calls, context.reaches_earlier_call = context.reaches_earlier_call, False
    # It may never run: a graph that ends before it, units that share an output.
    context.prefetched = {}
    for state in context.live_states():
        if state.buckets is not None:
            state.buckets.reset()
        if state.training_state not in (TrainingState.IDLE, TrainingState.UNSHARDED_PARAMS):
            state.transition(TrainingState.FORWARD if state.depth else TrainingState.IDLE)
        for handle in state.handles:
            handle.guard.is_in_backward = False
            handle.end_position = None
            handle.grad.awaited.reset()
            if handle.is_registered_unsharded or handle.is_unsharded or handle.is_small:
                _release_after_backward(context, handle)


def abort_backward(context: TreeContext) -> None:
    """Drop what an aborted backward left behind; already published gradients stay.

    Gradients that `no_sync` kept unsharded are dropped too: the aborted pass may have added to
    some of them.
    """
    context.backward = None
    context.reduced, context.in_flight = {}, []
    context.armed.clear()
    for state in context.live_states():
        state.forward_index = -1
        for handle in state.handles:
            handle.drop_gradients()
    _return_to_idle(context)
