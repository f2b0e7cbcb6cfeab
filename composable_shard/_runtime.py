"""What happens to a unit around forward and backward: gather, register, prefetch, free."""

from __future__ import annotations

import sys
import warnings
import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from composable_shard import _trace
from composable_shard._agreement import check_agreement
from composable_shard._buffers import is_never_written
from composable_shard._nested import iter_tensors, map_tensors
from composable_shard._reduction import (
    abort_backward,
    begin_backward,
    end_unit_if_done,
    on_gradient,
    release_handle,
)
from composable_shard._state import ShardState, TrainingState, TreeContext
from composable_shard._traversal import get_states

__all__ = [
    "lazy_init",
    "post_forward",
    "pre_backward",
    "pre_forward",
    "reshard_state",
    "share_context",
    "unshard_state",
]


# Set-up


def share_context(modules: list[nn.Module]) -> TreeContext:
    """Give all units in `modules`, the outermost ones known so far, one new context."""
    states = list(dict.fromkeys(state for module in modules for state in get_states(module)))
    handles = [handle for state in states for handle in state.handles]
    device = handles[0].shard_group.device if handles else torch.device("cpu")
    context = TreeContext(modules, states, device)
    for state in states:
        state.context = context
    return context


def prepare(state: ShardState) -> None:
    """Make the handles of one unit ready: buffers, hooks, and parameters changed from outside.

    Idempotent, and cheap when there is nothing to do: it touches no tensor then.
    """
    for handle in state.handles:
        handle.adopt_changes()
        if not handle.is_attached:
            handle.attach(partial(on_gradient, state.ref))


def lazy_init(module: nn.Module) -> None:
    """Do now what otherwise happens at the first forward of `module`.

    Allocates buffers, takes over parameters that `.to()` or `to_empty()` gave new data, and
    compares with the other ranks that all shard the same model in the same way. A second call
    touches no tensor. One small all-gather for each process group, the first time.

    Raises:
        ValueError: If no module in `module` was sharded.
        RuntimeError: If the ranks disagree, parameters are still on the meta device, or buffers
            have not been initialised after `to_empty()`.
    """
    states = get_states(module)
    if not states:
        raise ValueError(
            f"expected a module with sharded units, got {type(module).__name__}: "
            "call fully_shard on it or on modules inside it first"
        )
    if any(state.context is None for state in states):
        share_context([module])
    for state in states:
        prepare(state)
    contexts = dict.fromkeys(state.context for state in states)
    unchecked = [context for context in contexts if context and not context.is_checked]
    if unchecked:
        _check_trees(unchecked, module)


def _check_trees(contexts: list[TreeContext], module: nn.Module) -> None:
    """Check whole trees, whichever of their modules was called first."""
    # Outermost modules first, for the longest names.
    modules = [root for context in contexts for root in context.live_modules()] + [module]
    states = get_states(module)
    for context in contexts:
        states += context.live_states()
        for state in context.live_states():
            for handle in state.handles:
                handle.check_materialized()
    _check_buffers(modules)
    for context in contexts:
        check_agreement(context.live_states())
    _warn_unmanaged(modules, states)
    for context in contexts:
        context.is_checked = True


def _check_buffers(modules: list[nn.Module]) -> None:
    names = {
        id(buffer): name
        for module in reversed(modules)
        for name, buffer in module.named_buffers()
        if is_never_written(buffer)
    }
    if names:
        raise RuntimeError(
            f"buffers {list(names.values())} were never initialised after to_empty(): they hold "
            "arbitrary values. Compute them again (reset_parameters() or the code that made them) "
            "or load them."
        )


def _warn_unmanaged(modules: list[nn.Module], states: list[ShardState]) -> None:
    entries = [entry for state in states for handle in state.handles for entry in handle.entries]
    managed = {id(param) for entry in entries for param in (entry.sharded, entry.unsharded)}
    names = {
        id(param): name
        for module in reversed(modules)
        for name, param in module.named_parameters()
        if param.requires_grad and id(param) not in managed
    }
    if names:
        warnings.warn(
            f"no unit manages the trainable parameters {list(names.values())}: their gradients "
            "stay local to each rank. Shard the module that holds them, freeze them, or reduce "
            "them yourself.",
            stacklevel=2,
        )


# Forward


