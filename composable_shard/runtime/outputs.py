"""Hooks on the outputs of a forward, returned or left on modules, that announce its unit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from composable_shard.flat_param import HAVE_VALUES, LATE_GRAPH
from composable_shard.runtime.backward import CallReached
from composable_shard.runtime.containers import iter_tensors, map_tensors
from composable_shard.runtime.late_outputs import find_late_output
from composable_shard.runtime.open_graphs import UnitCall
from composable_shard.runtime.saved_values import frees_values, kept_tensors, refuse_views
from composable_shard.runtime.unit import ShardState, TreeContext
from composable_shard.tensor import FlatShard
from composable_shard.torch_private import (
    base_of,
    current_dual_level,
    next_sequence_nr,
    sequence_nr_of,
    set_versions,
    version_of,
)


def serve_graphs(state: ShardState) -> None:
    """Keep the unit's full values for graphs whose backward no hook announces."""
    for handle in state.needed_handles:
        handle.full.serve_graphs()


def arm(
    context: TreeContext,
    state: ShardState,
    module: nn.Module,
    output: Any,
    reached: CallReached | None,
    *,
    is_looked_at: bool,
) -> tuple[Any, bool]:
    """Put hooks on the tensors that a call returns or leaves on modules.

    Returns the output, without views of full values, and whether a backward may reach the call.
    """
    if current_dual_level() >= 0:
        serve_graphs(state)  # [Note: Transforms]
    late = "" if isinstance(output, Tensor) else find_late_output(output)
    if late or state.inspection.late_output:
        _note_late_output(state, late)
    num_nodes = next_sequence_nr() - state.last_call.sequence_nr
    # Addresses of full buffers that hold values and may be freed before a view of them.
    extents = [
        (start := full.unversioned.data_ptr(), start + full.buffer.nbytes)
        for handle in state.needed_handles
        if not (full := handle.full).is_kept and full.state in HAVE_VALUES
    ]
    tensors = (output,) if isinstance(output, Tensor) else _tensors(output)
    if extents and any([_is_within(extents, tensor) for tensor in tensors]):
        output = map_tensors(output, partial(_copy_alias, extents))
        tensors = _tensors(output)
    if not torch.is_grad_enabled():
        return output, False
    # A call may return an input, or an inner unit's output, unchanged, perhaps on this rank only.
    # New nodes let the backward reach the units in the same order on all ranks.
    call = context.call
    newest = state.last_call.sequence_nr
    if call is not None and call.output_sequence_nr > newest:
        newest = call.output_sequence_nr
    if any([_is_older(tensor, newest) for tensor in tensors]):
        output = map_tensors(output, partial(_renew_older, newest))
        tensors = _tensors(output)
    if call is not None:
        call.output_sequence_nr = next_sequence_nr()
    if state.inspection.keeps.get(num_nodes, True):
        kept = _find_kept(state, module, extents, num_nodes, is_looked_at=is_looked_at)
        tensors = [*tensors, *kept]
    return output, _register(context, state, tensors, reached)


def _note_late_output(state: ShardState, late: str) -> None:
    """Keep the values that what a forward has returned may read. [Note: Late outputs]"""
    if late:
        serve_graphs(state)
    if late != state.inspection.late_output:
        state.inspection.set_late_output(late)
        for handle in state.needed_handles:
            for label in handle.labels():
                label.set_late_output(late)


def _find_kept(
    state: ShardState,
    module: nn.Module,
    extents: list[tuple[int, int]],
    num_nodes: int,
    *,
    is_looked_at: bool,
) -> list[Tensor]:
    """Return the tensors that the call has left on modules, such as an auxiliary loss.

    If the number of nodes is new, the next backward overwrites no values, [Note: Aliases].
    """
    found = list(kept_tensors(module))
    kept = [tensor for tensor in found if not _is_older(tensor, state.last_call.sequence_nr)]
    known = state.inspection
    if num_nodes in known.keeps:
        return kept
    if extents and not state.is_held:
        params = {
            id(param) for handle in state.needed_handles for param in handle.full.params.built
        }
        views = [each for each in found if id(each) not in params and _is_within(extents, each)]
        refuse_views(state.name, views)
    for handle in state.needed_handles:
        handle.full.readers.add(LATE_GRAPH)
    # Kept values get no hooks that look at them: no gradient ever takes their place.
    is_looked_at = is_looked_at or not frees_values(state.needed_handles)
    known.note(num_nodes, keeps=bool(kept), is_looked_at=is_looked_at)
    return kept


def _register(
    context: TreeContext,
    state: ShardState,
    tensors: Sequence[Tensor],
    hook: CallReached | None,
) -> bool:
    """Put a hook on outputs of the unit; return whether a backward may reach any of them."""
    if hook is None:
        last = UnitCall(state.last_call.number, end=context.graphs.num_calls)
        hook = CallReached(state, last, None)
    own = state.last_call
    hook.runs_alone = own.number + 1 == context.graphs.num_calls and own.region is None
    is_armed = False
    for tensor in tensors:
        if tensor.requires_grad and (node := tensor.grad_fn) is not None:
            node.register_prehook(hook)
            base = base_of(tensor)
            start = state.last_call.sequence_nr
            if base is not None and not _is_older(base, start) and base.grad_fn:
                # An in-place operation on a view gives the view a new node, fed by its base's.
                base.grad_fn.register_prehook(hook)
            is_armed = True
    if is_armed:
        context.graphs.armed.pop(state.ref, None)
        context.graphs.armed[state.ref] = None
    return is_armed


def _is_older(tensor: Tensor, sequence_nr: int) -> bool:
    """Return whether a tensor's node is older than this number.

    Leaves that need a gradient are, except for sharded parameters, which no backward may reach.
    """
    node = tensor.grad_fn
    if node is None:
        return tensor.requires_grad and not isinstance(tensor, FlatShard)
    return sequence_nr_of(node) < sequence_nr


def _renew_older(newest: int, tensor: Tensor) -> Tensor:
    """Give an older tensor a new node; in place if possible, so that `detach_()` works on it."""
    if not _is_older(tensor, newest):
        return tensor
    # On leaves, views and subclasses an in-place op has further effects, or is refused.
    if type(tensor) is not Tensor or tensor.grad_fn is None or base_of(tensor) is not None:
        return tensor.view_as(tensor)
    version = version_of(tensor)
    tensor.transpose_(0, 0)
    # No value was written, so tensors that autograd has saved stay valid.
    set_versions((tensor,), (version,))
    return tensor


def _is_within(extents: list[tuple[int, int]], tensor: Tensor) -> bool:
    try:  # inlined, to save a call for each output
        pointer = tensor.data_ptr()
    except RuntimeError:
        return False
    return any([start <= pointer < end for start, end in extents])


def _copy_alias(extents: list[tuple[int, int]], tensor: Tensor) -> Tensor:
    return tensor.clone() if _is_within(extents, tensor) else tensor


def _tensors(output: Any) -> Sequence[Tensor]:
    """Return the tensors in an output; fast if it is a single tensor."""
    return (output,) if isinstance(output, Tensor) else list(iter_tensors(output))
