"""What happens to a unit around forward and backward: gather, register, prefetch, free."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from composable_shard.comm import trace
from composable_shard.runtime.backward import begin_backward, check_not_in_scope
from composable_shard.runtime.buckets import is_recomputed
from composable_shard.runtime.calls import (
    check_forward_in_scope,
    end_call,
    is_in_function,
    is_running,
    leave_pass,
    settle,
)
from composable_shard.runtime.casts import iter_tensors, map_tensors
from composable_shard.runtime.early_gradients import check_not_written
from composable_shard.runtime.initialization import lazy_init, prepare, share_context
from composable_shard.runtime.prefetch import (
    choose_ahead,
    drop_prefetched,
    gather_ahead,
    run_backward_after,
)
from composable_shard.runtime.state import ShardState, TrainingState, TreeContext
from composable_shard.runtime.unit_end import end_units_after, open_unit, release_handle

__all__ = ["post_forward", "pre_backward", "pre_forward"]


# Forward


def pre_forward(state: ShardState, module: nn.Module) -> None:
    """Make the unit ready to compute: gather, start the next unit's gather, register.

    One all-gather for each handle that is not unsharded already. If anything fails, the unit is
    as before the call.
    """
    if state.training_state is TrainingState.UNSHARDED_PARAMS:
        check_forward_in_scope(state)
        return
    if torch._C._current_graph_task_id() != -1:
        _recompute(state)
        return
    context = share_context([module]) if state.context is None else state.context
    leader = _find_leader(context, state, module)
    context = state.context or context  # the first call may make one for more units
    state.depth += 1
    if state.depth > 1:
        return
    context.entered[state.ref] = None
    try:
        _unshard_for_forward(context, state, leader)
        if state.buffers is not None:
            # Batch norm moves its statistics in training mode, a user's module with a graph.
            is_trained = module.training or torch.is_grad_enabled()
            state.buffers.broadcast_if_due(
                context.call, is_followed=is_trained and state.puts_nothing_off
            )
    except BaseException:
        state.depth -= 1
        leave_pass(context, state)
        if leader is state:
            end_call(context, state)
        raise
    state.transition(TrainingState.FORWARD)
    context.num_calls += 1
    state.last_call = context.num_calls
    if torch.is_grad_enabled():
        _number_call(context, state)
    elif any(handle.has_early_hooks for handle in state.needed):
        # A reentrant checkpoint: its backward runs the forward again. Not so an evaluation.
        state.may_recompute |= is_in_function()
    if trace.logs:
        trace.record("compute", state.name)


def _number_call(context: TreeContext, state: ShardState) -> None:
    if state.forward_index < (0 if context.spans_calls else context.call_start):
        state.forward_index = context.num_forwards
    state.call_number = context.num_forwards
    state.call_sequence_nr = _next_sequence_nr()
    context.num_forwards += 1
    state.is_checkpointed = is_recomputed()


def _find_leader(context: TreeContext, state: ShardState, module: nn.Module) -> ShardState:
    """Return the unit that leads the running call; where none runs, a call of `state` begins."""
    leader = None if context.leader is None else context.leader()
    if leader is None or ((state.depth > 0 or leader is state) and not is_running(state)):
        _begin_call(context, state, module)
        return state
    return leader


def _begin_call(context: TreeContext, state: ShardState, module: nn.Module) -> None:
    if not context.is_checked:
        lazy_init(module)
        context = state.context or context
    settle(context)
    if context.keeps_unsharded:
        context.keeps_unsharded = False
        for other in context.live_states():
            for handle in other.handles:
                release_handle(context, handle)
    context.leader, context.call = state.ref, object()
    if torch.is_grad_enabled():
        context.call_start = context.num_forwards
    state.forward_order.begin()


_next_sequence_nr = torch._C._autograd._get_sequence_nr


def _unshard_for_forward(context: TreeContext, state: ShardState, leader: ShardState) -> None:
    prepare(state)
    needed = state.needed
    check_forward_in_scope(state)
    for handle in needed:
        handle.check_registered()
    chosen = state.forward_prefetch
    upcoming = leader.forward_order.advance(state.ref)
    ahead = choose_ahead(context, state, chosen, upcoming)
    for target in ahead:
        prepare(target)
    if not state.is_in_pass:
        # Before anything is gathered: after an error `leave_pass` frees it.
        state.is_in_pass = True
        for handle in needed:
            handle.num_holders += 1
    for handle in needed:
        handle.unshard(context.streams)
    if ahead:
        gather_ahead(context, ahead, are_chosen=chosen is not None)
    for handle in needed:
        handle.wait_unshard()
    for handle in needed:
        handle.register_unsharded()


def _recompute(state: ShardState) -> None:
    """Make the unit ready for a forward inside a backward, as in activation checkpointing.

    What it needs stays until its last gradient, or the end of the backward: early-stopping
    recomputation leaves a module by an exception.
    """
    context = state.context
    if context is None:
        return
    begin_backward(context)
    state.is_recomputed = True
    check_not_written(context, state.needed)
    for handle in state.needed:
        handle.unshard(context.streams)
    for handle in state.needed:
        handle.wait_unshard()
        handle.register_unsharded()


def post_forward(state: ShardState, module: nn.Module, output: Any) -> Any:
    """Free the unit's full parameters by policy and arm its backward; return the output.

    Runs after an exception too, with `output` None. Tensors in the output that are views of a
    parameter are replaced by copies: the parameter's storage is about to be freed.
    """
    if torch._C._current_graph_task_id() != -1 or state.depth == 0 or state.context is None:
        return output
    state.depth -= 1
    if state.depth > 0:
        return output
    context = state.context
    is_leader = context.leader is state.ref
    state.transition(TrainingState.IDLE)
    state.modules_to_run -= 1
    is_armed = False
    try:
        if output is not None:
            output, is_armed = _arm(context, state, output)
    finally:
        if state.modules_to_run == 0 or is_leader:
            keeps = state.reshard_after_forward is False or (
                state.reshard_after_forward is None and is_leader and is_armed
            )
            leave_pass(context, state, keeps=keeps, is_armed=is_armed)
        if is_leader:
            end_call(context, state)
    return output


class _OutputReached:
    """Called when a backward reaches an output of a unit, before any of the unit's own nodes.

    Keeps the unit alive as long as the graph, so that a backward works after `del model`.
    """

    __slots__ = ("end", "num_writes", "runs_alone", "start", "state")

    def __init__(self, state: ShardState, context: TreeContext) -> None:
        self.state = state
        self.num_writes = _count_writes(state)
        # [Note: End of a unit]
        self.start, self.end = state.call_number, context.num_forwards
        # [Note: Buckets]
        self.runs_alone = (
            state.buckets is not None
            and context.num_calls == state.last_call
            and not is_recomputed()
        )

    def __call__(self, *_: Any) -> None:
        pre_backward(self)


def _arm(context: TreeContext, state: ShardState, output: Any) -> tuple[Any, bool]:
    extents = [extent for handle in state.needed if (extent := handle.unsharded_extent)]
    tensors = _tensors(output)
    if extents and any([_is_within(extents, tensor) for tensor in tensors]):
        output = map_tensors(output, partial(_copy_alias, extents))
        tensors = _tensors(output)
    if not torch.is_grad_enabled():
        return output, False
    # An input, or the output of a unit inside, may come through unchanged, perhaps on this rank
    # only. With nodes of their own the backward reaches the units in the same order on all ranks.
    newest = max(state.call_sequence_nr, context.output_sequence_nr)
    if any([_is_older(tensor, newest) for tensor in tensors]):
        output = map_tensors(
            output, lambda tensor: tensor.view_as(tensor) if _is_older(tensor, newest) else tensor
        )
        tensors = _tensors(output)
    context.output_sequence_nr = _next_sequence_nr()
    return output, _register(context, state, tensors)


def _register(context: TreeContext, state: ShardState, tensors: Sequence[Tensor]) -> bool:
    """Let the backward tell when it reaches outputs of the unit; return whether it may."""
    hook = None
    is_armed = False
    for tensor in tensors:
        if tensor.requires_grad and tensor.grad_fn is not None:
            if hook is None:
                hook = _OutputReached(state, context)
            tensor.grad_fn.register_prehook(hook)
            base = tensor._base
            if base is not None and not _is_older(base, state.call_sequence_nr) and base.grad_fn:
                # An in-place operation on a view gives the view a new node, fed by its base's.
                base.grad_fn.register_prehook(hook)
            is_armed = True
    if is_armed:
        context.armed.pop(state.ref, None)
        context.armed[state.ref] = None
    return is_armed


def _is_older(tensor: Tensor, sequence_nr: int) -> bool:
    """Return whether autograd knew a tensor before it had recorded so many nodes."""
    node = tensor.grad_fn
    return tensor.requires_grad if node is None else node._sequence_nr() < sequence_nr


def _data_pointer(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # tensors without storage: fake ones, some subclasses
        return 0


def _is_within(extents: list[tuple[int, int]], tensor: Tensor) -> bool:
    pointer = _data_pointer(tensor)
    return any([start <= pointer < end for start, end in extents])


def _copy_alias(extents: list[tuple[int, int]], tensor: Tensor) -> Tensor:
    return tensor.clone() if _is_within(extents, tensor) else tensor


def _tensors(output: Any) -> Sequence[Tensor]:
    """Return the tensors in an output, which mostly is one."""
    return (output,) if isinstance(output, Tensor) else list(iter_tensors(output))


def _count_writes(state: ShardState) -> int:
    count = 0
    for handle in state.needed:
        count += handle.guard.num_writes
    return count


# Backward


def pre_backward(call: _OutputReached) -> None:
    """End the units that are over; make the one whose output was reached ready, if it is not.

    One all-gather for each handle that is not unsharded, and the gather of the unit that is
    expected next is started.

    Raises:
        RuntimeError: If a sharded parameter was written since the forward.
    """
    state = call.state
    context = state.context
    if context is None:
        raise RuntimeError(f"unit '{state.name}' was never prepared; please report this")
    check_not_in_scope(state)
    begin_backward(context)
    _reach(context, call)
    # The owner of borrowed ones may have ended since, and freed them.
    has_borrowed = all(handle.is_registered_unsharded for handle in state.borrowed)
    if state.training_state is TrainingState.PRE_BACKWARD and has_borrowed:
        return
    if _count_writes(state) != call.num_writes:
        names = [str(entry.label) for handle in state.needed for entry in handle.entries]
        raise RuntimeError(
            f"parameters of unit '{state.name}' ({', '.join(names)}) were written between a "
            "forward and its backward, so the gradients would be those of other weights. Call "
            "optimizer.step() and edit parameters before the forward or after the backward."
        )
    if torch.is_grad_enabled():
        context.keeps_unsharded = True
    state.transition(TrainingState.PRE_BACKWARD)
    for handle in state.needed:
        if handle.guard.has_new_attributes:
            handle.adopt_hooks()
        # Once registered it holds what is needed, though on some ranks a gradient may have taken
        # the place of a value meanwhile: all ranks must decide alike.
        if not handle.is_registered_unsharded:
            handle.unshard(context.streams)
    _gather_ahead_in_backward(context, state)
    for handle in state.needed:
        handle.wait_unshard()
        handle.register_unsharded()
    if trace.logs:
        trace.record("compute_backward", state.name)


def _gather_ahead_in_backward(context: TreeContext, state: ShardState) -> None:
    chosen = state.backward_prefetch
    ahead = choose_ahead(context, state, chosen, run_backward_after(context, state))
    if ahead and chosen is None and context.prefetched:
        # A backward may leave units out. A forward in the known order leaves out none of those that
        # are on their way, and its end frees them if it does.
        drop_prefetched(context, keeps=ahead, keeps_chosen=True)
    gather_ahead(context, ahead, are_chosen=chosen is not None)


def _reach(context: TreeContext, call: _OutputReached) -> None:
    """End the units that are over, now that the backward has reached a call."""
    context.reaches_earlier_call |= call.start < context.call_start
    open_unit(context, call.state, call.start)
    end_units_after(context, call.end)
    buckets = call.state.buckets
    if buckets is not None:
        is_safe = call.runs_alone and context.is_sure_to_reduce and context.is_only_one_armed()
        buckets.reach(call.start if is_safe else None)
