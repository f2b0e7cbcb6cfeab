"""From one unsharded gradient to sharded gradients: when to reduce, in which order, when to stop.

[Note: Order of reductions]
All ranks must issue the same reductions in the same order, also when a parameter gets a gradient
on some ranks only. The order is fixed by the forward: a unit that ran later is reduced earlier. A
unit that is complete waits until those before it have been issued; what is incomplete at the end
of the backward is reduced then, with zeros for what is missing.

[Note: End of backward]
The autograd engine calls back at the end of a backward pass, but only if it succeeds. The object
it would call is referenced weakly here: once it is dead without having been called, the backward
was aborted, and its unpublished gradients are dropped as a whole.
"""

from __future__ import annotations

import weakref
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.autograd import Variable

from composable_shard import _collectives
from composable_shard._flat_param import FlatParamHandle
from composable_shard._state import ShardState, TrainingState, TreeContext

__all__ = [
    "abort_backward",
    "begin_backward",
    "end_unit_if_done",
    "on_gradient",
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
    context_ref = weakref.ref(context)

    def show_sharded(_: object) -> None:
        # The engine dropped the token, so the backward was aborted. Nothing here can block or
        # fail; buffers and collectives in flight are dealt with by the next call.
        living = context_ref()
        if living is not None and living.backward is not None:
            # They lead back to the context: a model deleted now must not wait for the collector.
            living.reduce_queue, living.reduced, living.in_flight = [], {}, []
            living.prefetched = None
            for state in living.live_states():
                if state.depth == 0 and not state.is_held:
                    for handle in state.handles:
                        handle.register_sharded()

    context.backward = weakref.ref(token, show_sharded)
    context.graph_task_id = torch._C._current_graph_task_id()
    Variable._execution_engine.queue_callback(token)
    order = [state for ref in reversed(context.armed) if (state := ref()) is not None]
    context.next_in_backward = {
        state.ref: following.ref for state, following in pairwise(order)
    }
    # [Note: Order of reductions]
    context.reduce_queue = [
        (state, handle)
        for state in sorted(order, key=lambda unit: -unit.forward_index)
        for handle in state.handles
        if handle.requires_grad and state.requires_gradient_sync
    ]


def on_gradient(state_ref: weakref.ref[ShardState], handle: FlatParamHandle, index: int) -> None:
    """Take the gradient of one parameter, and reduce its handle if it was the last."""
    state = state_ref()
    if state is None or state.context is None:
        return
    context = state.context
    if context.backward is None or context.backward() is None:
        begin_backward(context)
    context.has_gradients = True
    if state.requires_gradient_sync:
        if torch.is_grad_enabled():
            # create_graph: the packed copy must not become part of the graph.
            with torch.no_grad():
                handle.pack_gradient(index, may_overwrite=False)
        else:
            handle.pack_gradient(index, may_overwrite=_is_outermost(context))
    if handle.grad.count(index):
        if state.requires_gradient_sync:
            _complete(context, state, handle)
        else:
            _end_unit(context, state, handle)


def _is_outermost(context: TreeContext) -> bool:
    """Return whether no node of this backward will want the value of a finished parameter.

    A backward nested in another, as reentrant checkpointing runs it, finishes a parameter that
    the outer one may use again.
    """
    return (
        not context.keeps_unsharded
        and torch._C._current_graph_task_id() == context.graph_task_id
    )


def _complete(context: TreeContext, state: ShardState, handle: FlatParamHandle) -> None:
    handle.is_complete = True
    queue = context.reduce_queue
    if all(handle is not other for _, other in queue):
        # It did not run forward since the last backward, as in a second backward over one graph.
        queue.append((state, handle))
    while queue and queue[0][1].is_complete:
        owner, first = queue.pop(0)
        _issue(context, owner, first)


def _issue(context: TreeContext, state: ShardState, handle: FlatParamHandle) -> None:
    handle.is_complete = False
    # One reduction in flight: finishing the last one here bounds the buffers to two units.
    _finish_in_flight(context)
    handle.issue_reduction(
        context.streams, keep_unsharded=context.keeps_unsharded or handle.num_holders > 0
    )
    context.in_flight.append(handle)
    context.reduced[id(handle)] = (state, handle)
    _end_unit(context, state, handle)


def _finish_in_flight(context: TreeContext) -> None:
    while context.in_flight:
        context.in_flight.pop(0).finish_reduction()


def _end_unit(context: TreeContext, state: ShardState, handle: FlatParamHandle) -> None:
    release_handle(context, handle)
    end_unit_if_done(context, state)


def end_unit_if_done(context: TreeContext, state: ShardState) -> None:
    """Free a unit's frozen parameters once nothing in this backward needs them any more.

    That is when all its gradients are there and the backward has passed all its inputs: a frozen
    layer before the unit's last trainable one is still to come.
    """
    if state.training_state is not TrainingState.PRE_BACKWARD or state.num_inputs_pending > 0:
        return
    if any(other.requires_grad and other.is_registered_unsharded for other in state.handles):
        return
    state.transition(TrainingState.POST_BACKWARD)
    for other in state.handles:
        release_handle(context, other)


def release_handle(context: TreeContext, handle: FlatParamHandle) -> None:
    """Show the sharded parameters and free the full ones, unless a forward still needs them."""
    if handle.num_holders > 0:
        return
    handle.register_sharded()
    if not handle.grad.is_in_flight and not context.keeps_unsharded:
        handle.reshard()


def _finish_backward(context: TreeContext) -> None:
    if context.has_gradients:
        _reduce_rest(context)
        _publish(context)
        for ref in context.armed:
            if (state := ref()) is not None:
                state.forward_index = -1
        context.armed.clear()
    context.backward = None
    context.reduce_queue = []
    _return_to_idle(context)


def _reduce_rest(context: TreeContext) -> None:
    queued = {id(handle) for _, handle in context.reduce_queue}
    context.reduce_queue += [
        (state, handle)
        for state in context.live_states()
        for handle in state.handles
        if handle.grad.has_late and id(handle) not in queued
    ]
    while context.reduce_queue:
        state, handle = context.reduce_queue.pop(0)
        if state.requires_gradient_sync:
            _issue(context, state, handle)
    _finish_in_flight(context)


def _publish(context: TreeContext) -> None:
    reduced = list(context.reduced.values())
    used = _exchange_use([handle for _, handle in reduced])
    for (state, handle), flags in zip(reduced, used, strict=True):
        if handle.grad.expect(flags):
            # A parameter that no rank used last time was used, perhaps after its handle was
            # reduced, perhaps elsewhere. All ranks know that now, and reduce once more.
            _issue(context, state, handle)
    _finish_in_flight(context)
    context.reduced = {}
    for (_, handle), flags in zip(reduced, used, strict=True):
        handle.publish_gradients(flags)
    for _, handle in reduced:
        handle.run_gradient_hooks()


def _exchange_use(handles: list[FlatParamHandle]) -> list[list[bool]]:
    """Return for each handle which parameters any rank used, so that the others keep no gradient.

    One all-reduce of a byte for each parameter, for each process group. Only a rank that lacks a
    gradient waits for it; the others know that all were used.
    """
    flags = {id(handle): list(handle.grad.was_used) for handle in handles}
    groups: dict[str, list[FlatParamHandle]] = {}
    for handle in handles:
        if handle.is_sharded:
            groups.setdefault(handle.shard_group.name, []).append(handle)
    for members in groups.values():
        used = [flag for handle in members for flag in flags[id(handle)]]
        shard_group = members[0].shard_group
        if all(used):
            sent = torch.ones(len(used), dtype=torch.uint8, device=shard_group.device)
        else:
            sent = torch.tensor(used, dtype=torch.uint8).to(shard_group.device)
        work = _collectives.all_reduce(sent, shard_group.group, dist.ReduceOp.MAX)
        if all(used) and all(handle.grad.expects_all for handle in members):
            continue
        work.wait()
        received = iter(sent.tolist())
        for handle in members:
            flags[id(handle)] = [bool(next(received)) for _ in handle.entries]
    return [flags[id(handle)] for handle in handles]


def _return_to_idle(context: TreeContext) -> None:
    context.has_gradients = False
    # It may never run: a graph that ends before it, units that share an output.
    context.prefetched = None
    for state in context.live_states():
        state.num_inputs_pending = 0
        if state.training_state is not TrainingState.IDLE:
            state.transition(TrainingState.FORWARD if state.depth else TrainingState.IDLE)
        for handle in state.handles:
            handle.guard.is_in_backward = False
            handle.is_complete = False
            handle.grad.reset_count()
            if handle.is_registered_unsharded or handle.is_unsharded:
                release_handle(context, handle)


def abort_backward(context: TreeContext) -> None:
    """Drop what an aborted backward left behind; already published gradients stay.

    Gradients that `no_sync` kept unsharded are dropped too: the aborted pass may have added to
    some of them.
    """
    context.backward = None
    context.reduce_queue, context.reduced, context.in_flight = [], {}, []
    context.armed.clear()
    for state in context.live_states():
        state.forward_index = -1
        for handle in state.handles:
            handle.drop_gradients()
    _return_to_idle(context)
