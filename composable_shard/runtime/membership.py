"""Which units form one tree: trees join for tied parameters, and are rebuilt.

[Note: Trees without a root]
Layers may be sharded without a `fully_shard` on a module around them. Each is a tree of its own and
leads its own call: it keeps its full parameters for the backward, as a root does, and its gradients
are reduced when the backward ends. Only where one of its units borrows parameters of another tree
(tied weights) do the two become one: the reduction must wait for the calls of both.

[Note: Units that are taken out]
A unit that a program takes out of its model may be garbage for a while, and each rank may collect
it at a different time. So no common action of the ranks may depend on whether it still exists. If
the children of a tree's modules have changed when a call begins, the tree is rebuilt from the units
below them. A tree of several modules is watched through the module around them (whose call first
ran them, or that was passed to `lazy_init`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn

from composable_shard.flat_param import FlatParamHandle
from composable_shard.runtime.contents import has_changed, note_contents
from composable_shard.runtime.open_graphs import alive
from composable_shard.runtime.tree import get_states
from composable_shard.runtime.unit import ShardState, TreeContext, trees
from composable_shard.runtime.whole_model import find_unmanaged, raise_unmanaged
from composable_shard.torch_private import modules_in


def share_context(modules: list[nn.Module]) -> TreeContext:
    """Give all units in `modules`, the outermost ones known so far, one new context."""
    states = dict.fromkeys(state for module in modules for state in get_states(module))
    return new_context(modules, list(states))


def new_context(modules: list[nn.Module], states: list[ShardState]) -> TreeContext:
    """Do as `share_context` where the units are known: `states` are all that are in `modules`."""
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
    _note_owned(handles)
    return context


def remember_trees(states: Sequence[ShardState], *, joins: bool, owns: bool) -> Callable[[], None]:
    """Return a function that undoes `share_context` and `join_owners` for units.

    With `joins` the units that these reach may be in any tree. `owns`: whether a new unit around
    them has parameters that one rank owns.
    """
    known = dict.fromkeys(state.context for state in states if state.context is not None)
    known |= dict.fromkeys(list(trees) if joins else ())
    before = [tree.remember() for tree in known]
    contexts = [(state, state.context) for state in states]
    contexts += [(state, tree) for tree in known for state in tree.live_states()]
    handles = [handle for state in states for handle in state.handles]
    is_noted = owns or joins or any(handle.has_owned for handle in handles)  # see _note_owned
    labels = [label for handle in handles if is_noted for label in handle.labels()]
    flags = [(label, label.is_among_owned) for label in labels]

    def restore() -> None:
        for undo in before:
            undo()
        for state, context in contexts:
            if state.context is not None and state.context not in known:
                trees.discard(state.context)  # an error's traceback may keep it alive
            state.context = context
        for label, flag in flags:
            label.set_among_owned(flag)

    return restore


def adopt_contents(context: TreeContext) -> None:
    """Check new contents below the modules of a tree, and mark the trees to rebuild.

    Raises:
        RuntimeError: If no unit manages a trainable parameter, see [Note: Whole model].
    """
    modules = context.watched_modules()
    if not any(map(has_changed, modules)):
        return
    if unmanaged := find_unmanaged(modules):
        raise_unmanaged(unmanaged, context.live_states())
    for changed in filter(note_contents, filter(has_changed, modules)):
        ref = weakref.ref(changed)
        for tree in list(trees):
            tree.has_changed |= ref in (tree.callers if len(tree.modules) > 1 else tree.modules)


def has_other_units(context: TreeContext) -> bool:
    """Return whether units were taken out of a tree's modules, or put into them."""
    found = [state.ref for module in alive(context.modules) for state in get_states(module)]
    return context.has_changed or context.states != found


def renew_context(context: TreeContext) -> None:
    """Rebuild a tree: the units below each of its modules get a new context.

    See [Note: Units that are taken out]. Graphs that wait for a backward stay valid.
    """
    adopt_contents(context)
    modules = alive(context.modules)
    graphs = context.graphs.within([state.ref for state in context.live_states()])
    inner = {child for module in modules for child in modules_in(module) if child is not module}
    renewed = []
    for module in [module for module in modules if module not in inner]:
        contexts = {state.context for state in get_states(module)}
        renewed.append(share_context([module]))
        are_known = all(each is not None and each.is_checked for each in contexts)
        renewed[-1].follow(context, graphs, are_known=are_known)
    for each in [state for tree in renewed for state in tree.live_states() if state.borrowed]:
        if each.context is not None:
            join_owners(each.context, each.borrowed)


def join_owners(context: TreeContext, borrowed: Sequence[FlatParamHandle]) -> None:
    """Join the trees of parameters that a new unit borrows from units that are not inside it."""
    if not borrowed:
        return  # as for most units: there may be a tree for each
    others = [tree for tree in trees if tree.states]
    for handle in borrowed:
        for other in others:
            if other is not context and handle in other.live_handles():
                context = _join(other, context)


def _join(context: TreeContext, other: TreeContext) -> TreeContext:
    """Make one tree of two if `other` can join; return the context that its units then have.

    A tree can join only when idle and without a graph, because calls are numbered per context.
    """
    is_busy = other.call or other.backward or other.has_aborted or other.serves_graphs
    is_busy = is_busy or context.call or context.backward or context.device != other.device
    # A tree that has changed is rebuilt by its next call, so it can't join now.
    is_changed = any(map(has_changed, other.watched_modules()))
    if other.graphs.armed or is_busy or is_changed:
        return other
    context.take_over(other)
    _note_owned(context.live_handles())
    return context


def _note_owned(handles: Sequence[FlatParamHandle]) -> None:
    """Let each gradient of a tree know that others are on their owner alone, if any are."""
    if any(handle.has_owned for handle in handles):
        for label in [label for handle in handles for label in handle.labels()]:
            label.set_among_owned()
