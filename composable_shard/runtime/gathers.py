"""The choice of units to gather ahead, and the release of full parameters.

[Note: Gathers of small units]
A gather costs its latency even for a few bytes, on gloo also the waking of threads on both sides.
So small units are gathered several at a time: if the next unit's gather has not been issued, it is
issued together with the gathers of the following units, while their total stays within the running
unit's `prefetch_nbytes`. Each unit has its own gather, directly into its buffer. So either one unit
is ahead, or at most `prefetch_nbytes`.

[Note: Gathers of kept values]
Under `SHARD_OPTIM` full parameters stay, and only a write to the shards makes a gather necessary.
The first forward of any unit after a write starts the gathers of all units of the tree, in one
order, because ranks may run the units in different orders and different numbers of times.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress

from composable_shard.flat_param import FlatParamHandle, FullState, Shown
from composable_shard.runtime.training_state import TrainingState
from composable_shard.runtime.unit import ShardState, StateRef, TreeContext


class Gathers:
    """The gathers of a tree's calls and backwards: of the units that run, and of those after them.

    A tree has one such object, chosen when its ranks are compared.
    """

    def choose_ahead(
        self,
        state: ShardState,
        prefetched: dict[ShardState, bool],
        chosen: tuple[StateRef, ...] | None,
        upcoming: Iterable[ShardState | None],
    ) -> list[ShardState]:
        """Return the units to gather while `state` runs.

        Args:
            state: The unit that runs now.
            prefetched: The units that were gathered ahead; `state` is removed.
            chosen: The units that the user chose, of this tree; None: choose from `upcoming`.
            upcoming: The units that came next the last time, in order; empty if the order has
                changed. None (a deleted unit) ends the choice.
        """
        prefetched.pop(state, None)
        if chosen is not None:
            return state.in_tree(chosen)
        targets: list[ShardState] = []
        nbytes = 0
        for target in upcoming:
            if target is None or target is state or (not targets and target in prefetched):
                break
            for handle in target.needed_handles:
                nbytes += handle.full.buffer.nbytes
            if targets and nbytes > state.options.prefetch_nbytes:
                break
            targets.append(target)
        return targets

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
        """Start the gathers of units that run later; skip handles that are unsharded.

        Args:
            context: The tree's.
            prefetched: The dict to enter the units in.
            targets: From `choose_ahead`.
            when: "forward" or "backward".
            are_chosen: Whether the user chose them.
            start: What starts the gather of a handle; None: the handle.
        """
        for target in targets:
            if when == "backward" and not target.settings.unshard_in_backward:
                continue
            # Enter the unit before its gathers, so that they are freed if one of them fails.
            prefetched[target] = are_chosen or prefetched.get(target, False)
            for handle in target.needed_handles:
                if handle.is_attached and handle.shown.state is Shown.SHARDED:
                    if when == "forward":
                        handle.adopt_changes()
                    if start is None:
                        handle.unshard(context.streams, when)
                    else:
                        start(handle)

    def gather_kept(self, context: TreeContext) -> None:
        """Gather kept values of all units whose shards were written, as the note above says."""
        for state in context.live_states():
            for handle in state.handles:
                full = handle.full
                if handle.grads.is_persistent and full.is_sharded and not full.is_current:
                    handle.adopt_changes()
                    handle.unshard(context.streams, "forward")

    def gather_in_backward(
        self,
        context: TreeContext,
        state: ShardState,
        prefetched: dict[ShardState, bool],
        following: dict[StateRef, StateRef],
    ) -> None:
        """Start the gathers of a unit that a backward has reached, and of the units after it.

        Args:
            context: The tree's.
            state: The unit.
            prefetched: The units that this backward has gathered ahead.
            following: For each unit, the unit that is expected after it.
        """
        state.transition(TrainingState.PRE_BACKWARD)
        for handle in state.needed_handles:
            if handle.guard.has_new_attributes:
                handle.adopt_changes()
            # Decide by `shown.state`, which is equal on all ranks, not by `full.state`, which is
            # not: on some ranks gradients may have overwritten values.
            if handle.shown.state is Shown.SHARDED and state.settings.unshard_in_backward:
                handle.unshard(context.streams, "backward")
        chosen = state.settings.backward_prefetch
        ahead = self.choose_ahead(state, prefetched, chosen, _follow(following, state.ref))
        if ahead and chosen is None and prefetched:
            # A backward may skip prefetched units, so free them. A forward in the known order skips
            # none, and its end frees any that it did skip.
            drop_prefetched(prefetched, keeps=[state, *ahead], keeps_chosen=True)
        self.gather_ahead(context, prefetched, ahead, "backward", are_chosen=chosen is not None)


def _follow(following: dict[StateRef, StateRef], first: StateRef) -> Iterator[ShardState | None]:
    """Yield the units that come after the first one, in order."""
    ref = following.get(first)
    while ref is not None:
        yield ref()
        ref = following.get(ref)


def drop_prefetched(
    prefetched: dict[ShardState, bool],
    *,
    keeps: Collection[ShardState] = (),
    keeps_chosen: bool = False,
) -> None:
    """Free prefetched units that did not run, except `keeps` and, on request, chosen ones."""
    dropped = [
        unit
        for unit, is_chosen in prefetched.items()
        if unit not in keeps and not (is_chosen and keeps_chosen)
    ]
    if not dropped:
        return
    kept = [*keeps, *(unit for unit in prefetched if unit not in dropped)]
    needed = {handle for unit in kept for handle in unit.needed_handles}
    for unused in dropped:
        is_idle = unused.training_state is TrainingState.IDLE
        for handle in unused.needed_handles if is_idle else ():
            # A unit that shares the handle (tied weights) may compute with it.
            is_used = bool(handle.full.readers.claims) or handle.shown.is_unsharded
            if is_used or handle in needed:
                continue
            if unused.settings.reshard_after_forward is not False:
                handle.full.free()
            else:
                # The values stay, but no gather stays in flight. Its error is ignored, as in
                # `reshard`.
                with suppress(RuntimeError):
                    handle.full.wait()
        del prefetched[unused]


def release_handle(handle: FlatParamHandle, *, is_backward_next: bool = False) -> None:
    """Show the sharded parameters and free the full values, unless a forward still needs them.

    Values that gradients have overwritten, or whose memory a reduction uses, are not freed here.

    Where `is_backward_next` the policy may keep some of them.
    """
    if handle.full.readers.claims:
        return
    handle.shown.show_sharded()
    handle.full.free(is_backward_next=is_backward_next)


def release_after_backward(handle: FlatParamHandle) -> None:
    """Show the sharded parameters, and free the full ones unless the policy keeps them."""
    if handle.settings.reshard_after_backward:
        release_handle(handle)
    elif not handle.full.readers.claims:
        handle.shown.show_sharded()
        # A gather issued ahead, for a unit that this backward did not run, may never be used, so
        # its error is ignored, as in `reshard`.
        with suppress(RuntimeError):
            handle.full.wait()


def return_to_idle(context: TreeContext) -> None:
    """Bring units and handles to rest after a backward, successful or not."""
    for flags in context.flag_reductions:
        flags.abandon()
    context.flag_reductions.clear()
    context.graphs.may_recompute.clear()
    for state in context.live_states():
        if state.training_state not in (TrainingState.IDLE, TrainingState.UNSHARDED_PARAMS):
            state.transition(TrainingState.FORWARD if state.depth else TrainingState.IDLE)
        for handle in state.handles:
            # Of each handle: writes are refused until then, also where the unit's end has freed the
            # values and nothing is left to release.
            handle.guard.set_in_backward(False)
            is_freed = handle.full.state is FullState.FREED and handle.full.kept is None
            if handle.shown.state is not Shown.SHARDED or not is_freed:
                release_after_backward(handle)
