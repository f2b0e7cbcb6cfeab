"""Which units are gathered ahead, and what is freed when.

[Note: Gathers of small units]
A gather costs its latency however little it brings, on gloo also the waking of threads on both
sides. So small units are gathered several at a time: when the next unit is not on its way yet, the
ones after it are gathered along with it while all of them together have at most `prefetch_nbytes`
of the running unit. Each has a gather of its own, straight into its buffer. What is ahead is thus
the next unit, or so many bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

from composable_shard.comm import ShardGroup, SmallGroup
from composable_shard.options import ReshardAfterForward
from composable_shard.runtime.state import ShardState, StateRef, TrainingState, TreeContext

__all__ = [
    "apply_policy",
    "choose_ahead",
    "drop_prefetched",
    "find_small_group",
    "gather_ahead",
    "run_backward_after",
]


def apply_policy(state: ShardState, value: ReshardAfterForward) -> None:
    """Make a checked value count from the unit's next forward on.

    A number makes a process group, the first time: all ranks must call this alike. Units whose
    strategy keeps parameters unsharded stay as they are.
    """
    if not state.options.strategy.facts.frees_params:
        return
    state.reshard_after_forward = value
    for handle in state.handles:
        handle.small_group = find_small_group(handle.shard_group, value)


def find_small_group(shard_group: ShardGroup, value: ReshardAfterForward) -> SmallGroup | None:
    """Return the ranks that a checked number speaks of, or None where it is none."""
    if value is None or isinstance(value, bool):
        return None
    return SmallGroup.of(shard_group, value)


def choose_ahead(
    context: TreeContext,
    state: ShardState,
    chosen: tuple[StateRef, ...] | None,
    upcoming: Iterable[ShardState],
) -> list[ShardState]:
    """Return the units to gather while `state` runs.

    Args:
        context: The tree's.
        state: The unit that runs now.
        chosen: The units that the user chose; None to take what comes next.
        upcoming: What came next the last time, in order, if the order was the same so far.
    """
    context.prefetched.pop(state, None)
    if chosen is not None:
        return [target for ref in chosen if (target := ref()) is not None]
    targets: list[ShardState] = []
    nbytes = 0
    for target in upcoming:
        if target is state or (not targets and target in context.prefetched):
            break
        for handle in target.needed:
            nbytes += handle.unsharded.nbytes
        if targets and nbytes > state.options.prefetch_nbytes:
            break
        targets.append(target)
    return targets


def run_backward_after(context: TreeContext, state: ShardState) -> Iterator[ShardState]:
    """Yield the units whose backward is expected after that of `state`, in order."""
    ref = context.next_in_backward.get(state.ref)
    while ref is not None and (following := ref()) is not None:
        yield following
        ref = context.next_in_backward.get(ref)


def gather_ahead(context: TreeContext, targets: list[ShardState], *, are_chosen: bool) -> None:
    """Start the gathers of units.

    Args:
        context: The tree's.
        targets: What `choose_ahead` returned.
        are_chosen: Whether the user chose them.
    """
    for target in targets:
        # Before its gathers: should one fail, the others are freed.
        context.prefetched[target] = are_chosen or context.prefetched.get(target, False)
        for handle in target.needed:
            if handle.is_attached and not handle.is_registered_unsharded:
                handle.unshard(context.streams)


def drop_prefetched(
    context: TreeContext, *, keeps: Collection[ShardState] = (), keeps_chosen: bool = False
) -> None:
    """Free what was gathered ahead for units that did not run, but for some."""
    for unused, is_chosen in list(context.prefetched.items()):
        if unused in keeps or (is_chosen and keeps_chosen):
            continue
        del context.prefetched[unused]
        if unused.training_state is not TrainingState.IDLE:
            continue
        for handle in unused.needed:
            # Another unit may compute with it, of which this one borrows.
            is_used = handle.num_holders > 0 or handle.is_registered_unsharded
            if is_used:
                continue
            if unused.reshard_after_forward is not False:
                handle.reshard()
            else:
                # The values stay, but nothing stays in flight. As in `reshard`, nobody wants an
                # error of it.
                with suppress(RuntimeError):
                    handle.wait_unshard()
