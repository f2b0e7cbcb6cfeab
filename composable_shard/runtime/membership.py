"""Which units are one tree: trees that join, part, and are made anew.

[Note: Trees without a root]
Layers may be sharded without a `fully_shard` on a module around them. Each is a tree of its own and
leads its own call. Trees that turn out to be parts of one graph are joined: they share one context
from then on. So a backward overlaps their reductions and frees them unit by unit, a forward gathers
the next tree's unit ahead, and no leader keeps its full parameters for a backward that does not
begin at once: all as with a unit around them. A tree joins another one

- when its call gets an argument that the other's call made, or
- when one backward has reached both, or
- when one of its units borrows parameters of the other (tied weights).

Only a tree at rest and without a graph can join, because calls are numbered per context. Trees of
different graphs stay apart, in whatever order their calls come.

[Note: Units that are taken out]
A unit that a program takes out of its model may be garbage for a while, and collected at other
moments on each rank. So nothing that all ranks do may depend on whether it is still there. When a
call begins whose modules have other children than before, the tree is made anew of what is below
them. For joined trees the module around them tells, whose call ran them first, or with which
`lazy_init` was called; without one nothing tells. Joined trees part then, and when new units are
made, and those that are still used join again: not for a graph that was made before.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from composable_shard.flat_param import FlatParamHandle
from composable_shard.runtime.casts import iter_tensors
from composable_shard.runtime.gathers import release_handle
from composable_shard.runtime.tree import (
    find_unmanaged,
    get_states,
    has_changed,
    name_apart,
    note_contents,
    raise_unmanaged,
)
from composable_shard.runtime.unit import (
    ShardState,
    TrainingState,
    TreeContext,
    all_trees,
    first_to_join,
    may_part,
)
from composable_shard.tensor import join_tree
from composable_shard.torch_private import sequence_nr_of


def share_context(modules: list[nn.Module]) -> TreeContext:
    """Give all units in `modules`, the outermost ones known so far, one new context."""
    states = list(dict.fromkeys(state for module in modules for state in get_states(module)))
    handles = [handle for state in states for handle in state.handles]
    device = handles[0].shard_group.device if handles else torch.device("cpu")
    context = TreeContext(modules, states, device)
    before: dict[TreeContext, list[ShardState]] = {}
    for state in states:
        if state.context is not None:
            before.setdefault(state.context, []).append(state)
        state.context = context
    for old, own in before.items():
        old.give_up(own)
    if any(handle.layout.owners for handle in handles):
        join_tree(handles)
    return context


def adopt_contents(context: TreeContext) -> None:
    """Check what is new below the modules of a tree, and note whether to make the tree anew.

    Raises:
        RuntimeError: If no unit manages a trainable parameter, see [Note: Whole model].
    """
    modules = context.watched_modules()
    if not any(map(has_changed, modules)):
        return
    if unmanaged := find_unmanaged(modules):
        raise_unmanaged(unmanaged)
    for changed in filter(note_contents, filter(has_changed, modules)):
        ref = weakref.ref(changed)
        for tree in all_trees():
            tree.has_changed |= ref in (tree.around if tree.is_joined else tree.modules)


def renew_context(context: TreeContext) -> None:
    """Make a tree anew of the units below each of its modules.

    See [Note: Units that are taken out]. Graphs that wait for a backward stay valid.
    """
    adopt_contents(context)
    modules, armed = context.live_modules(), list(context.armed)
    first_to_join[0] = max(first_to_join[0], context.last_backward_id + 1)
    inner = {child for module in modules for child in module.modules() if child is not module}
    renewed = []
    for module in [module for module in modules if module not in inner]:
        contexts = {state.context for state in get_states(module)}
        renewed.append(share_context([module]))
        are_known = all(each is not None and each.is_checked for each in contexts)
        renewed[-1].follow(context, armed, are_known=are_known)
    for each in [state for tree in renewed for state in tree.live_states() if state.borrowed]:
        if each.context is not None:
            join_owners(each.context, each.borrowed)


def part_joined_trees(new: ShardState) -> None:
    """Let joined trees part before their next call, as a new unit may stand for one of theirs.

    See [Note: Units that are taken out]. Those that are parts of one graph still join again.
    """
    if not may_part[0]:
        return  # as in a set-up, whose cost this would make quadratic
    may_part[0] = False
    groups = {handle.shard_group.joint_groups for handle in new.handles}
    for context in all_trees():
        if groups.isdisjoint(h.shard_group.joint_groups for h in context.live_handles()):
            may_part[0] = True
        else:
            context.has_changed = context.has_changed or context.is_joined
            context.first_call = context.num_forwards
            first_to_join[0] = max(first_to_join[0], context.last_backward_id + 1)


def join_connected(context: TreeContext, args: tuple[Any, ...]) -> TreeContext:
    """Join the trees that are parts of one graph with a tree whose call begins.

    See [Note: Trees without a root].

    Args:
        context: Of the tree that is called.
        args: The arguments.

    Returns:
        The context that the called unit has now.
    """
    others = [other for other in all_trees() if other is not context]
    for other in others:
        if context.last_backward_id == other.last_backward_id >= first_to_join[0]:
            join(context, other)
    calls = [
        (state.call_sequence_nr, state.output_sequence_nr, other)
        for other in others
        for ref in other.armed
        if (state := ref()) is not None
    ]
    caller = _find_maker(args, calls) if calls else None
    return context if caller is None else join(caller, context)


def join_owners(context: TreeContext, borrowed: Sequence[FlatParamHandle]) -> None:
    """Join the trees of parameters that a new unit borrows from units that are not inside it."""
    for handle in borrowed:
        for other in all_trees():
            if other is not context and other.owner_of(handle) is not None:
                context = join(other, context)


def join(context: TreeContext, other: TreeContext) -> TreeContext:
    """Make one tree of two if `other` can join; return the context that its units have now.

    What the first tree has kept for a backward that would begin at once is freed.
    """
    is_busy = other.call or other.backward or other.has_aborted or other.serves_graphs
    is_busy = is_busy or context.call or context.backward or context.device != other.device
    # What is to be made anew, its next call makes.
    is_changed = any(map(has_changed, other.watched_modules()))
    if other.armed or is_busy or is_changed:
        return other
    context.take_over(other)
    states = context.live_states()
    name_apart(states)
    handles = [handle for state in states for handle in state.handles]
    if any(handle.layout.owners for handle in handles):
        join_tree(handles)
    for state in states:
        is_kept = state.reshard_after_forward is None and not state.is_in_pass
        if is_kept and state.training_state is TrainingState.IDLE:
            for handle in state.needed:
                release_handle(context, handle, is_backward_next=True)
    return context


def _find_maker(
    args: tuple[Any, ...], calls: Sequence[tuple[int, int, TreeContext]]
) -> TreeContext | None:
    """Return the tree of a call, of nodes `[start, end)`, that an argument was computed from."""
    nodes = [tensor.grad_fn for tensor in iter_tensors(args) if tensor.grad_fn is not None]
    seen = set(nodes)
    earliest = min(start for start, _, _ in calls)
    while nodes:
        node = nodes.pop()
        number = sequence_nr_of(node)
        for start, end, context in calls:
            if start <= number < end:
                return context
        if number >= earliest:
            for before, _ in node.next_functions:  # in the same order on all ranks
                if before is not None and before not in seen:
                    seen.add(before)
                    nodes.append(before)
    return None
