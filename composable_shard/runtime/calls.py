"""The calls of a tree: which ones run, how they end, and what an interrupted one leaves behind."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from composable_shard.runtime.backward import abort_backward
from composable_shard.runtime.prefetch import drop_prefetched
from composable_shard.runtime.state import ShardState, TrainingState, TreeContext, read_state
from composable_shard.runtime.unit_end import release_handle

__all__ = [
    "check_forward_in_scope",
    "check_is_idle",
    "end_call",
    "is_in_function",
    "is_running",
    "leave_pass",
    "settle",
]


def is_running(state: ShardState) -> bool:
    """Return whether a call of the unit really is in progress, for a unit that says so.

    A KeyboardInterrupt passes by the hooks that would have ended it. The interpreter's stack
    tells it from a module that calls itself.
    """
    return state.depth > 0 and _count_calls(state) > 1


def _count_calls(state: ShardState) -> int:
    """Return how many calls of the unit's modules are on the interpreter's stack."""
    frame = sys._getframe()
    calls = 0
    while frame is not None:
        if frame.f_code is _CALL_CODE and read_state(frame.f_locals["self"]) is state:
            calls += 1
        frame = frame.f_back  # type: ignore[assignment]
    return calls


_CALL_CODE = nn.Module._wrapped_call_impl.__code__


def is_in_function() -> bool:
    """Return whether a forward of a `torch.autograd.Function` is on the interpreter's stack."""
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if (
            code.co_name == "forward"
            and code.co_argcount
            and isinstance(frame.f_locals.get(code.co_varnames[0]), FunctionCtx)
        ):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def leave_pass(
    context: TreeContext, state: ShardState, *, keeps: bool = False, is_armed: bool = False
) -> None:
    """Give up the unit's claim on its full parameters: the end of its forward, or an error."""
    state.modules_to_run = state.num_modules
    if state.depth == 0:
        context.entered.pop(state.ref, None)
    if not state.is_in_pass:
        return
    state.is_in_pass = False
    for handle in state.needed:
        handle.num_holders -= 1
        if handle.num_holders == 0:
            handle.warn_of_edits("in forward")
        if keeps and handle.num_holders == 0:
            handle.register_sharded()
        else:
            release_handle(context, handle, is_backward_next=is_armed)


def end_call(context: TreeContext, leader: ShardState) -> None:
    """Free what was gathered ahead, and reset what belongs to the call that `leader` led."""
    drop_prefetched(context)
    context.leader = None
    leader.forward_order.end()
    for state in context.entered_states():
        # A unit of several modules of which this call ran only some.
        if state.depth == 0:
            leave_pass(context, state)


def settle(context: TreeContext) -> None:
    """End what an exception has left half done; no call of the tree is running."""
    if context.backward is not None and context.backward() is None:
        abort_backward(context)
    for other in context.entered_states():
        if other.depth > 0:
            # A call that was interrupted past the hooks (KeyboardInterrupt) never ended.
            other.depth = 0
            other.transition(TrainingState.IDLE)
        leave_pass(context, other)


def check_is_idle(context: TreeContext, what: str) -> None:
    """Check that the tree runs neither forward nor backward, and end what was interrupted.

    Args:
        context: The tree.
        what: How the message begins, for example "unshard_params can't be opened".

    Raises:
        RuntimeError: If it does.
    """
    for state in context.entered_states():
        if state.depth == 0 or _count_calls(state) == 0:
            continue
        raise RuntimeError(
            f"{what} inside the forward of unit '{state.name}', which shows its full parameters "
            "already. Do it before or after the call of the model."
        )
    if context.backward is not None and context.backward() is not None:
        raise RuntimeError(
            f"{what} inside a backward pass. Do it after backward() has returned; gradients are "
            "complete only then."
        )
    settle(context)
    leader = None if context.leader is None else context.leader()
    if leader is not None:
        end_call(context, leader)


def check_forward_in_scope(state: ShardState) -> None:
    """Check that a forward inside `unshard_params` can run: on what the scope shows.

    Raises:
        RuntimeError: If it records a graph, or this rank has no full values.
    """
    for handle in state.needed:
        if not handle.is_in_scope:
            continue
        if not handle.has_scope_values:
            raise RuntimeError(
                f"unit '{state.name}' can't run inside unshard_params(rank0_only=True) on this "
                "rank, which has no full parameters. Run the model on the first rank only, or pass "
                "rank0_only=False."
            )
        if torch.is_grad_enabled() and handle.requires_grad:
            raise RuntimeError(
                f"a training forward of unit '{state.name}' inside unshard_params: gradients would "
                "not be reduced. Run it under torch.no_grad(), or train outside the scope."
            )
        handle.show_scope_params()
