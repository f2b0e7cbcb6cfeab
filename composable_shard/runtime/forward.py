"""A forward: gather a unit, show its parameters, free them; clean up after interrupted calls.

[Note: Transforms]
Inside `torch.func.grad`, `vmap` and the like the hooks step out of all transforms, and modules see
full parameters. Graphs of transforms have no output to hook: see [Note: Graphs of gradients].
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import nn

from composable_shard.comm import trace
from composable_shard.flat_param import (
    FORWARD,
    drop_unpacked,
)
from composable_shard.runtime.aborted import drop_aborted, note_unreached_call
from composable_shard.runtime.backward import CallReached, recompute
from composable_shard.runtime.contents import has_changed
from composable_shard.runtime.forward_call import ForwardCall
from composable_shard.runtime.gathers import (
    drop_prefetched,
    release_handle,
)
from composable_shard.runtime.initialization import initialize
from composable_shard.runtime.membership import adopt_contents, renew_context, share_context
from composable_shard.runtime.open_graphs import UnitCall, alive
from composable_shard.runtime.outputs import arm, serve_graphs
from composable_shard.runtime.saved_values import outermost_region
from composable_shard.runtime.training_state import TrainingState
from composable_shard.runtime.tree import called_modules, calling_modules, read_state
from composable_shard.runtime.unit import ShardState, TreeContext
from composable_shard.torch_private import (
    are_transforms_active,
    current_backward_id,
    is_in_function,
    num_dispatch_modes,
    outside_transforms,
    top_saved_tensors_hooks,
    unobserved,
)

# Before a forward


def pre_forward(state: ShardState, module: nn.Module, args: tuple[Any, ...]) -> None:
    """Make the unit ready to compute: gather, start the next unit's gather, register.

    Runs as the module's first forward hook. Issues one all-gather for each sharded handle. If
    anything fails, the unit is as before the call.
    """
    if (are_transforms_active() or num_dispatch_modes()) and (outside := unobserved()) is not None:
        with outside:
            return pre_forward(state, module, args)
    if state.training_state is TrainingState.UNSHARDED_PARAMS:
        _compute_as_shown(state)
        return
    if current_backward_id() != -1:
        _prepare_in_backward(state, module)
        recompute(state)
        return
    context = share_context([module]) if state.context is None else state.context
    call = context.call
    is_again = state.depth > 0 or (call is not None and call.leader is state.ref)
    # The last: an interrupt has ended the call unseen.
    if call is None or call.leader() is None or (is_again and not _is_running(state)):
        call = _begin_call(context, state, module)
        context = state.context or context  # the call may have rebuilt the tree
    context.entered[state.ref] = None  # first: after any interrupt the next call cleans up here
    state.depth += 1
    if state.depth > 1:
        return
    try:
        _unshard(context, state, call)
        if state.before_forward is not None and state not in call.prepared:
            # Batch norm writes buffers in training mode, a user's module perhaps with grad enabled.
            is_trained = module.training or torch.is_grad_enabled()
            state.before_forward.run(is_followed=is_trained and state.settings.reduces_fully)
            call.prepared.add(state)
    except BaseException:
        _leave_failed_call(context, state, call)
        raise
    state.transition(TrainingState.FORWARD)
    _number_call(context, state, call)
    if trace.logs:
        trace.record("compute", state.name)


def _prepare(context: TreeContext, state: ShardState, module: nn.Module) -> TreeContext:
    """Return a unit's tree, idle, up to date and compared with the other ranks' trees."""
    if context.backward is not None:
        _is_in_backward(context)
    if context.is_checked and (
        context.has_changed or any(map(has_changed, context.watched_modules()))
    ):
        _recover_interrupted_call(context)
        adopt_contents(context)
        if context.has_changed:
            renew_context(context)
            context = state.context or context
    if not context.is_checked:
        initialize(module, calling_modules(module))
        context = state.context or context
    if context.has_aborted or context.entered or context.call is not None:
        _recover_interrupted_call(context)
    return context


def _prepare_in_backward(state: ShardState, module: nn.Module) -> None:
    """Make the tree ready for a forward that runs in a backward, perhaps its very first one.

    If the backward is that of another graph (a hook, a function's `backward`), no call of the tree
    has adopted what was changed at rest since the last one.
    """
    context = share_context([module]) if state.context is None else state.context
    if context.backward is None and context.call is None and not context.entered:
        _prepare(context, state, module)
    for handle in state.needed_handles:
        handle.adopt_changes()


def _begin_call(
    context: TreeContext, state: ShardState, module: nn.Module
) -> ForwardCall[ShardState]:
    if trace.profiling.asks() is not trace.profiling.is_found:
        trace.profiling.change()
    context = _prepare(context, state, module)
    if torch.is_grad_enabled():
        graphs = context.graphs
        graphs.start = graphs.num_calls
        graphs.num_open += 1
        if graphs.num_open > 1:
            # Ctrl-C may have ended a backward before a unit noticed it: its gradient is dropped.
            for handle in context.live_handles():
                drop_unpacked(handle.grads)
        if graphs.num_open > graphs.most_open:
            note_unreached_call(context)
    context.call = call = ForwardCall(state.ref, state.forward_order)
    if context.keeps_gradients:
        context.gathers.gather_kept(context)
    return call


def _number_call(context: TreeContext, state: ShardState, call: ForwardCall[ShardState]) -> None:
    """Note which calls of units a backward may reach, and in which order they began."""
    graphs = context.graphs
    if torch.is_grad_enabled():
        earliest = 0 if graphs.spans_calls else graphs.start
        if graphs.first_calls.get(state.ref, -1) < earliest:
            graphs.first_calls[state.ref] = graphs.num_calls
        state.last_call = last_call = UnitCall(graphs.num_calls)
        graphs.num_calls += 1
        call.innermost = CallReached(state, last_call, call.innermost)
        top, known = top_saved_tensors_hooks(False), state.inspection
        may_begin = top is not None or known.is_watched or known.keeps_hooks
        if may_begin and known.begin(state.name, state.needed_handles, top):
            last_call.region = graphs.enter_region(outermost_region(), state.ref)
    elif is_in_function():
        graphs.may_recompute.add(state.ref)


def _unshard(context: TreeContext, state: ShardState, call: ForwardCall[ShardState]) -> None:
    needed = state.needed_handles
    for handle in needed:
        handle.adopt_changes()
        if handle.shown.state.is_fixed:
            _compute_as_shown(state)
        handle.shown.check_registered()
    upcoming = call.advance(state.ref)
    chosen = state.settings.forward_prefetch
    ahead = context.gathers.choose_ahead(state, call.prefetched, chosen, upcoming)
    if not state.is_in_pass:
        # Claim before gathering, so that `_leave_pass` frees the values after an error.
        state.is_in_pass = True
        for handle in needed:
            handle.full.readers.claims.add((FORWARD, state.ref))
    for handle in needed:
        handle.unshard(context.streams, "forward")
    if ahead:
        context.gathers.gather_ahead(
            context, call.prefetched, ahead, "forward", are_chosen=chosen is not None
        )
    for handle in needed:
        handle.full.wait()
    for handle in needed:
        handle.shown.show_unsharded()


def _compute_as_shown(state: ShardState) -> None:
    """Let the unit compute with parameters that a step may not exchange, or raise."""
    for handle in state.needed_handles:
        is_trained = torch.is_grad_enabled() and handle.requires_grad
        handle.shown.state.let_compute(handle.shown, state.name, is_trained=is_trained)


# After a forward


def post_forward(state: ShardState, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Free the unit's full parameters by policy and arm its backward; return the output.

    A forward hook that runs after an exception too, with `output` None. Tensors in the output that
    are views of a parameter are replaced by copies: the parameter's storage is about to be freed.
    """
    if are_transforms_active():
        return _leave_transforms(state, module, args, output)
    if num_dispatch_modes() and (outside := unobserved()) is not None:
        with outside:
            return post_forward(state, module, args, output)
    if current_backward_id() != -1 or state.depth == 0 or state.context is None:
        return output
    state.depth -= 1
    if state.depth > 0:
        return output
    context = state.context
    call = context.call
    is_leader = call is not None and call.leader is state.ref
    reached: CallReached | None = None if call is None else call.innermost
    if call is not None and reached is not None and reached.state is state:
        call.innermost, reached.call.end = reached.outer, context.graphs.num_calls
    else:
        reached = None  # this call records no graph
    state.transition(TrainingState.IDLE)
    state.modules_to_run -= 1
    is_armed, known = False, state.inspection
    has_hooks = known.hooks is not None
    try:
        if has_hooks:
            known.end(state.name, sys.exc_info()[1])
        if output is not None:
            output, is_armed = arm(context, state, module, output, reached, is_looked_at=has_hooks)
    finally:
        if state.modules_to_run == 0 or is_leader:
            keeps = state.settings.reshard_after_forward is False or (
                state.settings.reshard_after_forward is None and is_leader and is_armed
            )
            _leave_pass(context, state, reached, keeps=keeps, is_armed=is_armed)
        if call is not None and is_leader:
            _end_call(context, state, call)
    return output


def _leave_transforms(state: ShardState, module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
    if out is not None and state.context is not None:
        serve_graphs(state)
    with outside_transforms():
        post_forward(state, module, args, None)
    return out


def _leave_pass(
    context: TreeContext,
    state: ShardState,
    reached: CallReached | None = None,
    *,
    keeps: bool = False,
    is_armed: bool = False,
) -> None:
    """Release the unit's claim on its full parameters, at the end of its forward or on error."""
    state.modules_to_run = state.num_modules
    if state.is_in_pass:
        for handle in state.needed_handles:
            handle.full.readers.claims.discard((FORWARD, state.ref))
        try:
            for handle in state.needed_handles:
                if handle.full.readers.claims:
                    continue
                is_edited = handle.adopt_shown_changes("in forward", keeps=True)
                if is_edited and reached is not None:
                    reached.note_edits()
                if handle.full.params.aliases.left and handle.keep_gradients is not None:
                    handle.keep_gradients(handle)
        finally:
            for handle in state.needed_handles:
                if keeps and not handle.full.readers.claims:
                    handle.shown.show_sharded()
                else:
                    release_handle(handle, is_backward_next=is_armed)
        state.is_in_pass = False
    if state.depth == 0:  # last, so that after an interrupt `_recover_interrupted_call` repeats it
        context.entered.pop(state.ref, None)


# Calls of a tree


def _leave_failed_call(
    context: TreeContext, state: ShardState, call: ForwardCall[ShardState]
) -> None:
    """Restore the unit's state from before a call that failed to begin."""
    state.depth -= 1
    _leave_pass(context, state)
    if call.leader is state.ref:
        _end_call(context, state, call)


def _end_call(context: TreeContext, leader: ShardState, call: ForwardCall[ShardState]) -> None:
    """End a tree's call: free unused prefetched units, release claims that are left."""
    if call.prefetched:
        drop_prefetched(call.prefetched)
    leader.forward_order = call.order
    context.call = None
    for state in alive(context.entered) if context.entered else ():
        # The call may have run only some of a unit's modules.
        if state.depth == 0:
            _leave_pass(context, state, keeps=state.settings.reshard_after_forward is False)


def _recover_interrupted_call(context: TreeContext) -> None:
    """Clean up after a call or backward that an exception ended; no call of the tree may run."""
    if context.has_aborted:
        drop_aborted(context)
    for other in reversed(alive(context.entered)):
        other.inspection.end(other.name, None)
        # After a KeyboardInterrupt the post-forward hook has not run.
        other.depth = 0
        if other.training_state is TrainingState.FORWARD:
            other.transition(TrainingState.IDLE)
        _leave_pass(context, other)
    if context.call is not None:
        drop_prefetched(context.call.prefetched)
        context.call = None


def check_is_idle(context: TreeContext, what: str) -> None:
    """Check that the tree runs neither forward nor backward; clean up after interrupted ones.

    Args:
        context: The tree.
        what: How the message begins, for example "unshard_params can't be opened".

    Raises:
        RuntimeError: If it runs either.
    """
    for state in alive(context.entered):
        if state.depth == 0 or _count_calls(state) == 0:
            continue
        raise RuntimeError(
            f"{what} inside the forward of unit '{state.name}', which shows its full parameters "
            "already. Do it before or after the call of the model."
        )
    if context.backward is not None and _is_in_backward(context):
        raise RuntimeError(
            f"{what} inside a backward pass. Do it after backward() has returned; gradients are "
            "complete only then."
        )
    _recover_interrupted_call(context)


def _is_in_backward(context: TreeContext) -> bool:
    """Return whether a backward runs; waits up to 1 s until one that has raised is dropped.

    An accelerator's autograd thread may drop it only after backward() has raised in this thread.
    """
    deadline = time.monotonic() + 1
    while context.backward and current_backward_id() == -1 and time.monotonic() < deadline:
        time.sleep(0.0001)
    return context.backward is not None


def _is_running(state: ShardState) -> bool:
    """Return whether another call of the unit is running, not ended by an exception."""
    return state.depth > 0 and _count_calls(state) > 1


def _count_calls(state: ShardState) -> int:
    """Return how many calls of the unit's modules are on the interpreter's stack.

    A flag can't replace this: nn.Module runs its hooks after an Exception only, so a
    KeyboardInterrupt ends a call unseen, and the call's frame holds no object of ours.
    """
    return sum(read_state(module) is state for module in called_modules())
