"""Backwards that failed or reached no unit, and their gradients, which are dropped.

[Note: End of backward]
The autograd engine calls back at the end of a backward pass, but only if it succeeds. Only the
engine holds the object that it would call. If that object dies uncalled, the backward was aborted,
and all its unpublished gradients are dropped.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch

from composable_shard.comm import has_failed
from composable_shard.flat_param import forget_pending
from composable_shard.runtime.gathers import return_to_idle
from composable_shard.runtime.open_graphs import alive
from composable_shard.runtime.saved_values import warn_of_late_read
from composable_shard.runtime.unit import IDLE, TreeContext, trees
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
            forget_pending(handle)
            handle.grads.drop()
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
    number, last = _next_backward_id(), graphs.probed_backward_id
    graphs.probed_backward_id = number
    others = [tree.graphs for tree in trees if tree is not context]
    is_of_others = any(max(o.last_backward_id, o.probed_backward_id) > last for o in others)
    if any(state.known_forwards.refuses_hooks for state in context.live_states()):
        return  # a transform in a forward may have taken the number
    if not is_of_others and graphs.num_open > 1 and graphs.last_backward_id < last < number - 1:
        names = [state.name for state in alive(graphs.armed)]
        warnings.warn(
            f"a backward has run since the last forward of units {names}, and reached none of "
            "them: they have no gradients from it. If it raised an error, that is why. If it was "
            "backward(inputs=...) with sharded parameters, leave inputs out, or call unshard("
            "module) before the forward and pass the parameters that the module shows then.",
            stacklevel=2,
        )


def _next_backward_id() -> int:
    """Run an empty backward and return its number; the next backward gets the number after it."""
    found: list[int] = []
    with torch.enable_grad():
        leaf = torch.zeros((), requires_grad=True)
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
        warn_of_late_read([s.name for s in armed if s.needed and s.training_state is IDLE])
    for state in context.live_states():
        for handle in state.handles:
            handle.grads.take_directly(False)
            if state.depth == 0 and not state.is_held:
                handle.shown.show_sharded()
