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
from contextlib import suppress
from functools import partial
from itertools import pairwise

import torch
from torch.autograd import Variable

from composable_shard._early_gradients import (
    check_not_delivered,
    collect,
    deliver,
    drop_early,
    is_accumulating,
    raise_hook_error,
    run_hooks,
    start_early,
)
from composable_shard._flat_param import FlatParamHandle
from composable_shard._state import ShardState, TrainingState, TreeContext
from composable_shard._use_exchange import UseExchange

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
    context.prefetched, context.early, context.ready, context.delivered = {}, {}, [], {}
    context.hook_error = None
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
        check_not_delivered(context, handle, index)
        open_unit(context, state, -1)
    if handle.has_early_hooks:
        handle.accumulated.add(index)
    if handle.grad.packs_always or state.reduces(handle):
        if torch.is_grad_enabled():
            # create_graph: the packed copy must not become part of the graph.
            with torch.no_grad():
                handle.pack_gradient(index, may_overwrite=False)
        elif not handle.grad.pack_further(index, handle.entries[index].unsharded):
            may_overwrite = handle.reshards_after_backward and _is_outermost(context)
            handle.pack_gradient(index, may_overwrite=may_overwrite)
    if handle.end_position == -1 and handle.grad.awaited.count(index):
        # No call has told of it: reentrant checkpointing. All its gradients are there.
        context.open_handles = [item for item in context.open_handles if item[2] is not handle]
        _end_handle(context, state, handle)


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
    if handle.requires_grad and state.reduces(handle):
        if context.early:
            _advance_in_flight(context)
            collect(context)
        if handle.has_early_hooks:
            handle.pack_rest(may_overwrite=not _keeps_values(context, handle))
            start_early(context, state, handle)
        if is_accumulating(context, handle):
            _issue(context, state, handle)
    elif handle.requires_grad and context.accumulates:
        handle.is_unsynced = True
    _release_after_backward(context, handle)
    if state.training_state is TrainingState.PRE_BACKWARD:
        state.transition(TrainingState.POST_BACKWARD)


def _issue(context: TreeContext, state: ShardState, handle: FlatParamHandle) -> None:
    # One reduction in flight: ending the last one here bounds the buffers to two units.
    _advance_in_flight(context)
    handle.issue_reduction(
        context.streams,
        context.scratch,
        keep_unsharded=_keeps_values(context, handle),
        is_deferred=state.defers_all_reduce(handle),
    )
    context.in_flight.append(handle)
    context.reduced[handle] = None
    if context.ready:
        deliver(context)


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
        # One that was issued ahead, for a unit that this backward did not run: it may be abandoned
        # for ever. An error is not ours to raise here, as in `reshard`.
        with suppress(RuntimeError):
            handle.wait_unshard()


def _finish_backward(context: TreeContext) -> None:
    context.is_ending = True
    if context.early:
        # Whose gradients are final must be known before the others are asked about.
        _advance_in_flight(context)
        collect(context)
    unsynced = _find_unsynced(context)
    still_open = [
        handle
        for _, state, handle in context.open_handles
        if handle.requires_grad and state.reduces(handle)
    ]
    late = [handle for _, handle in unsynced]
    for handle in still_open + late:
        handle.pack_rest(may_overwrite=not _keeps_values(context, handle))
    early = [handle for handle, _ in context.ready]
    handles = [h for h in dict.fromkeys([*context.reduced, *still_open, *late]) if h not in early]
    exchange = UseExchange(
        [(h.shard_group, list(map(int, h.grad.used))) for h in handles], highest=1
    )
    context.exchanges.append(exchange)
    if not context.accumulates:
        # Another rank may, where this one skips a unit for example.
        context.accumulates = any(any(flags) for flags in exchange.finish())
    end_units_after(context, -1)
    for owner, handle in unsynced:
        _issue(context, owner, handle)
    deliver(context)
    published = _publish(context, handles, exchange)
    context.reduced = {}
    context.backward = None
    _return_to_idle(context)
    # Last of all: a user's hook may raise, or step an optimizer.
    for handle in published:
        run_hooks(context, handle)
    raise_hook_error(context)


def _publish(
    context: TreeContext, handles: list[FlatParamHandle], exchange: UseExchange
) -> list[FlatParamHandle]:
    """Wait for everything that is in flight; give the parameters their gradients."""
    _advance_in_flight(context)
    for handle in handles:
        handle.finish_reduction()
    # Last, for it costs no time then; but before anything is published, for it may fail.
    used = exchange.finish()
    if not context.accumulates:
        return []
    for handle, flags in zip(handles, used, strict=True):
        handle.publish_gradients(list(map(bool, flags)))
    for ref in context.armed:
        if (state := ref()) is not None:
            state.forward_index = -1
    context.armed.clear()
    return handles


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


def _return_to_idle(context: TreeContext) -> None:
    context.accumulates = False
    context.open_handles = []
    drop_early(context)
    context.spans_calls, context.reaches_earlier_call = context.reaches_earlier_call, False
    # It may never run: a graph that ends before it, units that share an output.
    context.prefetched = {}
    for state in context.live_states():
        if state.training_state not in (TrainingState.IDLE, TrainingState.UNSHARDED_PARAMS):
            state.transition(TrainingState.FORWARD if state.depth else TrainingState.IDLE)
        state.may_recompute = False
        for handle in state.handles:
            handle.guard.is_in_backward = False
            handle.end_position = None
            handle.grad.awaited.reset()
            if handle.has_early_hooks:
                handle.accumulated, handle.early_age = set(), 0
            if handle.is_registered_unsharded or handle.is_unsharded or handle.is_small:
                _release_after_backward(context, handle)


def abort_backward(context: TreeContext) -> None:
    """Drop what an aborted backward left behind; already published gradients stay.

    Gradients that `no_sync` kept unsharded are dropped too: the aborted pass may have added to
    some of them.
    """
    context.backward = None
    context.reduced, context.in_flight = {}, []
    context.hook_error = None
    context.armed.clear()
    for state in context.live_states():
        state.forward_index = -1
        for handle in state.handles:
            handle.drop_gradients()
    _return_to_idle(context)
