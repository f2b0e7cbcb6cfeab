"""Backwards that failed or reached no unit, and their gradients, which are dropped.

[Note: End of backward]
The autograd engine calls back at the end of a backward pass, but only if it succeeds. Only the
engine holds the object that it would call. If that object dies uncalled, the backward was aborted.
That is noted, and the next forward or backward drops all unpublished gradients of the tree, with
those that wait from earlier backwards. A model that is dropped instead: `make_streams`.
"""

from __future__ import annotations

import warnings
import weakref
from operator import attrgetter
from typing import Any

import torch
from torch.optim import Optimizer

from composable_shard.comm import has_failed
from composable_shard.flat_param import drop_unpublished
from composable_shard.runtime.gathers import return_to_idle
from composable_shard.runtime.open_graphs import alive
from composable_shard.runtime.saved_values import warn_of_late_read
from composable_shard.runtime.training_state import IDLE
from composable_shard.runtime.unit import TreeContext, trees
from composable_shard.tensor import FlatShard, step_hooks
from composable_shard.torch_private import current_backward_id


def drop_aborted(context: TreeContext) -> None:
    """Drop the gradients that an aborted backward left in handles; published ones stay.

    Gradients that `no_sync` kept unsharded are dropped too: the aborted pass may have added to
    some of them.
    """
    if not context.has_aborted:
        return
    context.graphs.forget()
    for state in context.live_states():
        for handle in state.handles:
            if not handle.full.params.is_locked:
                handle.full.params.warn_of_edits("in a backward hook")
            drop_unpublished(handle)
    return_to_idle(context)
    context.has_aborted = False


def note_unreached_call(context: TreeContext) -> None:
    """Note the most open calls so far; warn if a backward ran since and reached no unit.

    Autograd finds sharded parameters in no graph, so `loss.backward(inputs=params)` runs no node at
    all and calls no hook. But it takes a number, and so does a backward that failed before it
    reached a unit.
    """
    graphs = context.graphs
    graphs.most_open = graphs.num_open
    number, last = next_backward_id(), graphs.probed_backward_id
    graphs.probed_backward_id = number
    others = [tree.graphs for tree in trees if tree is not context]
    is_of_others = any(max(o.last_backward_id, o.probed_backward_id) > last for o in others)
    if any(state.inspection.refuses_hooks for state in context.live_states()):
        return  # a transform in a forward may have taken the number
    if not is_of_others and graphs.num_open > 1 and graphs.last_backward_id < last < number - 1:
        warnings.warn(_unreached(context), stacklevel=2)


def check_step(optimizer: Optimizer) -> None:
    """Check, before a step that has no gradient at all, that no backward has missed its parameters.

    Autograd numbers backwards. Its counter is compared with the numbers seen here: those of
    backwards that reached a tree, and of the empty one at the first forward. Transforms, and
    backwards inside backwards, take numbers too.

    Raises:
        RuntimeError: If outputs wait for a backward, and one has run that reached no unit.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(param.grad is not None for param in params):  # ends at the first
        return
    guards = {param._guard for param in params if isinstance(param, FlatShard)}
    known = max(max(t.graphs.last_backward_id, t.graphs.probed_backward_id) for t in trees)
    states = [state for tree in trees for state in tree.live_states()]
    takes_more = any(state.inspection.refuses_hooks for state in states)
    if takes_more or any(tree.graphs.has_regions for tree in trees):
        return
    for tree in trees:
        is_stepped = any(h.guard in guards and h.requires_grad for h in tree.live_handles())
        if not (tree.graphs.armed and is_stepped):
            continue
        number = next_backward_id()
        if number > known + 1:
            raise RuntimeError(f"the step of an optimizer found no gradient: {_unreached(tree)}")
        known = tree.graphs.last_backward_id = number


step_hooks.check_steps(trees, attrgetter("graphs.armed"), check_step)


def _unreached(context: TreeContext) -> str:
    names = [state.name for state in alive(context.graphs.armed)]
    return (
        f"a backward has run since the last forward of units {names}, and reached none of them: "
        "they have no gradients from it. If it raised an error, that is why. If it was backward("
        "inputs=...) or torch.autograd.grad(...) with sharded parameters, leave inputs out, or "
        "call unshard(module) before the forward and pass the parameters that the module shows "
        "then. If it was of another model, leave out the step of this one."
    )


def next_backward_id() -> int:
    """Run an empty backward and return its number; the next backward gets the number after it."""
    found: list[int] = []
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.zeros((), device="cpu", requires_grad=True)
        leaf.register_hook(lambda _: found.append(current_backward_id()))
        leaf.backward()
    return found[0]


def note_abort(context_ref: weakref.ref[TreeContext], callback: weakref.ref[Any]) -> None:
    """Forget an aborted backward, which the engine has dropped; show the sharded parameters.

    Nothing here can block or fail. The next call deals with buffers and collectives in flight.
    """
    context = context_ref()
    backward: Any = None if context is None else context.backward
    if context is None or backward is None or not backward.is_called_by(callback):
        return
    context.backward, context.has_aborted, context.graphs.num_open = None, True, 0
    armed = alive(context.graphs.armed)
    groups = {group for h in context.live_handles() for group in h.shard_group.joint_groups}
    if not any(map(has_failed, groups)):  # whose error tells more
        warn_of_late_read([s.name for s in armed if s.needed_handles and s.training_state is IDLE])
    for state in context.live_states():
        for handle in state.handles:
            handle.grads.set_direct(False)
            if state.depth == 0 and not state.is_held:
                handle.shown.show_sharded()
