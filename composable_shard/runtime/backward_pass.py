"""One backward over a tree: which units end, what is reduced, and how it ends.

[Note: End of a unit]
A unit's gradients are reduced and its parameters freed when the backward no longer needs the unit.
Gradients don't show when that is: a parameter may get one on some ranks only, and all ranks must
issue the same collectives in the same order. The forward does: the autograd engine runs the node
recorded last first. Calls of units are numbered as they begin. When the backward reaches an output
of call k, every unit whose first call began after k had ended is over, on all ranks: after calls of
root 0, A 1 and B 2, an output of A ends B. The remaining units, here A and the root, end with the
backward. So a unit without others in its tree ends with the backward: units that have no sharded
module around them are trees of their own.

All trained units whose forward recorded a graph since the last backward are reduced, also one that
no gradient has reached. A parameter without a gradient counts as zero; its `.grad` changes only if
some rank has used it, as the flags at the end show. A unit that did not run sends nothing.
"""

from __future__ import annotations

import weakref
from bisect import insort
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, takewhile

from composable_shard.comm import FlagReduction
from composable_shard.runtime.aborted import drop_aborted, note_abort
from composable_shard.runtime.gathers import release_after_backward, return_to_idle
from composable_shard.runtime.lockstep import step_facts
from composable_shard.runtime.open_graphs import Region, alive
from composable_shard.runtime.phases import Phase
from composable_shard.runtime.reduction_queue import (
    NO_CALL,
    NOT_IN_USE,
    Ending,
    Item,
    ReductionQueue,
)
from composable_shard.runtime.stage import EARLY, OPEN, READY
from composable_shard.runtime.training_state import TrainingState
from composable_shard.runtime.unit import ShardState, StateRef, TreeContext
from composable_shard.torch_private import current_backward_id, queue_callback

_EngineCallback = partial[None]