def pre_forward(state: ShardState, module: nn.Module, inputs: Any) -> None:
    """Make the unit ready to compute: gather, start the next unit's gather, register.

    One all-gather for each handle that is not unsharded already. If anything fails, the unit is
    as before the call.
    """
    if torch._C._current_graph_task_id() != -1:
        _recompute(state)
        return
    context = state.context
    if context is None:
        context = share_context([module])
    leader = None if context.leader is None else context.leader()
    if leader is None or (leader is state and not _is_running(state, module)):
        _begin_call(context, state, module)
        leader = state
    state.depth += 1
    if state.depth > 1:
        return
    try:
        _unshard_for_forward(context, state, leader)
    except BaseException:
        state.depth -= 1
        _leave_pass(context, state)
        if leader is state:
            _end_call(context, state)
        raise
    state.transition(TrainingState.FORWARD)
    if torch.is_grad_enabled():
        if state.forward_index < 0:
            state.forward_index = context.num_forwards
        context.num_forwards += 1
        if any(not handle.requires_grad for handle in state.handles):
            _watch_inputs(state, inputs)
    if _trace.is_traced():
        _trace.record("compute", state.name)


def _begin_call(context: TreeContext, state: ShardState, module: nn.Module) -> None:
    if not context.is_checked:
        lazy_init(module)
        context = state.context or context
    if context.backward is not None and context.backward() is None:
        abort_backward(context)
    for other in context.live_states():
        if other.depth > 0:
            # A call that was interrupted past the hooks (KeyboardInterrupt) never ended.
            other.depth = 0
            other.transition(TrainingState.IDLE)
        _leave_pass(context, other)
    if context.keeps_unsharded:
        context.keeps_unsharded = False
        for other in context.live_states():
            for handle in other.handles:
                release_handle(context, handle)
    context.leader = state.ref
    state.forward_order.begin()


def _is_running(state: ShardState, module: nn.Module) -> bool:
    """Return whether a call of `module` really is in progress, for a unit that says so.

    A KeyboardInterrupt passes by the hooks that would have ended it. The interpreter's stack
    tells it from a module that calls itself.
    """
    if state.depth == 0:
        return False
    frame = sys._getframe()
    calls = 0
    while frame is not None:
        if frame.f_code is _CALL_CODE and frame.f_locals.get("self") is module:
            calls += 1
        frame = frame.f_back  # type: ignore[assignment]
    return calls > 1


_CALL_CODE = nn.Module._wrapped_call_impl.__code__


def _unshard_for_forward(context: TreeContext, state: ShardState, leader: ShardState) -> None:
    prepare(state)
    needed = state.needed
    for handle in needed:
        handle.check_registered()
    following = leader.forward_order.advance(state.ref)
    for handle in needed:
        handle.unshard(context.streams)
    _prefetch(context, state, following)
    for handle in needed:
        handle.wait_unshard()
    if not state.is_in_pass:
        state.is_in_pass = True
        for handle in needed:
            handle.num_holders += 1
    for handle in needed:
        handle.register_unsharded()


def _prefetch(context: TreeContext, state: ShardState, following: ShardState | None) -> None:
    if context.prefetched is state:
        context.prefetched = None
    if following is None or following is state:
        return
    _drop_prefetched(context)
    for handle in following.needed:
        handle.adopt_changes()
        if handle.is_attached:
            handle.unshard(context.streams)
    context.prefetched = following


def _drop_prefetched(context: TreeContext) -> None:
    """Free what was gathered ahead for a unit that did not run."""
    unused, context.prefetched = context.prefetched, None
    if unused is not None and unused.training_state is TrainingState.IDLE:
        for handle in unused.needed:
            if handle.num_holders == 0 and unused.reshard_after_forward is not False:
                handle.reshard()


def _leave_pass(context: TreeContext, state: ShardState, keeps: bool = False) -> None:
    """Give up the unit's claim on its full parameters: the end of its forward, or an error."""
    state.modules_to_run = state.num_modules
    if not state.is_in_pass:
        return
    state.is_in_pass = False
    for handle in state.needed:
        handle.num_holders -= 1
        if keeps and handle.num_holders == 0:
            handle.register_sharded()
        else:
            release_handle(context, handle)


def _recompute(state: ShardState) -> None:
    """Make the unit ready for a forward inside a backward, as in activation checkpointing.

    What it needs stays until its last gradient, or the end of the backward: early-stopping
    recomputation leaves a module by an exception.
    """
    context = state.context
    if context is None:
        return
    begin_backward(context)
    for handle in state.needed:
        handle.unshard(context.streams)
    for handle in state.needed:
        handle.wait_unshard()
        handle.register_unsharded()


class _InputReached:
    """Called when the backward has passed one input of a unit with frozen parameters."""

    __slots__ = ("_is_done", "_state")

    def __init__(self, state: ShardState) -> None:
        self._state = weakref.ref(state)
        self._is_done = False

    def __call__(self, *_: Any) -> None:
        state = self._state()
        if state is None or self._is_done or state.num_inputs_pending == 0:
            return
        self._is_done = True
        state.num_inputs_pending -= 1
        if state.context is not None:
            end_unit_if_done(state.context, state)


