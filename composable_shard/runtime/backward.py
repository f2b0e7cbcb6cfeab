"""A backward over a tree: from its first gradient to the sharded gradients of all units.

[Note: End of backward]
The autograd engine calls back at the end of a backward pass, but only if it succeeds. The object
it would call is referenced weakly here: once it is dead without having been called, the backward
was aborted, and its unpublished gradients are dropped as a whole.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from functools import partial
from itertools import pairwise, takewhile

import torch
from torch.autograd import Variable

from composable_shard.comm import UseExchange
from composable_shard.flat_param import FlatParamHandle
from composable_shard.runtime.buckets import LATE
from composable_shard.runtime.early_gradients import (
    check_not_delivered,
    collect,
    deliver,
    drop_early,
    raise_hook_error,
    run_hooks,
)
from composable_shard.runtime.state import ShardState, TrainingState, TreeContext
from composable_shard.runtime.unit_end import (
    advance_in_flight,
    end_handle,
    end_units_after,
    issue,
    keeps_values,
    open_unit,
    release_after_backward,
)

__all__ = ["abort_backward", "begin_backward", "check_not_in_scope", "on_gradient"]


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
    _agree_to_reduce(context)
    for state in order:
        open_unit(context, state, state.forward_index)


def _agree_to_reduce(context: TreeContext) -> None:
    """Let all ranks know whether any of them accumulates gradients, see [Note: Buckets].

    Where there are buckets: one all-reduce of a byte for each process group.
    """
    groups = {
        handle.shard_group.joint_groups: handle.shard_group for handle in context.find_buckets()
    }
    if not groups:
        return
    accumulates = int(context.accumulates)
    exchange = UseExchange([(group, [accumulates]) for group in groups.values()], highest=1)
    context.exchanges.append(exchange)
    if not accumulates:
        context.accumulates = any(any(flags) for flags in exchange.finish())
    context.is_sure_to_reduce = context.accumulates


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
        for handle in state.handles:
            handle.grad.small.close()
            if state.depth == 0 and not state.is_held:
                handle.register_sharded()


def on_gradient(state_ref: weakref.ref[ShardState], handle: FlatParamHandle, index: int) -> None:
    """Take the gradient of one parameter."""
    state = state_ref()
    if state is None or state.context is None:
        return
    context = state.context
    if handle.end_position is None or context.backward is None or context.backward() is None:
        _enter(context, state, handle, index)
    context.accumulates = True
    if state.buckets is not None and state.buckets.is_issued(handle):
        return  # [Note: Buckets]: a late gradient stays where it is
    if handle.has_early_hooks:
        handle.accumulated.add(index)
    if handle.grad.packs_always or state.reduces(handle):
        _pack(context, state, handle, index)
    if state.buckets is not None:
        _end_full_buckets(context, state, handle, index)
    elif handle.end_position == -1 and handle.grad.awaited.count(index):
        _end_unannounced(context, state, handle)


def _pack(context: TreeContext, state: ShardState, handle: FlatParamHandle, index: int) -> None:
    if torch.is_grad_enabled():
        # create_graph: the packed copy must not become part of the graph.
        with torch.no_grad():
            handle.pack_gradient(index, may_overwrite=False)
        return
    handle.pack_small()
    if not handle.grad.pack_further(index, handle.entries[index].unsharded):
        # A value that gave way to a gradient, on some ranks only, would be gathered for a
        # recomputation by these ranks alone.
        may_overwrite = (
            handle.reshards_after_backward
            and _is_outermost(context)
            and (state.is_recomputed or not state.is_checkpointed)
        )
        handle.pack_gradient(index, may_overwrite=may_overwrite)
    counts_each = state.buckets is not None or handle.end_position == -1 or handle.has_early_hooks
    if handle.grad.may_wait and not counts_each:
        handle.grad.small.open(handle.grad.arrived)


def _enter(context: TreeContext, state: ShardState, handle: FlatParamHandle, index: int) -> None:
    """Note that a backward runs, if its first gradient is what tells of it, or of the unit."""
    if context.backward is None or context.backward() is None:
        check_not_in_scope(state)
        begin_backward(context)
    if handle.end_position is None:
        check_not_in_scope(state)
        check_not_delivered(context, handle, index)
        open_unit(context, state, -1)


def _end_unannounced(context: TreeContext, state: ShardState, handle: FlatParamHandle) -> None:
    """End a handle that no call has told of, as in reentrant checkpointing: its gradients came."""
    context.open_handles = [item for item in context.open_handles if item[2] is not handle]
    end_handle(context, state, handle)


def _end_full_buckets(
    context: TreeContext, state: ShardState, handle: FlatParamHandle, index: int
) -> None:
    """Reduce the buckets whose turn it is with this gradient, see [Note: Buckets]."""
    buckets, position = state.buckets, handle.end_position
    assert buckets is not None
    if position == -1:
        if not buckets.fills(handle, index):
            return
        queue = [each for _, owner, each in context.open_handles if owner is state]
        for bucket in buckets.take_full(queue):
            _end_unannounced(context, state, bucket)
    elif buckets.may_go_early(handle) and state.reduces(handle) and buckets.fills(handle, index):
        first = takewhile(
            lambda item: item[0] == position and item[1] is state, context.open_handles
        )
        for bucket in buckets.take_full([item[2] for item in first]):
            buckets.note_issued(bucket)
            # Packed in place, its values are gone; else the unit may need them until its end.
            is_packed_in_place = bucket.grad.uses_shared
            issue(context, state, bucket, keeps=not is_packed_in_place)
            if is_packed_in_place:
                release_after_backward(context, bucket)


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


def _finish_backward(context: TreeContext) -> None:
    context.is_ending = True
    if context.early:
        # Whose gradients are final must be known before the others are asked about.
        advance_in_flight(context)
        collect(context)
    unsynced = _find_unsynced(context)
    still_open = [
        handle
        for _, state, handle in context.open_handles
        if handle.requires_grad and state.reduces(handle) and not state.has_issued(handle)
    ]
    others = [handle for _, handle in unsynced]
    for handle in still_open + others:
        handle.pack_rest(may_overwrite=not keeps_values(context, handle))
    early = [handle for handle, _ in context.ready]
    handles = [h for h in dict.fromkeys([*context.reduced, *still_open, *others]) if h not in early]
    if context.is_sure_to_reduce:
        # Other ranks may have done so already, and wait for it.
        _issue_rest(context, unsynced)
    buckets = context.find_buckets()
    exchange = UseExchange(
        [(h.shard_group, _use_flags(h, h in buckets)) for h in handles],
        highest=LATE if buckets else 1,
    )
    context.exchanges.append(exchange)
    if not context.accumulates:
        # Another rank may, where this one skips a unit for example.
        context.accumulates = any(any(flags) for flags in exchange.finish())
    if not context.is_sure_to_reduce:
        _issue_rest(context, unsynced)
    if buckets:
        _issue_rest(context, _find_late(buckets, handles, exchange.finish()))
    deliver(context)
    published = _publish(context, handles, exchange)
    context.reduced = {}
    context.backward = None
    _return_to_idle(context)
    # Last of all: a user's hook may raise, or step an optimizer.
    accumulating = {
        handle
        for state in context.live_states()
        if not state.is_last_backward
        for handle in state.handles
    }
    for handle in published:
        if handle not in accumulating:
            run_hooks(context, handle)
    raise_hook_error(context)


def _publish(
    context: TreeContext, handles: list[FlatParamHandle], exchange: UseExchange
) -> list[FlatParamHandle]:
    """Wait for everything that is in flight; give the parameters their gradients."""
    advance_in_flight(context)
    for handle in handles:
        handle.finish_reduction()
    # Last, for it costs no time then; but before anything is published, for it may fail.
    for other in context.exchanges:
        other.finish()
    if not context.accumulates:
        return []
    used = exchange.finish()
    for handle, flags in zip(handles, used, strict=True):
        handle.publish_gradients(list(map(bool, flags)))
    for ref in context.armed:
        if (state := ref()) is not None:
            state.forward_index = -1
    context.armed.clear()
    return handles


def _issue_rest(context: TreeContext, others: list[tuple[ShardState, FlatParamHandle]]) -> None:
    """Reduce what the end of the backward has left open, and other handles."""
    end_units_after(context, -1)
    for owner, handle in others:
        issue(context, owner, handle, keeps=keeps_values(context, handle))


def _use_flags(handle: FlatParamHandle, is_bucket: bool) -> list[int]:
    is_late = is_bucket and any(param.grad is not None for param in handle.unsharded_params)
    return [LATE if used and is_late else int(used) for used in handle.grad.used]


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
    context.accumulates = context.is_sure_to_reduce = False
    context.open_handles = []
    drop_early(context)
    context.spans_calls, context.reaches_earlier_call = context.reaches_earlier_call, False
    # It may never run: a graph that ends before it, units that share an output.
    context.prefetched = {}
    for state in context.live_states():
        if state.buckets is not None:
            state.buckets.reset()
        if state.training_state not in (TrainingState.IDLE, TrainingState.UNSHARDED_PARAMS):
            state.transition(TrainingState.FORWARD if state.depth else TrainingState.IDLE)
        state.may_recompute = state.is_recomputed = False
        for handle in state.handles:
            handle.guard.is_in_backward = False
            handle.end_position = None
            handle.grad.awaited.reset()
            if handle.has_early_hooks:
                handle.accumulated, handle.early_age = set(), 0
            if handle.is_registered_unsharded or handle.is_unsharded or handle.is_small:
                release_after_backward(context, handle)


def _catch_up(context: TreeContext, state: ShardState) -> None:
    """Issue what other ranks have issued, perhaps, of a unit that a failed backward was in.

    An error of it is not ours to raise: all of it is dropped. [Note: Buckets]
    """
    buckets = [handle for handle in state.handles if handle.requires_grad and state.reduces(handle)]
    with suppress(Exception):
        for handle in buckets:
            if not state.has_issued(handle):
                handle.issue_reduction(
                    context.streams,
                    context.scratch,
                    keep_unsharded=True,
                    is_deferred=state.defers_all_reduce(handle),
                )
            handle.advance_reduction()


def abort_backward(context: TreeContext) -> None:
    """Drop what an aborted backward left behind; already published gradients stay.

    Gradients that `no_sync` kept unsharded are dropped too: the aborted pass may have added to
    some of them.
    """
    context.backward = None
    for state in context.live_states():
        if state.buckets is not None and state.buckets.is_under_way:
            _catch_up(context, state)
    context.reduced, context.in_flight = {}, []
    context.hook_error = None
    context.armed.clear()
    for state in context.live_states():
        state.forward_index = -1
        for handle in state.handles:
            handle.drop_gradients()
    _return_to_idle(context)
