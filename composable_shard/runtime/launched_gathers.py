"""Gathers of neighbouring units that are issued as one, and when.

[Note: Launched gathers]
Where the backend groups collectives, [Note: Launches], the units that a call or a backward is
expected to run are divided into *runs* before the first of them is gathered: neighbours of no more
than `MAX_LAUNCH_NBYTES`, which are gathered by one launch. A run is due when the first unit is
reached at which all units ahead have no more than `prefetch_nbytes` with it; one unit may always be
ahead. So the bound is that of [Note: Gathers of small units].

The division follows from sizes, options and an order that is the same on all ranks: of a forward,
in which all ranks run the same units in the same order, or of the calls that a backward may reach.
Ranks may differ in what their losses depend on, so that a backward passes over units. Such a rank
catches up: it issues all runs that were due before the unit that it has reached, each as the other
ranks do. Only if it ends before does it leave some out, which the ranks find as without launches.

These gathers start alone: of units that the user chose, because other ranks may lack some of these;
of trees with kept gradients, whose units may run in another order on each rank, except for the
gathers of kept values, which have one order; of checkpointed regions, which may run again before or
after the backward reaches them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from composable_shard.comm import MAX_LAUNCH_NBYTES, Launch
from composable_shard.flat_param import GRAPH, FlatParamHandle, FullState
from composable_shard.runtime.gathers import Gathers, drop_prefetched
from composable_shard.runtime.open_graphs import alive
from composable_shard.runtime.unit import ShardState, StateRef, TreeContext


def divide_in_runs(nbytes: Sequence[int], limits: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the runs of some units, each by when it is due, its start and its end, as positions.

    The first unit is in no run: it runs when the order begins.

    Args:
        nbytes: Of the full values of each unit, in order.
        limits: Of each unit, how many may be ahead while it runs.

    Example: units of 2 bytes each, of which 8 bytes may be ahead. While the first one runs, four
    are gathered. When one of them is left, there is room for three more:

        divide_in_runs([2] * 8, [8] * 8) == [(0, 1, 5), (3, 5, 8)]
    """
    runs: list[tuple[int, int, int]] = []
    due, start = 0, 1
    while start < len(nbytes):
        limit = limits[start - 1]
        total, end = nbytes[start], start + 1
        # With the last unit of the run before it still ahead, unless there is no room for both.
        last = nbytes[start - 1] if start > 1 else 0
        room = min(MAX_LAUNCH_NBYTES, limit - last if last + total <= limit else limit)
        while end < len(nbytes) and total + nbytes[end] <= room:
            total += nbytes[end]
            end += 1
        # As early as what is ahead then, with the run, stays within the limits of the units that
        # run meanwhile; not before the run before it.
        first, due = due, start - 1
        while due > first and total + nbytes[due] <= limits[due - 1]:
            total += nbytes[due]
            due -= 1
        runs.append((due, start, end))
        start = end
    return runs


def _known(units: Iterable[ShardState | None]) -> Iterator[ShardState]:
    for unit in units:
        if unit is None:  # deleted
            return
        yield unit


class _Plan:
    """The runs of one call or backward, and how far it has come."""

    def __init__(self, owner: object, units: Sequence[ShardState]) -> None:
        self._owner = weakref.ref(owner)
        self._order = [unit.ref for unit in units]
        sizes = [sum(each.full.buffer.nbytes for each in unit.needed_handles) for unit in units]
        limits = [unit.options.prefetch_nbytes for unit in units]
        # The first unit is gathered as it runs; a rank that passes over it gathers it too.
        self._runs = deque([(0, 0, 1), *divide_in_runs(sizes, limits)])
        self._num_gathered = 0
        self._position = -1  # of the unit reached last
        self._passed: set[int] = set()  # positions of those that were reached before it

    def is_of(self, owner: object) -> bool:
        """Return whether it is the plan of a call or backward."""
        return self._owner() is owner

    def is_at(self, unit: StateRef) -> bool:
        """Return whether a unit was reached last."""
        return self._order[self._position] == unit

    def reach(self, unit: StateRef) -> bool:
        """Go on to a unit; return False if it is not among those to come."""
        try:
            position = self._order.index(unit, max(self._position, 0))
        except ValueError:
            return False
        if position != self._position:
            self._passed.add(self._position)
            self._position = position
        if self._position == 0 and self._runs and self._runs[0][2] == 1:
            self._runs.popleft()
        return True

    def due(self, *, is_missed: bool = False) -> Iterator[list[ShardState]]:
        """Yield the runs that are due; with `is_missed` those that were due before.

        They lack units that were reached: of these the user chose what was gathered meanwhile.
        """
        reached = self._passed if is_missed else {*self._passed, self._position}
        while self._runs and self._runs[0][0] <= self._position - is_missed:
            _, start, self._num_gathered = self._runs.popleft()
            places = [place for place in range(start, self._num_gathered) if place not in reached]
            yield alive(self._order[place] for place in places)

    def ahead(self) -> list[ShardState]:
        """Return the units to come of the runs so far."""
        return alive(self._order[self._position + 1 : self._num_gathered])


class _Ahead(list[ShardState]):
    """Units that are gathered ahead: some were before, the others are the runs."""

    runs: Sequence[list[ShardState]] = ()