def _watch_inputs(state: ShardState, inputs: Any) -> None:
    for tensor in iter_tensors(inputs):
        if tensor.requires_grad:
            state.num_inputs_pending += 1
            if tensor.grad_fn is None:
                tensor.register_hook(_InputReached(state))
            else:
                tensor.grad_fn.register_prehook(_InputReached(state))


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
            _leave_pass(context, state, keeps)
        if is_leader:
            _end_call(context, state)
    return output


def _end_call(context: TreeContext, leader: ShardState) -> None:
    _drop_prefetched(context)
    context.leader = None
    leader.forward_order.end()
    for state in context.live_states() if context.has_groups else ():
        # A unit of several modules of which this call ran only some.
        if state.depth == 0:
            _leave_pass(context, state)


class _OutputReached:
    """Called when a backward reaches an output of a unit, before any of the unit's own nodes.

    Keeps the unit alive as long as the graph, so that a backward works after `del model`.
    """

    __slots__ = ("_num_writes", "_state")

    def __init__(self, state: ShardState, num_writes: int) -> None:
        self._state = state
        self._num_writes = num_writes

    def __call__(self, *_: Any) -> None:
        pre_backward(self._state, self._num_writes)


def _arm(context: TreeContext, state: ShardState, output: Any) -> tuple[Any, bool]:
    extents = [extent for handle in state.needed if (extent := handle.unsharded_extent)]
    is_aliased = is_armed = False
    for tensor in iter_tensors(output):
        pointer = 0 if not extents else _data_pointer(tensor)
        is_aliased |= any(start <= pointer < end for start, end in extents)
    if is_aliased:
        output = map_tensors(output, partial(_copy_alias, extents))
    if not torch.is_grad_enabled():
        return output, False
    hook = None
    for tensor in iter_tensors(output):
        if tensor.requires_grad and tensor.grad_fn is not None:
            if hook is None:
                hook = _OutputReached(state, _count_writes(state))
            tensor.grad_fn.register_prehook(hook)
            base = tensor._base
            if base is not None and base.grad_fn is not None:
                # An in-place operation on a view gives the view a new node, fed by its base's.
                base.grad_fn.register_prehook(hook)
            is_armed = True
    if is_armed:
        context.armed.pop(state.ref, None)
        context.armed[state.ref] = None
    return output, is_armed


def _data_pointer(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # tensors without storage: fake ones, some subclasses
        return 0


def _copy_alias(extents: list[tuple[int, int]], tensor: Tensor) -> Tensor:
    pointer = _data_pointer(tensor)
    return tensor.clone() if any(start <= pointer < end for start, end in extents) else tensor


def _count_writes(state: ShardState) -> int:
    return sum(handle.guard.num_writes for handle in state.needed)


# Backward


def pre_backward(state: ShardState, num_writes: int) -> None:
    """Make the unit ready for its backward; no-op if it is.

    One all-gather for each handle that is not unsharded, and the gather of the unit that is
    expected next is started.

    Raises:
        RuntimeError: If a sharded parameter was written since the forward.
    """
    context = state.context
    if context is None:
        raise RuntimeError(f"unit '{state.name}' was never prepared; please report this")
    begin_backward(context)
    if state.training_state is TrainingState.PRE_BACKWARD:
        return
    if _count_writes(state) != num_writes:
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
        handle.guard.is_in_backward = True
        handle.unshard(context.streams)
    following = context.next_in_backward.get(state.ref)
    _prefetch(context, state, None if following is None else following())
    for handle in state.needed:
        handle.wait_unshard()
        handle.register_unsharded()
    if _trace.is_traced():
        _trace.record("compute_backward", state.name)


# By hand


def unshard_state(state: ShardState) -> None:
    """Start gathering a unit's full parameters and hold them until `reshard_state`."""
    if state.is_held or state.context is None:
        return
    for handle in state.needed:
        handle.check_registered()
    for handle in state.needed:
        handle.unshard(state.context.streams)
    for handle in state.needed:
        handle.num_holders += 1
    state.is_held = True


def show_unsharded(state: ShardState) -> None:
    """Wait for `unshard_state` and register the full parameters."""
    for handle in state.needed:
        handle.wait_unshard()
        handle.register_unsharded()


def reshard_state(state: ShardState) -> None:
    """Free a unit's full parameters and register the sharded ones, unless a pass needs them."""
    if state.context is None:
        return
    if state.is_held:
        state.is_held = False
        for handle in state.needed:
            handle.num_holders -= 1
    if state.training_state is TrainingState.IDLE:
        for handle in state.needed:
            release_handle(state.context, handle)
