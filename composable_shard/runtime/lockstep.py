"""What the ranks compare so that they stay in step: settings, and facts of each step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from weakref import ref

from torch.optim import Optimizer

from composable_shard.comm import ShardGroup, StepFacts, enter_setting
from composable_shard.flat_param import FlatParamHandle, ParamEntry
from composable_shard.runtime.group_numbers import numbers_of
from composable_shard.runtime.unit import ShardState
from composable_shard.tensor import COMPARED
from composable_shard.torch_private import DisableTorchFunctionSubclass


def compare_setting(states: Sequence[ShardState], what: str, is_new: bool) -> None:
    """Enter a setting into the order that the ranks compare, so that they find a rank without it.

    Args:
        states: The units that it is set on; does nothing before they were compared.
        what: The setter and the value.
        is_new: Whether the value changes.
    """
    compared = [state for state in states if state.context and state.context.has_agreed]
    if compared and is_new:
        groups = [handle.shard_group for state in compared for handle in state.handles]
        text = f"{what} of unit '{compared[0].name}'"
        enter_setting(text, [each for one in groups for each in (one.group, *one.joint_groups)])


def step_facts(handles: Collection[FlatParamHandle]) -> StepFacts:
    """Return what the program did to parameters since the last backward, for the ranks to compare.

    - the steps of the optimizer that has stepped most, as others may have nothing on a rank;
    - whether parameters were edited, and how often those that each rank holds whole were written;
    - a checksum of what forwards have edited;
    - whether there are gradients of earlier backwards;
    - what the optimizers that have stepped hold in their groups.

    Of parameters that one rank owns steps alone count: only the owner edits, and has gradients.
    """
    num_steps, num_whole, checksum, has_edits, shown = 0, 0, 0, False, list[ParamEntry]()
    numbers: list[tuple[ShardGroup, int]] = []
    steps: dict[ref[Optimizer], int] = {}
    has_owned = False
    for handle in handles:
        numbers.append((handle.shard_group, handle.label.first_call))
        new_steps, is_edited, num_new, edits = handle.guard.pop_writes()
        num_steps, checksum = max(num_steps, *new_steps.values(), 0), checksum + edits
        steps.update(new_steps)
        has_owned = has_owned or handle.has_owned
        if handle.shard_group.size == 1:
            num_whole += num_new
        if handle.shard_group.size == 1 or not handle.layout.owners:
            has_edits |= is_edited
            shown += handle.shown.at_rest
    COMPARED.number += 1  # ends steps that failed
    with DisableTorchFunctionSubclass():  # [Note: Many getters]
        has_gradients = bool([each for each in shown if each.sharded.grad is not None])
    in_forward = f"edits of full parameters in a forward (sum {checksum}) and " if checksum else ""
    line = (
        f"a backward that came after {num_steps} steps of an optimizer and "
        f"with{'' if has_edits else 'out'} edits of parameters since the last one"
        f"{f', {num_whole} writes,' if num_whole else ','} and with "
        f"{in_forward}{'' if has_gradients else 'no '}gradients of earlier ones"
    )
    return StepFacts(line, numbers, numbers_of(steps, reads_device=has_owned))
