"""Hooks that a backward runs: on outputs of units, on forwards run again, on gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from composable_shard.comm import trace
from composable_shard.flat_param import LATE_GRAPH, NESTED, FlatParamHandle
from composable_shard.runtime.backward_pass import BackwardPass, begin_backward
from composable_shard.runtime.open_graphs import UnitCall
from composable_shard.runtime.reduction_queue import NO_CALL, NOT_IN_USE, Item
from composable_shard.runtime.saved_values import outermost_region
from composable_shard.runtime.stage import DELIVERED
from composable_shard.runtime.training_state import TrainingState
from composable_shard.runtime.unit import ShardState
from composable_shard.torch_private import current_backward_id

_num_writes: Callable[[FlatParamHandle], int] = attrgetter("guard.num_writes")


class CallReached:
    """A hook on the outputs of one call of a unit; announces the call to a backward.

    Keeps the unit alive as long as the graph, so that a backward works after `del model`.

    An inner call first announces the call around it, if that was not announced yet: the loss may
    depend on the inner call's output alone.

    Args:
        state: The unit whose call begins.
        call: The call.
        outer: The `CallReached` of the call around it, if any.

    Attributes:
        backward_id: Autograd's number of the last backward to which the call was announced.
        runs_alone: Whether no other unit of its tree ran in this call, nor may it run again.
    """

    __slots__ = ("_num_writes", "backward_id", "call", "outer", "runs_alone", "state")

    def __init__(self, state: ShardState, call: UnitCall, outer: CallReached | None) -> None:
        self.state, self.call, self.outer = state, call, outer
        self._num_writes = sum(map(_num_writes, state.needed_handles))
        self.runs_alone = False
        self.backward_id = -1

    def note_edits(self) -> None:
        """Note that the call has edited parameters: its graph goes on with the new values."""
        self._num_writes = sum(map(_num_writes, self.state.needed_handles))

    @property
    def is_announceable(self) -> bool:
        """Whether an inner call may announce this one; else only its own outputs do, or raise."""
        needed = self.state.needed_handles
        is_over = self.call.end != -1 and not any([h.shown.state.is_fixed for h in needed])
        return is_over and sum(map(_num_writes, needed)) == self._num_writes

    def __call__(self, *_: Any) -> None:
        """End the units that are over; make the unit of the call ready.

        Issues one all-gather for each sharded handle, and starts the gather of the unit that is
        expected next.
        """
        state, outer = self.state, self.outer
        context = state.context
        if context is None:
            raise RuntimeError(f"unit '{state.name}' was never prepared; please report this")
        _check_may_reach(state)
        backward: BackwardPass = context.backward or begin_backward(context)
        self.backward_id = backward.graph_task_id
        if outer is not None and outer.backward_id != self.backward_id and outer.is_announceable:
            outer()
        if torch.is_grad_enabled():
            backward.make_graph(state)
        backward.reach(state, self.call.number, self.call.end)
        for each in backward.queue.watchers:
            each.reach(state, self.call.number, runs_alone=self.runs_alone)
        is_ready = state.training_state is TrainingState.PRE_BACKWARD and all(
            # The owner of borrowed handles may have ended since, and freed them.
            handle.shown.is_unsharded
            for handle in state.borrowed
        )
        region = self.call.region
        if is_ready and region is None:
            return
        if not is_ready and sum(map(_num_writes, state.needed_handles)) != self._num_writes:
            names = [
                str(entry.label) for handle in state.needed_handles for entry in handle.entries
            ]
            raise RuntimeError(
                f"parameters of unit '{state.name}' ({', '.join(names)}) were written between a "
                "forward and its backward, so the gradients would be those of other weights. Call "
                "optimizer.step() and edit parameters before the forward or after the backward."
            )
        if region is not None and region not in backward.regions:
            backward.await_region(region)
        if not is_ready:
            _unshard(backward, state)


def _unshard(backward: BackwardPass, state: ShardState) -> None:
    """Gather a unit for its backward, start the gathers of the next units, show its parameters."""
    for handle in state.needed_handles:
        handle.shown.check_registered()
    context = backward.context
    context.gathers.gather_in_backward(context, state, backward.prefetched, backward.following)
    for handle in state.needed_handles if state.settings.unshard_in_backward else ():
        handle.full.wait()
        handle.shown.show_unsharded()
    if trace.logs:
        trace.record("compute_backward", state.name)


def recompute(state: ShardState) -> None:
    """Make the unit ready for a forward inside a backward, as in activation checkpointing.

    Its full parameters stay until the unit's end, because early-stopping recomputation leaves a
    module by an exception.
    """
    context = state.context
    if context is None:
        return
    backward = begin_backward(context)
    backward.recomputed.add(state)
    backward.awaited.discard(state)
    last, key = state.last_call, outermost_region(is_again=True)
    region = None if key is None else context.graphs.regions.get(key)
    # There may be no unit around it whose output was reached, [Note: End of a unit].
    if region is not None:
        backward.regions.add(region)
        backward.end_units_after(region.end)
    elif last.region is not None and last.number >= context.graphs.start:
        backward.end_units_after(max(last.end, last.region.end))
    for order in backward.queue.orders:
        order.recompute(state)
    for handle in state.needed_handles:
        if handle in backward.queue.items:
            # Restart the count: earlier gradients don't count towards this forward's.
            backward.queue.items[handle].counted.clear()
        handle.unshard(context.streams, "backward")
    for handle in state.needed_handles:
        handle.full.wait()
        handle.shown.show_unsharded()


def on_gradient(state_ref: weakref.ref[ShardState], handle: FlatParamHandle, index: int) -> None:
    """Pack the gradient of parameter `index`; issue reductions that it makes due.

    Called for each gradient in a unit's first backward, wherever `LATE_GRAPH` is entered, and of
    what adds to an earlier microbatch. In other backwards of a plain unit it is called for the
    first gradient alone: `_pack` lets the hook of the others (`_arrive` of
    flat_param/unsharded_params.py) call `FlatGradients.pack_direct`. The end of the unit starts the
    reduction.
    """
    state = state_ref()
    if state is None or state.context is None:
        return
    backward: BackwardPass | None = state.context.backward
    item = None if backward is None else backward.queue.items.get(handle)
    if backward is None or item is None or item.ends_with == NOT_IN_USE:
        backward, item = _enter(state, handle, index)
    backward.queue.brings_gradients = True
    is_counted = item.is_counted or item.ends_with == NO_CALL
    _pack(backward, item, index, is_counted=is_counted)
    if is_counted and item.count(index):
        backward.end_full(item)


def _enter(state: ShardState, handle: FlatParamHandle, index: int) -> tuple[BackwardPass, Item]:
    """Return the backward and its item in use; a gradient may be the first sign of either."""
    assert state.context is not None
    _check_may_reach(state)
    backward = begin_backward(state.context)
    item = backward.queue.items[handle]
    if item.ends_with == NOT_IN_USE:
        if item.stage is DELIVERED:
            raise RuntimeError(
                f"a gradient of parameter '{handle.entries[index].label}' came after the hooks on "
                "its unit (register_post_accumulate_grad_hook) had run. Pass use_reentrant=False "
                "to torch.utils.checkpoint, and run no backward inside a backward."
            )
        backward.schedule_end(state, NO_CALL)
    return backward, item


def _pack(backward: BackwardPass, item: Item, index: int, *, is_counted: bool) -> None:
    """Move a gradient into the round's buffer; later ones go there directly where allowed."""
    state, handle = item.state, item.handle
    if torch.is_grad_enabled():
        # create_graph: the packed copy must not become part of the graph.
        with torch.no_grad():
            handle.grads.pack(index, may_overwrite=False)
        return
    # A nested backward (reentrant checkpointing) finishes a parameter that this backward, or
    # another nested one, may use again.
    known = state.inspection
    if current_backward_id() != backward.graph_task_id:
        if not handle.full.readers.bits & NESTED:
            for each in state.handles:
                each.full.readers.add(NESTED)
        if not item.is_reduced and item.is_wanted:
            for order in backward.queue.orders:
                order.nest()
    # If gradients overwrote values on some ranks only, these ranks alone would gather the values
    # again for a recomputation.
    may_overwrite = (
        item.is_reduced  # otherwise gradients stay and values are freed
        and handle.settings.reshard_after_backward
        and not any(known.backward_hooks)
        and (state in backward.recomputed or state.last_call.region is None)
        and state not in backward.awaited
    )
    handle.grads.pack(index, may_overwrite=may_overwrite)
    if not (is_counted or handle.full.readers.bits & LATE_GRAPH):
        handle.grads.set_direct(True)


def _check_may_reach(state: ShardState) -> None:
    """Raise if the modules show what no backward may reach."""
    for handle in state.needed_handles:
        if handle.shown.state.is_fixed:
            handle.shown.state.refuse_backward(state.name)
