"""Gather ahead: start the gathers of units that are going to run, and free those that did not."""

from __future__ import annotations

from contextlib import suppress

from composable_shard._lazy_init import prepare
from composable_shard._state import ShardState, StateRef, TrainingState, TreeContext

__all__ = ["drop_prefetched", "prefetch", "prepare_ahead"]


def prepare_ahead(chosen: tuple[StateRef, ...] | None, expected: ShardState | None) -> None:
    """Make the handles of the units that `prefetch` is going to gather ready."""
    if chosen is None:
        if expected is not None:
            prepare(expected)
        return
    for target in _targets(chosen):
        prepare(target)


def prefetch(
    context: TreeContext,
    state: ShardState,
    chosen: tuple[StateRef, ...] | None,
    expected: ShardState | None,
) -> None:
    """Start the gathers of what is to run after `state`.

    Args:
        context: The tree's.
        state: The unit that runs now.
        chosen: The units that the user chose; None to take the expected one.
        expected: The unit that came next the last time, if the order was the same so far.
    """
    context.prefetched.pop(state, None)
    if chosen is not None:
        for target in _targets(chosen):
            _gather_ahead(context, target, is_chosen=True)
    elif expected is not None and expected is not state:
        if context.prefetched:
            drop_prefetched(context, keeps_chosen=True)
        _gather_ahead(context, expected, is_chosen=False)


def _gather_ahead(context: TreeContext, target: ShardState, *, is_chosen: bool) -> None:
    for handle in target.needed:
        if handle.is_attached and not handle.is_registered_unsharded:
            handle.unshard(context.streams)
    context.prefetched[target] = is_chosen


def _targets(chosen: tuple[StateRef, ...]) -> list[ShardState]:
    return [state for ref in chosen if (state := ref()) is not None]


def drop_prefetched(context: TreeContext, *, keeps_chosen: bool = False) -> None:
    """Free what was gathered ahead for units that did not run."""
    for unused, is_chosen in list(context.prefetched.items()):
        if is_chosen and keeps_chosen:
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
