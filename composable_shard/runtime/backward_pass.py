"""One backward over a tree: which units end, what is reduced, and how it ends.

[Note: End of a unit]
A unit's gradients are reduced and its parameters freed when the backward no longer needs the unit.
Gradients don't show when that is: a parameter may get one on some ranks only, and all ranks must
issue the same collectives in the same order. The forward does: the autograd engine runs the node
recorded last first. Calls of units are numbered as they begin. When the backward reaches an output
of call k, every unit whose first call began after k had ended is over, on all ranks. The remaining
units end with the backward. A parameter without a gradient counts as zero.
"""

from __future__ import annotations

import weakref
from bisect import insort
from collections.abc import Iterable
from functools import partial
from itertools import pairwise

from composable_shard.comm import FlagReduction, trace
from composable_shard.flat_param import (
    FlatParamHandle,
    mark_pending,
    needs_reduction,
    settle_pending,
)
from composable_shard.runtime.aborted import drop_aborted, note_abort
from composable_shard.runtime.gathers import (
    end_in_backward,
    release_after_backward,
    return_to_idle,
)
from composable_shard.runtime.reducing import (
    defers_all_reduce,
    find_buckets,
    find_late,
    find_unsynced,
    reduces,
    step_facts,
    use_flags,
)
from composable_shard.runtime.reduction_order import LATE, NO_TURNS, EarlyGradients
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
        reducing: Handles whose gradients this backward reduces; other gradients stay unsharded.
        accumulates: This rank accumulates gradients of parameters, or some rank is known to.
        asks_for_late: The flags at the end show handles whose gradients came after a reduction.
        is_sure_to_reduce: All ranks know that some rank accumulates gradients.
        open_handles: (position, unit, handle) of handles in use, in the order in which they end.
        positions: Number of the call with which each open handle ends; -1: with the backward.
        counted: Handles whose gradients were counted as they arrived.
        recomputed: Units whose forward ran again in this backward.
        prefetched: Units gathered ahead that have not run; True: the user chose the unit.
        early: Publishes gradients with hooks before the end; None if no handle has hooks.
        makes_graph: The backward's own nodes are recorded, [Note: Graphs of gradients].
        waiting: Handles with gradients that wait for a later reduction.
        turns: Handles that are reduced in an agreed order, [Note: Agreed order].
    """

    def __init__(self, context: TreeContext) -> None:
        self.context = context
        self.states: list[ShardState] = []
        self.graph_task_id = current_backward_id()
        self.following: dict[StateRef, StateRef] = {}
        self.reducing: set[FlatParamHandle] = set()
        self.accumulates = self.asks_for_late = False
        self.is_sure_to_reduce = False
        self.open_handles: list[tuple[int, ShardState, FlatParamHandle]] = []
        self.positions: dict[FlatParamHandle, int] = {}
        self.counted: set[FlatParamHandle] = set()
        self.recomputed: set[ShardState] = set()
        self.prefetched: dict[ShardState, bool] = {}
        self.early: EarlyGradients | None = None
        self.makes_graph = False
        self.waiting: dict[FlatParamHandle, None] = {}
        self.turns = NO_TURNS
        self._engine_callback: weakref.ref[_EngineCallback] | None = None
        self._reaches_earlier_call = False  # before the tree's last call
        self._is_ending = False  # autograd has run all its nodes
        self._reduced: dict[FlatParamHandle, None] = {}
        self._in_flight: list[FlatParamHandle] = []  # reductions issued and not waited for
        self._hook_error: BaseException | None = None

    # The backward begins

    def begin(self) -> None:
        """Register the engine's callback, and open the units whose outputs wait for a backward."""
        context = self.context
        self._ask_engine()
        context.backward, context.last_backward_id = self, self.graph_task_id
        armed = [state for ref in reversed(context.armed) if (state := ref()) is not None]
        self.following = {state.ref: after.ref for state, after in pairwise(armed)}
        self.states = states = context.live_states()
        for state in states:
            for handle in state.handles:
                handle.guard.set_in_backward(True)
                if handle.grads.marks:
                    settle_pending(handle)
                    self.waiting[handle] = None
                if handle.guard.has_new_attributes:
                    handle.adopt_changes()
                if reduces(state, handle):
                    self.reducing.add(handle)
                if handle.shown.has_early_hooks and self.early is None:
                    self.early = EarlyGradients(context.flag_reductions)
        context.has_regions = context.has_regions or len(context.may_recompute) > 0
        buckets, order = find_buckets(context), context.reduction_order
        self.asks_for_late = context.has_regions
        if order is not None:
            # Late gradients of a bucket are packed before the flags look for them in `.grad`.
            self.asks_for_late = self.asks_for_late or any(h.grads.is_persistent for h in buckets)
            self.turns = order.begin(states, self.reducing, asks_for_late=self.asks_for_late)
        self.accumulates = any(h.will_get_gradient() for state in states for h in state.handles)
        # A backward without new gradients also reduces waiting ones: of all handles, or of none.
        self.accumulates = self.accumulates or any(map(needs_reduction, self.reducing))
        self._agree_to_reduce([handle for handle in buckets if handle not in self.turns])
        for state in armed:
            self.open_unit(state, context.first_calls.get(state.ref, -1))

    def _ask_engine(self) -> None:
        # A separate object: after an error in `begin` a traceback would keep `self` alive.
        callback: _EngineCallback = partial(self.finish)
        note = partial(note_abort, weakref.ref(self.context))
        self._engine_callback = weakref.ref(callback, note)
        queue_callback(callback)

    def _agree_to_reduce(self, buckets: list[FlatParamHandle]) -> None:
        """Let all ranks know whether any of them accumulates gradients, see [Note: Buckets].

        Issues one all-reduce of a byte for each process group that has buckets.
        """
        groups = {handle.shard_group.joint_groups: handle.shard_group for handle in buckets}
        if not groups:
            return
        own = int(self.accumulates)
        flags = FlagReduction([(group, [own]) for group in groups.values()], highest=1)
        self.context.flag_reductions.append(flags)
        if not own:
            self.accumulates = any(any(values) for values in flags.finish())
        self.is_sure_to_reduce = self.accumulates

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
        for handle in state.needed:
            handle.full.serve_graphs()  # a write may have ended this since

    # Units begin and end

    def reach(self, state: ShardState, start: int, end: int) -> None:
        """Open a unit, as the backward reached an output of its call; end the units that are over.

        Args:
            state: The unit.
            start: Number of the call.
            end: Number of the first call that began after it had ended.
        """
        if start < self.context.call_start:
            self._reaches_earlier_call = True
        self.open_unit(state, start)
        self.end_units_after(end)

    def open_unit(self, state: ShardState, position: int) -> None:
        """Let a unit's handles end when the backward has passed the call of this number.

        A handle that several units compute with (tied weights) ends with the first of their calls;
        -1 stands for the end of the backward. [Note: End of a unit]
        """
        for handle in state.needed:
            before = self.positions.get(handle)
            if before is not None and position >= before:
                continue
            owner = self.context.owner_of(handle) if handle in state.borrowed else state
            if owner is None:
                continue
            if before is not None:
                self.close(handle)
                if position == -1:
                    handle.grads.take_directly(False)  # from now on each gradient is counted
            elif position >= 0 and handle in self._in_flight:
                # A late gradient waits for its last reduction, perhaps on this rank only: the
                # second stage must be issued before. [Note: Two stages]
                self._advance_in_flight()
            self.positions[handle] = position
            handles, item = self.open_handles, (position, owner, handle)
            if not handles or handles[-1][0] >= position:
                handles.append(item)
            elif len(handles) > 1 and handles[-2][0] >= position:
                handles.insert(-1, item)  # the leader's call began first, so it stays last
            else:
                insort(handles, item, key=lambda item: -item[0])

    def close(self, handle: FlatParamHandle) -> None:
        """Remove a handle from the open ones, without ending it."""
        del self.positions[handle]
        self.open_handles = [item for item in self.open_handles if item[2] is not handle]

    def end_units_after(self, position: int) -> None:
        """Reduce and free the units whose calls all began at this number or later."""
        while self.open_handles and self.open_handles[0][0] >= position:
            _, state, handle = self.open_handles.pop(0)
            del self.positions[handle]
            self.end_handle(state, handle)

    def end_handle(self, state: ShardState, handle: FlatParamHandle) -> None:
        """Reduce a handle that is over, or note that its gradients wait; free full parameters."""
        if not handle.full.claims and not handle.full.params.is_locked:
            handle.take_back("in a backward hook")
        if state.buckets is not None and state.buckets.end(handle):
            pass  # reduced already
        elif handle in self.reducing and (handle.requires_grad or needs_reduction(handle)):
            if self.early is not None:
                self._go_early(self.early, state, handle)
            if not self.accumulates or (self.early and self.early.is_final(handle)):
                pass
            elif handle in self.turns:
                self.issue_turns(self.turns.take(handle))
            elif not (self._is_ending and self.asks_for_late and handle in self._reduced):
                self.issue(state, handle, keeps=self._keeps_values(handle))
        elif handle.requires_grad and self.accumulates:
            handle.grads.postpone()
            self.waiting[handle] = None
        end_in_backward(self.context, state, handle)

    def _go_early(self, early: EarlyGradients, state: ShardState, handle: FlatParamHandle) -> None:
        """Collect handles that went early before; start this one's flags if it may go early."""
        if early.pending:
            self._advance_in_flight()
            early.collect(is_ending=self._is_ending)
        if not handle.shown.has_early_hooks or early.is_final(handle):
            return
        handle.grads.pack_rest(may_overwrite=not self._keeps_values(handle))
        is_due = state.is_last_backward and not defers_all_reduce(state, handle)
        if is_due and not self._is_ending:
            may_change = (
                state.ref in self.context.may_recompute
                or handle.full.serves_graphs
                or bool(handle.full.claims)
                or current_backward_id() != self.graph_task_id
            )
            early.start(handle, accumulates=self.accumulates, may_change=may_change)
        if not self.accumulates:
            self.accumulates = early.has_accumulating_rank(handle)

    def issue_turns(self, handles: Iterable[FlatParamHandle]) -> None:
        """Start reductions in the order that the ranks agree on, [Note: Agreed order]."""
        for handle in handles:
            self.issue(self.turns[handle], handle, keeps=self._keeps_values(handle))

    def issue(self, state: ShardState, handle: FlatParamHandle, *, keeps: bool) -> None:
        """Start the reduction of a handle, on all ranks in the same order; ends the one in flight.

        Args:
            state: The handle's unit.
            handle: The handle to reduce.
            keeps: Whether the full values must stay.
        """
        # One reduction in flight: ending the last one here bounds the buffers to two units.
        self._advance_in_flight()
        context, is_deferred = self.context, defers_all_reduce(state, handle)
        handle.grads.issue(
            context.streams, context.scratch, keep_unsharded=keeps, is_deferred=is_deferred
        )
        self._in_flight.append(handle)
        self._reduced[handle] = None
        if self.early is not None:
            self._deliver(self.early)

    def _deliver(self, early: EarlyGradients) -> None:
        """Publish the gradients that are ready early, and run their hooks."""
        for handle in early.publish():
            del self._reduced[handle]
            self._run_hooks(handle)

    def _keeps_values(self, handle: FlatParamHandle) -> bool:
        """Return whether the full values are still needed after the unit's end."""
        keeps = handle.full.serves_graphs or bool(handle.full.claims)
        return keeps or not handle.reshards_after_backward

    def _advance_in_flight(self) -> None:
        """Wait until the reduction in flight, if any, no longer needs its buffers."""
        while self._in_flight:
            self._in_flight.pop(0).grads.advance()

    # The backward ends

    def finish(self) -> None:
        """Reduce the remaining handles, publish all gradients, and run their hooks."""
        self._is_ending = True
        if self.early is not None and self.early.pending:
            # The flags below leave out handles with final gradients, so these must be known first.
            self._advance_in_flight()
            self.early.collect(is_ending=True)
        known = {*self.positions, *self._reduced, *self.turns}
        due = self.reducing - known if self.accumulates else ()
        unsynced = find_unsynced(self.context, due) if due else []
        handles = self._pack_rest([handle for _, handle in unsynced])
        if self.is_sure_to_reduce:
            # Other ranks may have issued these reductions already, and wait for this rank.
            self._issue_rest(unsynced)
        self.issue_turns(self.turns.rest() if self.turns else ())
        buckets = find_buckets(self.context)
        is_asked = bool(buckets) or self.asks_for_late
        late = {h for h in self._reduced if any(h.grads.arrived)} if self.asks_for_late else ()
        flags = FlagReduction(
            [
                (h.shard_group, use_flags(h, h in buckets, late) if is_asked else h.grads.used)
                for h in handles
            ],
            highest=LATE if is_asked else 1,
            facts=step_facts(self.context),
            proposal=self.turns.propose() if self.turns else None,
        )
        self.context.flag_reductions.append(flags)
        if not self.accumulates:
            # Another rank may accumulate gradients of a unit that this rank skipped.
            self.accumulates = any(any(used) for used in flags.finish())
        if self.accumulates and self.turns:
            self.issue_turns(self.turns.last(handles, flags.finish()))
        if not self.is_sure_to_reduce:
            self._issue_rest(unsynced)
        if is_asked:
            self._issue_rest(find_late(self.context, handles, flags.finish(), self.turns))
        if self.early is not None:
            self._deliver(self.early)
        published = self._publish(handles, flags)
        self.context.open_calls = 0
        for handle in self.counted:
            handle.grads.awaited.reset()
        for handle in self.waiting:
            mark_pending(handle)
        return_to_idle(self.context)
        # Until here an interrupt counts as an abort of the backward.
        self.context.backward, self.context.spans_calls = None, self._reaches_earlier_call
        # Run hooks last: a user's hook may raise, or step an optimizer.
        self._run_last_hooks(published)

    def _pack_rest(self, unsynced: list[FlatParamHandle]) -> list[FlatParamHandle]:
        """Pack the gradients not packed yet; return the handles that are published at the end."""
        still_open = [
            handle
            for _, state, handle in self.open_handles
            if handle in self.reducing
            and not (state.buckets is not None and state.buckets.is_issued(handle))
            and (handle.requires_grad or needs_reduction(handle))
        ]
        for handle in unsynced:
            handle.adopt_changes()  # no call has done it: the unit did not run
        turns = list(self.turns)
        for handle in turns:
            if handle not in self.positions and handle not in self._reduced:
                handle.adopt_changes()
        for handle in turns + still_open + unsynced:
            handle.grads.pack_rest(may_overwrite=not self._keeps_values(handle))
        ready = () if self.early is None else {handle for handle, _ in self.early.ready}
        handles = dict.fromkeys([*turns, *self._reduced, *still_open, *unsynced])
        return [handle for handle in handles if handle not in ready]

    def _issue_rest(self, others: list[tuple[ShardState, FlatParamHandle]]) -> None:
        """Reduce the handles that are still open at the end, and the given others."""
        self.end_units_after(-1)
        for owner, handle in others:
            self.issue(owner, handle, keeps=self._keeps_values(handle))

    def _publish(
        self, handles: list[FlatParamHandle], flags: FlagReduction
    ) -> list[FlatParamHandle]:
        """Wait for all reductions and flags in flight; give the parameters their gradients."""
        self._advance_in_flight()
        for handle in handles:
            handle.grads.finish()
        # Wait for flags last, when they have arrived, but before publishing, as a wait may fail.
        for other in self.context.flag_reductions:
            other.finish()
        self.context.flag_reductions.clear()
        flags.check_step()
        if not self.accumulates and not self.turns:
            return []
        published = []
        for handle, used in zip(handles, flags.finish(), strict=True):
            if handle in self.turns and not self.turns.has_reduced(handle):
                continue  # no rank used the handle
            handle.grads.publish(list(map(bool, used)))
            published.append(handle)
            if handle.grads.reduction.partial is not None:
                self.waiting[handle] = None
        if self.accumulates:
            self.context.forget_graphs()
        return published

    def _run_hooks(self, handle: FlatParamHandle) -> None:
        """Run the hooks of a handle's parameters, unless a hook has failed in this backward."""
        if self._hook_error is not None or handle.grads.reduction.partial is not None:
            return
        if trace.logs:
            trace.record("gradient_hooks", handle.name)
        try:
            if handle.guard.may_have_hooks:
                handle.shown.run_gradient_hooks()
        except BaseException as error:
            # Raise it at the end, because the other ranks wait for this rank's collectives.
            self._hook_error = error

    def _run_last_hooks(self, handles: list[FlatParamHandle]) -> None:
        """Run the hooks of handles that were published at the end; raise the first hook's error."""
        accumulating = {
            handle
            for state in self.context.live_states()
            if not state.is_last_backward
            for handle in state.handles
        }
        for handle in handles:
            if handle not in accumulating:
                self._run_hooks(handle)
        error, self._hook_error = self._hook_error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame: a cycle


def reduce_buckets(
    backward: BackwardPass, state: ShardState, handles: Iterable[FlatParamHandle]
) -> None:
    """Start the reductions of buckets before their unit's end."""
    for handle in handles:
        assert state.buckets is not None
        state.buckets.note_issued(handle)
        if handle in backward.turns:
            backward.issue_turns(backward.turns.take(handle))
            continue
        # Packing in place overwrote the values; otherwise the unit may need them until its end.
        is_packed_in_place = handle.grads.is_in_place
        backward.issue(state, handle, keeps=not is_packed_in_place)
        if is_packed_in_place:
            release_after_backward(backward.context, handle)


def begin_backward(context: TreeContext) -> BackwardPass:
    """Return the tree's running backward; begin one if none runs, after dropping an aborted one."""
    backward: BackwardPass | None = context.backward
    if backward is None:
        if context.has_aborted:
            drop_aborted(context)
        backward = BackwardPass(context)
        backward.begin()
    return backward
