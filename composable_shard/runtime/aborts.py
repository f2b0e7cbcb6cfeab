"""What a backward leaves that has failed, and buckets that all ranks reduce once more."""

from __future__ import annotations

from contextlib import suppress

from composable_shard.flat_param import FlatParamHandle
from composable_shard.runtime.buckets import LATE
from composable_shard.runtime.prefetch import return_to_idle
from composable_shard.runtime.reads import learn_anew, warn_of_reads
from composable_shard.runtime.unit import ShardState, TreeContext


def drop_aborted(context: TreeContext) -> None:
    """Drop what an aborted backward left in handles; already published gradients stay.

    Gradients that `no_sync` kept unsharded are dropped too: the aborted pass may have added to
    some of them.
    """
    context.has_aborted = False
    for state in context.live_states():
        if state.buckets is not None and state.buckets.is_under_way:
            catch_up(context, state)
    context.forget_graphs()
    for state in context.live_states():
        for handle in state.handles:
            handle.grads.drop()
    return_to_idle(context)
    learnt = {s.name: s.learnt for s in context.live_states() if s.needed}
    warn_of_reads(learnt)  # unless the abort has
    learn_anew(learnt)


def catch_up(context: TreeContext, state: ShardState) -> None:
    """Issue the reductions of a unit that other ranks may have issued before a backward failed.

    An error of it is not ours to raise: all of it is dropped. [Note: Buckets]
    """
    if state.buckets is None:
        return
    expected = state.buckets.take_expected()
    with suppress(Exception):
        for handle in state.handles:
            handle.grads.advance()
        for handle in expected:
            handle.grads.issue(
                context.streams,
                context.scratch,
                keep_unsharded=True,
                is_deferred=state.defers_all_reduce(handle),
            )
            handle.grads.advance()


def find_late(
    buckets: dict[FlatParamHandle, ShardState],
    handles: list[FlatParamHandle],
    used: list[list[int]],
) -> list[tuple[ShardState, FlatParamHandle]]:
    """Return the buckets that are reduced once more, see [Note: Buckets]."""
    found = [h for h, flags in zip(handles, used, strict=True) if LATE in flags]
    late = [(buckets[handle], handle) for handle in found]
    for state, _ in late:
        if state.buckets is not None:
            state.buckets.note_late()
    return late
