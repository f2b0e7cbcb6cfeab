"""One backward over a tree: which units end, what is reduced, and how it ends.

[Note: End of a unit]
A unit's gradients are reduced and its parameters freed when the backward no longer needs the unit.
Gradients don't show when that is: a parameter may get one on some ranks only, and all ranks must
issue the same collectives in the same order. The forward does: the autograd engine runs the node
recorded last first. Calls of units are numbered as they begin. When the backward reaches an output
of call k, every unit whose first call began after k had ended is over, on all ranks: after calls of
root 0, A 1 and B 2, an output of A ends B. The remaining units, here A and the root, end with the
backward. A parameter without a gradient counts as zero.
"""

from __future__ import annotations

import weakref
from bisect import insort
from functools import partial
from itertools import pairwise, takewhile

from composable_shard.comm import FlagReduction
from composable_shard.flat_param import (
    FlatParamHandle,
    mark_pending,
    unmark_pending,
)
from composable_shard.runtime.aborted import drop_aborted, note_abort
from composable_shard.runtime.gathers import release_after_backward, return_to_idle
from composable_shard.runtime.lockstep import step_facts
from composable_shard.runtime.open_graphs import Region, alive
from composable_shard.runtime.reduction_queue import (
    LATE,
    NO_CALL,
    NOT_IN_USE,
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
        regions: Checkpointed regions whose units were gathered before the region ran again.
        prefetched: Units gathered ahead that have not run; True: the user chose the unit.
        makes_graph: The backward's own nodes are recorded, [Note: Graphs of gradients].
        waiting: Handles with gradients that wait for a later reduction.
    """

    def __init__(self, context: TreeContext) -> None:
        self.context = context
        self.states: list[ShardState] = []
        self.graph_task_id = current_backward_id()
        self.following: dict[StateRef, StateRef] = {}
        self.queue: ReductionQueue = context.make_queue(context)
        self.recomputed: set[ShardState] = set()
        self.regions: set[Region[ShardState]] = set()
        self.prefetched: dict[ShardState, bool] = {}
        self.makes_graph = False
        self.waiting: dict[FlatParamHandle, None] = {}
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
        for state in self.states:
            for handle in state.handles:
                handle.guard.set_in_backward(True)
                if handle.grads.marks:
                    unmark_pending(handle)
                    self.waiting[handle] = None
                if handle.guard.has_new_attributes:
                    handle.adopt_changes()
        graphs.has_regions = graphs.has_regions or len(graphs.may_recompute) > 0
        self.queue.begin(self.states)
        for state in armed:
            self.schedule_end(state, graphs.first_calls.get(state.ref, NO_CALL))

    def _ask_engine(self) -> None:
        # A separate object: after an error in `begin` a traceback would keep `self` alive.
        callback: _EngineCallback = partial(self.finish)
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
            self._end(self._in_use[0])

    def _end(self, item: Item) -> None:
        """Reduce a handle that is over, or note that its gradients wait; free full parameters."""
        handle = item.handle
        self._in_use.remove(item)
        item.ends_with = NOT_IN_USE
        if not handle.full.readers.claims and not handle.full.params.is_locked:
            handle.adopt_shown_changes("in a backward hook")
        if item.is_reduced and (handle.requires_grad or handle.grads.waits_for_reduction):
            self.queue.end(item)
        elif handle.requires_grad and self.queue.accumulates:
            handle.grads.postpone()
            self.waiting[handle] = None
        item.counted.clear()
        # Memory that gradients took from the values stays until their reduction has read it.
        release_after_backward(handle)
        if item.state.training_state is TrainingState.PRE_BACKWARD:
            item.state.transition(TrainingState.POST_BACKWARD)

    def end_full(self, item: Item) -> None:
        """Note that all gradients of a handle have come; reduce what is ready and first.

        If the backward has reached no call of its unit, as in reentrant checkpointing, the handle
        ends here. A bucket may be reduced although its unit is not, [Note: Buckets].
        """
        queue, call = self.queue, item.ends_with
        is_over = call == NO_CALL
        if item.stage is not OPEN or not (is_over or queue.is_in_window(item)):
            return
        item.stage = READY
        mine = [each for each in self._in_use if each.state is item.state]
        same = [each for each in mine if each.ends_with == call]
        is_next = is_over or same[0] is self._in_use[0]
        trained = [each for each in same if each.handle.requires_grad and is_next]
        ready = takewhile(lambda each: each.stage is not OPEN, trained)
        for each in [item] if item.is_agreed else ready:
            if is_over:
                self._end(each)
            elif each.stage is READY:
                queue.make_ready(each, is_early=True)

    # The backward ends

    def finish(self) -> None:
        """Reduce the remaining handles, publish all gradients, and run their hooks."""
        queue, context = self.queue, self.context
        queue.is_ending = True
        queue.collect()  # first: the flags below leave out handles with final gradients
        self._end_asked()
        unsynced = self._find_unsynced() if queue.accumulates or queue.asked else []
        items = self._pack_rest(unsynced)
        if queue.is_sure:
            # Other ranks may have issued these reductions already, and wait for this rank.
            self._issue_rest(unsynced)
        if queue.agreed:
            for item in [item for item in self._in_use if item.is_agreed]:
                self._end(item)
            queue.issue_expected()
        asks = queue.asks_for_late
        flags = FlagReduction(
            [
                (
                    item.handle.shard_group,
                    queue.flags_of(item) if asks else item.handle.grads.used,
                )
                for item in items
            ],
            highest=LATE if asks else 1,
            facts=step_facts(queue.items if items else ()),  # without items nothing is compared
            proposal=queue.propose() if queue.agreed else None,
        )
        context.flag_reductions.append(flags)
        if not queue.accumulates:
            # Another rank may accumulate gradients of a unit that this rank skipped.
            queue.accumulates = any(any(used) for used in flags.finish())
        if not queue.is_sure:
            self._issue_rest(unsynced)
        if queue.accumulates and (queue.agreed or asks):
            queue.issue_last(items, flags)
        queue.deliver()
        published = self._publish(items, flags)
        context.graphs.num_open = 0
        for handle in self.waiting:
            mark_pending(handle)
        return_to_idle(context)
        # Until here an interrupt counts as an abort of the backward.
        context.backward, context.graphs.spans_calls = None, self._reaches_earlier_call
        # Run hooks last: a user's hook may raise, or step an optimizer.
        self._run_last_hooks(published)

    def _end_asked(self) -> None:
        """Let the handles that a nested backward asked to reduce wait for the end's reductions."""
        for item in self.queue.asked:
            if item.ends_with != NOT_IN_USE:
                self._end(item)  # on this rank, perhaps; so the order below is that of all ranks
            item.is_reduced = True

    def _find_unsynced(self) -> list[Item]:
        """Return the handles not reached that have gradients of earlier or nested backwards."""
        queue = self.queue
        return [
            item
            for item in queue.items.values()
            if item.is_reduced
            and not item.is_agreed
            and item.ends_with == NOT_IN_USE
            and item not in queue.issued
            and (
                item in queue.asked
                or item.handle.grads.is_unsynced
                or (item.handle.grads.reduction.deferred is not None and not item.is_deferred)
            )
        ]

    def _pack_rest(self, unsynced: list[Item]) -> list[Item]:
        """Pack the gradients not packed yet; return the handles that are published at the end."""
        queue = self.queue
        in_use = [
            item
            for item in self._in_use
            if item.is_reduced
            and (item.handle.requires_grad or item.handle.grads.waits_for_reduction)
        ]
        for item in [*queue.agreed, *in_use, *unsynced]:
            if item.ends_with == NOT_IN_USE and item not in queue.issued:
                item.handle.adopt_changes()  # no call has done it: the unit did not run
            item.handle.grads.pack_rest(may_overwrite=not item.keeps_values)
        found = dict.fromkeys([*queue.agreed, *queue.issued, *in_use, *unsynced])
        return [item for item in found if item.stage not in EARLY]

    def _issue_rest(self, unsynced: list[Item]) -> None:
        """Reduce the handles that are still in use at the end, and the given others."""
        self.end_units_after(NO_CALL)
        for item in unsynced:
            self.queue.issue(item)

    def _publish(self, items: list[Item], flags: FlagReduction) -> list[Item]:
        """Wait for all reductions and flags in flight; give the parameters their gradients."""
        queue, context = self.queue, self.context
        queue.advance()
        for item in items:
            item.handle.grads.finish()
        # Wait for flags last, when they have arrived, but before publishing, as a wait may fail.
        for other in context.flag_reductions:
            other.finish()
        context.flag_reductions.clear()
        flags.check_step()
        if not queue.accumulates and not queue.agreed:
            return []
        published = []
        for item, used in zip(items, flags.finish(), strict=True):
            if item.is_agreed and item not in queue.issued:
                continue  # no rank used the handle
            item.handle.grads.publish(list(map(bool, used)))
            published.append(item)
            if item.handle.grads.reduction.deferred is not None:
                self.waiting[item.handle] = None
        if queue.accumulates:
            context.graphs.forget()
        return published

    def _run_last_hooks(self, published: list[Item]) -> None:
        """Run the hooks of gradients published at the end; raise the first hook's error."""
        queue = self.queue
        for item in published:
            if item.state.settings.is_last_backward:
                queue.run_hooks(item)
        error, queue.hook_error = queue.hook_error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame: a cycle


def begin_backward(context: TreeContext) -> BackwardPass:
    """Return the tree's running backward; begin one if none runs, after dropping an aborted one."""
    backward: BackwardPass | None = context.backward
    if backward is None:
        if context.has_aborted:
            drop_aborted(context)
        backward = BackwardPass(context)
        backward.begin()
    return backward