class BackwardPass:
    """The state of one backward over a tree. Dropping the object forgets the backward.

    Attributes:
        context: The tree.
        states: The tree's units, kept alive: on some ranks only the graph may hold a unit.
        graph_task_id: Autograd's number of the backward.
        following: For each unit, the unit whose backward is expected next.
        queue: The reductions.
        recomputed: Units whose forward ran again in this backward.
        regions: Checkpointed regions that ran again, or that a call inside was reached of.
        awaited: Units of such regions that have not run again since a call was reached.
        prefetched: Units gathered ahead that have not run; True: the user chose the unit.
        makes_graph: The backward's own nodes are recorded, [Note: Graphs of gradients].
    """

    def __init__(self, context: TreeContext) -> None:
        self.context = context
        self.states: list[ShardState] = []
        self.graph_task_id = current_backward_id()
        self.following: dict[StateRef, StateRef] = {}
        self.queue: ReductionQueue = context.make_queue(context)
        self.recomputed: set[ShardState] = set()
        self.regions: set[Region[ShardState]] = set()
        self.awaited: set[ShardState] = set()
        self.prefetched: dict[ShardState, bool] = {}
        self.makes_graph = False
        self._engine_callback: weakref.ref[_EngineCallback] | None = None
        self._reaches_earlier_call = False  # before the tree's last call
        self._in_use: list[Item] = []  # handles in use, in the order in which they end

    # The backward begins

    def begin(self) -> None:
        """Register the engine's callback, and use the units whose outputs wait for a backward."""
        context = self.context
        self._ask_engine()
        context.backward, context.graphs.last_backward_id = self, self.graph_task_id
        graphs = context.graphs
        armed = alive(reversed(graphs.armed))
        self.following = dict(pairwise(reversed(graphs.armed)))
        self.states = context.live_states()
        # Writes are refused first. Then `choose` drops what users have dropped since, before their
        # other changes are adopted: that may move what waits into another buffer.
        for state in self.states:
            for handle in state.handles:
                handle.guard.set_in_backward(True)
        self.queue.choose(self.states)
        for state in self.states:
            for handle in state.handles:
                if handle.guard.has_new_attributes:
                    handle.adopt_changes()
        graphs.has_regions = graphs.has_regions or len(graphs.may_recompute) > 0
        self.queue.begin(self.states)
        for state in armed:
            self.schedule_end(state, graphs.first_calls.get(state.ref, NO_CALL))

    def _ask_engine(self) -> None:
        # If the backward fails, the engine drops what it would have called, so `note_abort` runs.
        # The next forward or backward gives memory back, `drop_aborted`. [Note: End of backward]
        # A separate object: after an error in `begin` a traceback would keep `self` alive.
        callback: _EngineCallback = partial(self.end)
        note = partial(note_abort, weakref.ref(self.context))
        self._engine_callback = weakref.ref(callback, note)
        queue_callback(callback)

    def is_called_by(self, callback: weakref.ref[_EngineCallback]) -> bool:
        """Return whether the engine calls this object at the end of this backward."""
        return self._engine_callback is callback

    def make_graph(self, state: ShardState) -> None:
        """Note that the nodes of this backward are recorded, and may save full values of a unit.

        The graph gets aliases of views that hooks have saved, also those of a checkpoint inside the
        unit, which runs its forward again.
        """
        if not self.makes_graph:
            self.makes_graph = True
            for handle in self.context.live_handles():
                handle.full.serve_graphs()
        for handle in state.needed_handles:
            handle.full.serve_graphs()  # a write may have ended this since

    # Units begin and end

    def reach(self, state: ShardState, start: int, end: int) -> None:
        """Use a unit, as the backward reached an output of its call; end the units that are over.

        Args:
            state: The unit.
            start: Number of the call.
            end: Number of the first call that began after it had ended.
        """
        if start < self.context.graphs.start:
            self._reaches_earlier_call = True
        self.schedule_end(state, start)
        self.end_units_after(end)

    def await_region(self, region: Region[ShardState]) -> None:
        """Start the gathers of the units of a region that a call inside was reached of, in order.

        So it is on ranks where the region runs again before they reach a call. At most once in a
        backward: the last units of a region may end before the region runs again.
        """
        self.regions.add(region)
        units = alive(region.units)
        self.awaited.update(units)
        if len(units) > 1:
            # Not among the prefetched units, which a backward that skips them frees.
            self.context.gathers.gather_ahead(self.context, {}, units, "backward", are_chosen=True)

    def schedule_end(self, state: ShardState, call: int) -> None:
        """Let a unit's handles end when the backward has passed the call of this number.

        A handle that several units compute with (tied weights) ends with the first of their calls;
        `NO_CALL` stands for the end of the backward. [Note: End of a unit]
        """
        for handle in state.needed_handles:
            item = self.queue.items.get(handle)
            if item is None:
                continue  # borrowed from a unit that no longer exists
            if item.ends_with != NOT_IN_USE:
                if call == NO_CALL or 0 <= item.ends_with <= call:
                    continue
                self._in_use.remove(item)
            elif item.stage is not OPEN:
                self.queue.reopen(item, is_reached=call >= 0)
            item.ends_with = call
            in_use = self._in_use
            if not in_use or in_use[-1].ends_with >= call:
                in_use.append(item)
            elif len(in_use) > 1 and in_use[-2].ends_with >= call:
                in_use.insert(-1, item)  # the leader's call began first, so it stays last
            else:
                insort(in_use, item, key=lambda item: -item.ends_with)

    def end_units_after(self, call: int) -> None:
        """Reduce and free the units whose calls all began at this number or later."""
        while self._in_use and self._in_use[0].ends_with >= call:
            self.end_item(self._in_use[0])

    def end_item(self, item: Item) -> None:
        """Reduce a handle that is over, or let its order note it; free full parameters."""
        handle = item.handle
        self._in_use.remove(item)
        item.ends_with = NOT_IN_USE
        if not handle.full.readers.claims and not handle.full.params.is_locked:
            handle.adopt_shown_changes("in a backward hook")
        if handle.requires_grad or item.order.has_waiting(item):
            item.order.end(item)
        item.counted.clear()
        # Memory that gradients took from the values stays until their reduction has read it.
        release_after_backward(handle)
        if item.state.training_state is TrainingState.PRE_BACKWARD:
            item.state.transition(TrainingState.POST_BACKWARD)

    def end_full(self, item: Item) -> None:
        """Note that all gradients of a handle have come.

        If the backward has reached no call of its unit, as in reentrant checkpointing, the handle
        ends here. Else its unit is not over, and most orders wait for that.
        """
        if item.stage is not OPEN:
            return
        if item.ends_with != NO_CALL:
            for order in self.queue.watchers:
                order.fill(item, self)
            return
        item.stage = READY
        for each in self.ready_with(item):
            self.end_item(each)

    def ready_with(self, item: Item) -> Iterator[Item]:
        """Return the handles that can be reduced now that an item is ready.

        In a fixed order that is the item. Else it is the trained handles of its unit, up to the
        first one that is not ready, unless another unit ends before. So it is for a fixed order,
        too, where the unit's end reduces other handles between these.
        """
        is_over = item.ends_with == NO_CALL
        same = [
            each
            for each in self._in_use
            if each.state is item.state and each.ends_with == item.ends_with
        ]
        trained = [each for each in same if each.handle.requires_grad]
        if item.order.keeps_order and (is_over or all(each.order.keeps_order for each in trained)):
            return iter([item])
        if not is_over and same[0] is not self._in_use[0]:
            return iter(())
        return takewhile(lambda each: each.stage is not OPEN, trained)

    # The backward ends

    def end(self) -> None:
        """Go through the phases of the end: reduce what is left, publish all gradients."""
        orders, ending = self.queue.orders, Ending(self)
        self.queue.note_end()
        for phase, act in _PHASES:
            for order in orders:
                if phase in order.acts:
                    order.acts[phase](order, ending)
            if act is not None:
                act(self, ending)

    def _pack_rest(self, ending: Ending) -> None:
        """Pack the gradients not packed yet; list the handles that are published at the end."""
        queue = self.queue
        in_use = [
            item
            for item in self._in_use
            if item.is_reduced and (item.handle.requires_grad or item.order.has_waiting(item))
        ]
        for item in [*queue.ordered, *in_use, *ending.rest]:
            if item.ends_with == NOT_IN_USE and item not in queue.issued:
                item.handle.adopt_changes()  # no call has done it: the unit did not run
            item.handle.grads.pack_rest(may_overwrite=not item.keeps_values)
        found = dict.fromkeys([*queue.ordered, *queue.issued, *in_use, *ending.rest])
        ending.items = [item for item in found if item.stage not in EARLY]

    def end_ordered(self) -> None:
        """End the handles in use that have a fixed order."""
        for item in [item for item in self._in_use if item.order.keeps_order]:
            self.end_item(item)

    def _send_flags(self, ending: Ending) -> None:
        """Send which parameters this rank has used, and what the ranks compare of the step.

        Without items, as where nothing is to be reduced, nothing is sent.
        """
        queue, items = self.queue, ending.items
        ending.used = [(item.handle.shard_group, item.handle.grads.used) for item in items]
        if queue.asks_for_late:
            queue.flag_late(ending)
        ending.flags = flags = FlagReduction(
            ending.used,
            highest=ending.highest,
            facts=step_facts(queue.items if items else ()),  # without items nothing is compared
            proposal=ending.proposal,
        )
        self.context.flag_reductions.append(flags)
        if not queue.brings_gradients:
            # Another rank may accumulate gradients of a unit that this rank skipped.
            queue.brings_gradients = any(any(used) for used in flags.finish())

    def reduce_rest(self, ending: Ending) -> None:
        """Reduce the handles that are still in use at the end, and those that were not reached."""
        if ending.has_joined:
            return
        ending.has_joined = True
        self.end_units_after(NO_CALL)  # all: calls have higher numbers
        for item in ending.rest:
            self.queue.issue(item)

    def _reduce_last(self, ending: Ending) -> None:
        queue = self.queue
        if queue.brings_gradients and (queue.ordered or queue.asks_for_late):
            queue.issue_last(ending)

    def _publish(self, ending: Ending) -> None:
        """Wait for all reductions and flags in flight; give the parameters their gradients."""
        queue, context = self.queue, self.context
        queue.end_last()
        for item in ending.items:
            item.handle.grads.add_result()
        # Wait for flags last, when they have arrived, but before publishing, as a wait may fail.
        for other in context.flag_reductions:
            other.finish()
        context.flag_reductions.clear()
        ending.flags.check_step()
        if queue.brings_gradients or queue.ordered:
            for item, used in zip(ending.items, ending.flags.finish(), strict=True):
                if item.order.keeps_order and item not in queue.issued:
                    continue  # no rank used the handle
                item.handle.grads.publish(list(map(bool, used)))
                ending.published.append(item)
            if queue.brings_gradients:
                context.graphs.forget()
        context.graphs.num_open = 0

    def _come_to_rest(self, _: Ending) -> None:
        context = self.context
        return_to_idle(context)
        # Until here an interrupt counts as an abort of the backward.
        context.backward, context.graphs.spans_calls = None, self._reaches_earlier_call


# [Note: Phases]. None: only orders of options act, `Order.acts`.
_PHASES: tuple[tuple[Phase, Callable[[BackwardPass, Ending], None] | None], ...] = (
    (Phase.COLLECT, None),  # EarlyHooks
    (Phase.PACK, BackwardPass._pack_rest),
    (Phase.JOIN, None),  # Buckets, AgreedOrder
    (Phase.FLAGS, BackwardPass._send_flags),
    (Phase.REST, BackwardPass.reduce_rest),
    (Phase.LAST, BackwardPass._reduce_last),
    (Phase.DELIVER, None),  # EarlyHooks
    (Phase.PUBLISH, BackwardPass._publish),
    (Phase.IDLE, BackwardPass._come_to_rest),
    (Phase.HOOKS, None),  # GradientHooks, EarlyHooks
)


def begin_backward(context: TreeContext) -> BackwardPass:
    """Return the tree's running backward; begin one if none runs, after dropping an aborted one."""
    backward: BackwardPass | None = context.backward
    if backward is None:
        if context.has_aborted:
            drop_aborted(context)
        backward = BackwardPass(context)
        backward.begin()
    return backward
