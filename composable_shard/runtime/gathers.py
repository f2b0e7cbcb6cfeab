"""Which units are gathered ahead, and when full parameters are freed.

[Note: Gathers of small units]
A gather costs its latency even for a few bytes, on gloo also the waking of threads on both sides.
So small units are gathered several at a time: if the next unit's gather has not been issued, those
of the units after it are issued along with it, while all of them together have at most
`prefetch_nbytes` of the running unit. Each has a gather of its own, straight into its buffer. So
either the next unit is ahead, or at most that many bytes.

[Note: Gathers of kept values]
Under `SHARD_OPTIM` full parameters stay, and only a write to the shards calls for a gather. So the
first forward after it, of whichever unit of the tree, starts the gathers of all of them, in one
order: ranks may run the units in different orders, and some of them more often.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

from composable_shard.comm import ShardGroup, SmallGroup
from composable_shard.flat_param import FlatParamHandle, FullState, Shown
from composable_shard.options import ReshardAfterForward
from composable_shard.runtime.unit import ShardState, StateRef, TrainingState, TreeContext


def choose_ahead(
    state: ShardState,
    prefetched: dict[ShardState, bool],
    chosen: tuple[StateRef, ...] | None,
    upcoming: Iterable[ShardState | None],
) -> list[ShardState]:
    """Return the units to gather while `state` runs.

    Args:
        state: The unit that runs now.
        prefetched: The units that were gathered ahead; `state` is taken out.
        chosen: The units that the user chose; None to take those that come next.
        upcoming: The units that came next the last time, in order, if the order was the same so
            far. None ends them.
    """
    prefetched.pop(state, None)
    if chosen is not None:
        return [target for ref in chosen if (target := ref()) is not None]
    targets: list[ShardState] = []
    nbytes = 0
    for target in upcoming:
        if target is None or target is state or (not targets and target in prefetched):
            break
        for handle in target.needed:
            nbytes += handle.full.buffer.nbytes
        if targets and nbytes > state.options.prefetch_nbytes:
            break
        targets.append(target)
    return targets


def gather_ahead(
    context: TreeContext,
    prefetched: dict[ShardState, bool],
    targets: list[ShardState],
    when: str,
    *,
    are_chosen: bool,
) -> None:
    """Start the gathers of units.

    Args:
        context: The tree's.
        prefetched: Where the units are entered.
        targets: From `choose_ahead`.
        when: "forward" or "backward".
        are_chosen: Whether the user chose them.
    """
    for target in targets:
        if when == "backward" and target.reads_nothing:
            continue
        # Before its gathers: should one fail, the others are freed.
        prefetched[target] = are_chosen or prefetched.get(target, False)
        for handle in target.needed:
            if handle.is_attached and handle.shown.state is Shown.SHARDED:
                handle.unshard(context.streams, when)


def gather_kept(context: TreeContext) -> None:
    """Gather what stays and was written since, of all units, [Note: Gathers of kept values]."""
    for state in context.live_states():
        for handle in state.handles:
            full = handle.full
            if handle.grads.is_persistent and full.is_sharded and not full.is_current:
                handle.adopt_changes()
                handle.unshard(context.streams, "forward")


def gather_in_backward(
    context: TreeContext,
    state: ShardState,
    prefetched: dict[ShardState, bool],
    following: dict[StateRef, StateRef],
) -> None:
    """Start the gathers of a unit that a backward has reached, and of the units to come after it.

    Args:
        context: The tree's.
        state: The unit.
        prefetched: The units that this backward has gathered ahead.
        following: The unit that is expected after each.
    """
    state.transition(TrainingState.PRE_BACKWARD)
    for handle in state.needed:
        if handle.guard.has_new_attributes:
            handle.adopt_changes()
        # Once registered it holds what is needed, though on some ranks a gradient may have taken
        # the place of a value meanwhile: all ranks must decide alike.
        if handle.shown.state is Shown.SHARDED and not state.reads_nothing:
            handle.unshard(context.streams, "backward")
    chosen = state.backward_prefetch
    ahead = choose_ahead(state, prefetched, chosen, _follow(following, state.ref))
    if ahead and chosen is None and prefetched:
        # A backward may leave units out. A forward in the known order leaves out none of those
        # gathered ahead, and its end frees them if it does.
        drop_prefetched(prefetched, keeps=ahead, keeps_chosen=True)
    gather_ahead(context, prefetched, ahead, "backward", are_chosen=chosen is not None)


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
    """Free what was gathered ahead for units that did not run, but for some."""
    for unused, is_chosen in list(prefetched.items()):
        if unused in keeps or (is_chosen and keeps_chosen):
            continue
        is_idle = unused.training_state is TrainingState.IDLE
        for handle in unused.needed if is_idle else ():
            # Another unit may compute with it, of which this one borrows.
            is_used = bool(handle.full.claims) or handle.shown.is_unsharded
            if is_used:
                continue
            if unused.reshard_after_forward is not False:
                handle.full.free()
            else:
                # The values stay, but nothing stays in flight. As in `reshard`, nobody wants an
                # error of it.
                with suppress(RuntimeError):
                    handle.full.wait()
        del prefetched[unused]


def release_handle(
    context: TreeContext, handle: FlatParamHandle, *, is_backward_next: bool = False
) -> None:
    """Show the sharded parameters and free the full ones, unless a forward still needs them.

    Args:
        context: The tree's.
        handle: What to release.
        is_backward_next: Keep what the policy keeps for a backward.
    """
    if handle.full.claims:
        return
    handle.shown.show_sharded()
    if is_backward_next and handle.full.small_group is not None:
        handle.full.free(keeps_part=True)
    else:
        handle.full.free()


def end_in_backward(context: TreeContext, state: ShardState, handle: FlatParamHandle) -> None:
    """Bring a handle to rest that a backward needs no more, and its unit behind the backward."""
    release_after_backward(context, handle)
    if state.training_state is TrainingState.PRE_BACKWARD:
        state.transition(TrainingState.POST_BACKWARD)


def release_after_backward(context: TreeContext, handle: FlatParamHandle) -> None:
    """Show the sharded parameters, and free the full ones unless the policy keeps them."""
    if handle.reshards_after_backward:
        release_handle(context, handle)
    elif not handle.full.claims:
        handle.shown.show_sharded()
        # One that was issued ahead, for a unit that this backward did not run, may never be used.
        # An error is not ours to raise here, as in `reshard`.
        with suppress(RuntimeError):
            handle.full.wait()


def return_to_idle(context: TreeContext) -> None:
    """Bring units and handles to rest after a backward, successful or not."""
    for flags in context.flag_reductions:
        flags.abandon()
    context.flag_reductions.clear()
    context.may_recompute.clear()
    for state in context.live_states():
        if state.buckets is not None:
            state.buckets.reset()
        if state.training_state not in (TrainingState.IDLE, TrainingState.UNSHARDED_PARAMS):
            state.transition(TrainingState.FORWARD if state.depth else TrainingState.IDLE)
        for handle in state.handles:
            handle.guard.set_in_backward(False)
            is_freed = handle.full.state is FullState.FREED
            if handle.shown.state is not Shown.SHARDED or not is_freed:
                release_after_backward(context, handle)


def apply_policy(state: ShardState, value: ReshardAfterForward) -> None:
    """Make a checked value count from the unit's next forward on.

    A number makes a process group, the first time: all ranks must call this alike. Units whose
    strategy keeps parameters unsharded stay as they are.
    """
    if not state.options.strategy.facts.frees_params:
        return
    state.reshard_after_forward = value
    for handle in state.handles:
        handle.full.set_small_group(find_small_group(handle.shard_group, value))


def find_small_group(shard_group: ShardGroup, value: ReshardAfterForward) -> SmallGroup | None:
    """Return the ranks that a checked number speaks of, or None where it is none."""
    if value is None or isinstance(value, bool):
        return None
    return SmallGroup.of(shard_group, value)
