"""Gradients that a backward leaves to a later reduction, or finds left by an earlier one.

[Note: Pending gradients] says what stands for them between two backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import is_grad_enabled

from composable_shard.flat_param import (
    FlatParamHandle,
    keep_left_gradients,
    mark_pending,
    unmark_pending,
)
from composable_shard.runtime.phases import Phase
from composable_shard.runtime.reduction_queue import (
    NOT_IN_USE,
    Ending,
    Item,
    Order,
    ReductionQueue,
)
from composable_shard.runtime.unit import ShardState, StateRef


class Postponed(Order):
    """Handles that a backward doesn't reduce, and frozen ones with gradients of earlier backwards.

    Attributes:
        waiting: Handles with gradients that wait for a later reduction.
        asked: Handles that a backward inside this one asked to reduce, which began without it.
    """

    place: ClassVar[int] = 4

    def __init__(self, queue: ReductionQueue) -> None:
        super().__init__(queue)
        self.waiting: dict[FlatParamHandle, None] = {}
        self.asked: dict[Item, None] = {}
        self._has_postponed = False

    def prepare(self, states: Sequence[ShardState]) -> None:
        """Take the marks of waiting gradients from the parameters."""
        for state in states:
            for handle in state.handles:
                if handle.grads.marks:
                    unmark_pending(handle)
                    self.waiting[handle] = None

    def take(self) -> None:
        """Become the order of what isn't reduced, and of frozen handles with waiting gradients."""
        queue = self.queue
        for item in queue.items.values():
            if not item.is_reduced:
                item.order, self._has_postponed = self.weak, True
            elif not queue.brings_gradients or not item.handle.requires_grad:
                # Without new gradients too waiting ones are reduced: of all handles, or of none.
                waits = item.handle.grads.waits_for_reduction
                queue.brings_gradients = queue.brings_gradients or waits
                if waits and not item.handle.requires_grad:
                    item.order = self.weak

    def nest(self) -> None:
        """Note which handles are to be reduced after all, as a backward inside this one begins.

        The gradients of backwards inside a hook are those of the backward around them. If only the
        first of them ran under `no_sync`, all are reduced at the end.
        """
        for item in self.queue.items.values():
            if not item.is_reduced and item.is_wanted and item.handle.requires_grad:
                self.asked[item] = None

    def recompute(self, state: ShardState) -> None:
        """Note a forward that runs again, behind which a backward inside this one may come."""
        if self._has_postponed and is_grad_enabled():
            self.nest()

    def has_waiting(self, item: Item) -> bool:
        """Return whether a frozen handle has gradients to reduce, those of earlier backwards."""
        return item.is_reduced and item.handle.grads.waits_for_reduction

    def end(self, item: Item) -> None:
        """Leave the gradients of a unit that is over to a later reduction."""
        if item.is_reduced:
            super().end(item)
        elif self.queue.brings_gradients:
            item.handle.grads.leave_unsynced()
            self.waiting[item.handle] = None

    def _find_rest(self, ending: Ending) -> None:
        """Find the handles not reached that have gradients of earlier or nested backwards."""
        queue = self.queue
        for item in self.asked:
            if item.ends_with != NOT_IN_USE:
                # On this rank, perhaps; so the order of the last reductions is that of all ranks.
                ending.backward.end_item(item)
            item.is_reduced = True
        if not (queue.brings_gradients or self.asked):
            return
        ending.rest = [
            item
            for item in queue.items.values()
            if item.is_reduced
            and not item.order.keeps_order
            and item.ends_with == NOT_IN_USE
            and item not in queue.issued
            and (
                item in self.asked
                or item.handle.grads.is_unsynced
                or (item.handle.grads.waits_for_reduction and item.state.settings.reduces_fully)
            )
        ]

    def _mark(self, ending: Ending) -> None:
        """Let the parameters at rest show what waits."""
        for item in ending.published:
            if True in item.handle.grads.was_used:  # published in part
                self.waiting[item.handle] = None
        for handle in self.waiting:
            mark_pending(handle)

    acts: ClassVar = {Phase.PACK: _find_rest, Phase.IDLE: _mark}


def keep_gradients(state_ref: StateRef, handle: FlatParamHandle) -> None:
    """Keep gradients that users set on full parameters of a unit, to wait for a reduction."""
    state = state_ref()
    if state is not None and (handle.full.params.aliases.left or True in handle.grads.arrived):
        state.add_order(Postponed)  # first: an interrupt leaves no mark that no backward takes off
    keep_left_gradients(handle)