class LaunchedGathers(Gathers):
    """Gathers that are issued together where they are small, [Note: Launched gathers]."""

    def __init__(self) -> None:
        self._plan: _Plan | None = None

    def choose_ahead(
        self,
        state: ShardState,
        prefetched: dict[ShardState, bool],
        chosen: tuple[StateRef, ...] | None,
        upcoming: Iterable[ShardState | None],
    ) -> list[ShardState]:
        """Return the units that are ahead while `state` runs, and note the runs that are due."""
        context, plan = state.context, self._plan
        if chosen is not None or context is None:
            call = None if context is None else context.call
            if call is not None and plan is not None and plan.is_of(call):
                plan.reach(state.ref)  # in a backward this was done before
            return super().choose_ahead(state, prefetched, chosen, upcoming)
        prefetched.pop(state, None)
        call, units = context.call, iter(upcoming)
        if call is None or prefetched is not call.prefetched:
            pass  # in a backward, which has a plan
        elif plan is None or not plan.is_of(call):
            plan = self._plan = _Plan(call, [state, *_known(units)])
        elif next(units, None) is None:
            if not plan.is_at(state.ref):  # else another module of the unit that runs
                self._plan = _Plan(call, [state])  # the forward has left the known order, or ends
            return []
        if plan is None or not plan.reach(state.ref):
            return []
        runs = list(plan.due())
        ahead = _Ahead(plan.ahead() if runs else ())
        ahead.runs = runs
        return ahead

    def gather_ahead(
        self,
        context: TreeContext,
        prefetched: dict[ShardState, bool],
        targets: list[ShardState],
        when: str,
        *,
        are_chosen: bool,
        start: Callable[[FlatParamHandle], object] | None = None,
    ) -> None:
        """Start the gathers of units that run later, each run by one launch."""
        if not isinstance(targets, _Ahead):
            super().gather_ahead(
                context, prefetched, targets, when, are_chosen=are_chosen, start=start
            )
            return
        for run in targets.runs:
            self._gather_run(context, prefetched, run, when)

    def gather_in_backward(
        self,
        context: TreeContext,
        state: ShardState,
        prefetched: dict[ShardState, bool],
        following: dict[StateRef, StateRef],
    ) -> None:
        """Start the gathers of a unit that a backward has reached, and of the units after it.

        First the runs that were due while the units ran that this rank's backward has passed over.
        """
        backward: Any = context.backward
        plan, is_chosen = self._plan, state.settings.backward_prefetch is not None
        if plan is None or not plan.is_of(backward):
            last = next(reversed(following.values()), state.ref)
            plan = self._plan = _Plan(backward, alive([*following, last]))
        if plan.reach(state.ref) and not is_chosen:
            for run in plan.due(is_missed=True):
                self._gather_run(context, prefetched, run, "backward")
                drop_prefetched(prefetched, keeps=[state, *plan.ahead()], keeps_chosen=True)
        super().gather_in_backward(context, state, prefetched, following)

    def _gather_run(
        self,
        context: TreeContext,
        prefetched: dict[ShardState, bool],
        run: list[ShardState],
        when: str,
    ) -> None:
        ready: dict[FlatParamHandle, None] = {}  # a unit may run twice
        super().gather_ahead(
            context, prefetched, run, when, are_chosen=False, start=ready.setdefault
        )
        _gather(context, list(ready), when)


class LaunchedKeptGathers(Gathers):
    """Gathers of kept values that are issued together where they are small."""

    def gather_kept(self, context: TreeContext) -> None:
        """Gather kept values of all units whose shards were written."""
        stale: list[FlatParamHandle] = []
        for state in context.live_states():
            for handle in state.handles:
                full = handle.full
                if handle.grads.is_persistent and full.is_sharded and not full.is_current:
                    handle.adopt_changes()
                    stale.append(handle)
        _gather(context, stale, "forward")


def _gather(context: TreeContext, handles: Sequence[FlatParamHandle], when: str) -> None:
    """Start the gathers that handles need, in order; neighbours of one group by one launch."""
    launch: list[FlatParamHandle] = []
    total = 0
    for handle in handles:
        full = handle.full
        if not handle.needs_gather or full.readers.bits & GRAPH:
            handle.unshard(context.streams, when)  # it sends nothing, or is waited for at once
            continue
        is_other = bool(launch) and launch[0].shard_group.group is not handle.shard_group.group
        total += full.buffer.nbytes
        if is_other or total > MAX_LAUNCH_NBYTES:
            _launch(context, launch, when)
            launch, total = [], full.buffer.nbytes
        launch.append(handle)
    _launch(context, launch, when)


def _launch(context: TreeContext, handles: Sequence[FlatParamHandle], when: str) -> None:
    if len(handles) < 2:
        for handle in handles:
            handle.unshard(context.streams, when)
        return
    first = handles[0].shard_group
    launch = Launch(
        first.group,
        first.device,
        what=f"{when} gathers",
        number=len(handles),
        streams=context.streams,
    )
    try:
        with launch as streams:
            for handle in handles:
                handle.unshard(streams, when)
    except BaseException:
        first.wait_for_interrupted()  # it may have been issued
        for handle in handles:
            if handle.full.state is FullState.GATHERING:
                handle.full.free()  # to wait for it would raise
        raise
    finally:
        launch.close()
