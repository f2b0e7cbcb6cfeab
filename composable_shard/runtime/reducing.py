"""Which gradients a backward reduces, and which facts about it the ranks compare."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from composable_shard.comm import StepFacts
from composable_shard.comm import note_setting as enter_setting
from composable_shard.flat_param import FlatParamHandle, ParamEntry
from composable_shard.runtime.reduction_order import LATE
from composable_shard.runtime.unit import ShardState, TreeContext
from composable_shard.torch_private import DisableTorchFunctionSubclass


def note_setting(states: Sequence[ShardState], what: str, is_new: bool) -> None:
    """Enter a setting into the order that the ranks compare, so that they find a rank without it.

    Args:
        states: The units that it is set on; does nothing before they were compared.
        what: The setter and the value.
        is_new: Whether the value changes.
    """
    agreed = [state for state in states if state.context and state.context.has_agreed]
    if agreed and is_new:
        groups = [handle.shard_group for state in agreed for handle in state.handles]
        text = f"{what} of unit '{agreed[0].name}'"
        enter_setting(text, [each for one in groups for each in (one.group, *one.joint_groups)])


def find_late(
    context: TreeContext,
    handles: list[FlatParamHandle],
    used: list[list[int]],
    turns: Collection[FlatParamHandle],
) -> list[tuple[ShardState, FlatParamHandle]]:
    """Return the handles to reduce again, [Note: Buckets]; handles in `turns` are done."""
    found = [handle for handle, flags in zip(handles, used, strict=True) if LATE in flags]
    late = [(state, handle) for handle in found if (state := context.owner_of(handle)) is not None]
    for state, _ in late:
        if state.buckets is not None:
            state.buckets.note_late()
    return [(state, handle) for state, handle in late if handle not in turns]


def reduces(state: ShardState, handle: FlatParamHandle) -> bool:
    """Return whether a backward reduces the gradients of the handle, or leaves them unsharded.

    A persistent buffer, unsharded anyway, is reduced once, when no reduction is postponed.
    """
    if not handle.grads.is_persistent:
        return state.requires_gradient_sync
    return state.reduces_fully


def defers_all_reduce(state: ShardState, handle: FlatParamHandle) -> bool:
    """Return whether a reduction postpones the all-reduce over the replicate groups."""
    is_due = state.requires_all_reduce and state.is_last_backward
    return not is_due and bool(handle.shard_group.replicate_groups)


def find_buckets(context: TreeContext) -> dict[FlatParamHandle, ShardState]:
    """Return the handles that may be reduced before their unit's end, each with its unit."""
    return {
        handle: state
        for state in context.live_states()
        if state.buckets is not None
        for handle in state.handles
        if reduces(state, handle)
    }


def use_flags(handle: FlatParamHandle, is_bucket: bool, late: Collection[object]) -> Sequence[int]:
    """Return a flag for each parameter: 0, 1 for a gradient, `LATE` if it came too late."""
    used = handle.grads.used
    if not is_bucket:
        return [LATE * each for each in used] if handle in late else used
    params = [entry.unsharded for entry in handle.entries]
    is_late = [param is not None and param.grad is not None for param in params]
    if not any(is_late) and handle not in late:
        return used
    return [LATE * (each or own) for each, own in zip(used, is_late, strict=True)]


def find_unsynced(
    context: TreeContext, due: Collection[FlatParamHandle]
) -> list[tuple[ShardState, FlatParamHandle]]:
    """Return the handles in `due` that have gradients of earlier microbatches, with their units."""
    return [
        (state, handle)
        for state in context.live_states()
        for handle in state.handles
        if handle in due
        and (
            handle.grads.is_unsynced
            or (handle.grads.reduction.partial is not None and not defers_all_reduce(state, handle))
        )
    ]


def step_facts(context: TreeContext) -> StepFacts:
    """Return what the program did to parameters since the last backward, for the ranks to compare.

    How often an optimizer has stepped, the one that has most, for a rank may have none for some
    parameters; whether parameters were edited; how often those were written that each rank holds
    whole; whether there are gradients of earlier backwards. Of parameters that one rank owns steps
    alone count: only the owner edits, and has gradients.
    """
    handles = [handle for state in context.live_states() for handle in state.handles]
    num_steps, num_whole, has_edits, shown = 0, 0, False, list[ParamEntry]()
    for handle in handles:
        most, is_edited, num_new = handle.guard.take_new()
        num_steps = max(num_steps, most)
        if handle.shard_group.size == 1:
            num_whole += num_new
        if handle.shard_group.size == 1 or not handle.layout.owners:
            has_edits |= is_edited
            shown += handle.shown.at_rest
    with DisableTorchFunctionSubclass():  # [Note: Many getters]
        has_gradients = any(each.sharded.grad is not None for each in shown)
    line = (
        f"a backward that came after {num_steps} steps of an optimizer and "
        f"with{'' if has_edits else 'out'} edits of parameters since the last one"
        f"{f', {num_whole} writes,' if num_whole else ','} and with "
        f"{'' if has_gradients else 'no '}gradients of earlier ones"
    )
    return StepFacts(line, [(handle.shard_group, handle.label.first_call) for handle in handles])
