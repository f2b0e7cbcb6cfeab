"""What can only be done once a tree is complete: buffers, hooks, and a look at the other ranks."""

from __future__ import annotations

import warnings
from functools import partial

import torch
from torch import nn

from composable_shard.runtime.backward import on_gradient
from composable_shard.runtime.buffers import is_never_written, place_buffers
from composable_shard.runtime.ownership import check_agreement, copy_to_replicas, settle_owners
from composable_shard.runtime.state import ShardState, TreeContext
from composable_shard.runtime.traversal import get_states

__all__ = ["lazy_init", "lazy_init_params", "prepare", "share_context"]


def share_context(modules: list[nn.Module]) -> TreeContext:
    """Give all units in `modules`, the outermost ones known so far, one new context."""
    states = list(dict.fromkeys(state for module in modules for state in get_states(module)))
    handles = [handle for state in states for handle in state.handles]
    device = handles[0].shard_group.device if handles else torch.device("cpu")
    context = TreeContext(modules, states, device)
    for state in states:
        state.context = context
    return context


def prepare(state: ShardState) -> None:
    """Make the handles of one unit ready: buffers, hooks, and parameters changed from outside.

    Idempotent, and cheap when there is nothing to do: it touches no tensor then.
    """
    for handle in state.handles:
        if not handle.is_attached:
            handle.attach(partial(on_gradient, state.ref))
        handle.adopt_changes()
    for handle in state.borrowed:
        handle.adopt_changes()


def lazy_init(module: nn.Module) -> None:
    """Do now what otherwise happens at the first forward of `module`.

    Allocates buffers, takes over parameters that `.to()` or `to_empty()` gave new data, and
    compares with the other ranks that all shard the same model in the same way. A second call
    touches no tensor. The first time, one small all-gather for each process group, and a broadcast
    of each shard to the ranks that hold copies of it: replicas start equal.

    Raises:
        ValueError: If no module in `module` was sharded.
        RuntimeError: If the ranks disagree, parameters are still on the meta device, or buffers
            have not been initialised after `to_empty()`.
    """
    lazy_init_params(module)
    contexts = [state.context for state in get_states(module) if state.context is not None]
    unchecked = list(dict.fromkeys(context for context in contexts if not context.is_checked))
    if unchecked:
        _check_buffers(_outermost(unchecked, module))
        for context in unchecked:
            _place_buffers(context)
            context.is_checked = True


def lazy_init_params(module: nn.Module) -> None:
    """Do what `lazy_init` does, but let buffers be: a scope may be there to initialise them.

    Raises:
        ValueError: If no module in `module` was sharded.
        RuntimeError: If the ranks disagree, or parameters are still on the meta device.
    """
    states = get_states(module)
    if not states:
        raise ValueError(
            f"expected a module with sharded units, got {type(module).__name__}: "
            "call fully_shard on it or on modules inside it first"
        )
    if any(state.context is None for state in states):
        share_context([module])
    contexts = list(dict.fromkeys(state.context for state in states if state.context))
    _settle_owners([context for context in contexts if not context.has_agreed])
    # Whole trees: a unit may borrow parameters of one that is not in `module`.
    for state in [state for context in contexts for state in context.live_states()]:
        prepare(state)
    unchecked = [context for context in contexts if not context.has_agreed]
    if unchecked:
        _check_trees(unchecked, module)


def _settle_owners(contexts: list[TreeContext]) -> None:
    """Fix who owns parameters whole, see [Note: Owners]."""
    states = [state for context in contexts for state in context.live_states()]
    handles = [handle for state in states for handle in state.handles]
    if not all(handle.has_fixed_owners for handle in handles):
        # The ranks compare everything soon; a rank that has another plan meets them there.
        settle_owners(handles, always_compare=False)
        for handle in handles:
            handle.has_fixed_owners = True


def _outermost(contexts: list[TreeContext], module: nn.Module) -> list[nn.Module]:
    # Outermost modules first, for the longest names.
    return [root for context in contexts for root in context.live_modules()] + [module]


def _check_trees(contexts: list[TreeContext], module: nn.Module) -> None:
    """Check whole trees, whichever of their modules was called first."""
    states = get_states(module)
    for context in contexts:
        states += context.live_states()
        for state in context.live_states():
            for handle in state.handles:
                handle.check_materialized()
                handle.check_pinned()
                handle.check_registered()
    for context in contexts:
        check_agreement(context.live_states())
        copy_to_replicas(context.live_states())
    _warn_unmanaged(_outermost(contexts, module), states)
    for context in contexts:
        context.has_agreed = True


def _check_buffers(modules: list[nn.Module]) -> None:
    names = {
        id(buffer): name
        for module in reversed(modules)
        for name, buffer in module.named_buffers()
        if is_never_written(buffer)
    }
    if names:
        raise RuntimeError(
            f"buffers {list(names.values())} were never initialised after to_empty(): they hold "
            "arbitrary values. Compute them again (reset_parameters() or the code that made them) "
            "or load them."
        )


def _place_buffers(context: TreeContext) -> None:
    """Bring buffers to the device where `to_empty(device="cpu")`, for the shards, left them."""
    handles = [handle for state in context.live_states() for handle in state.handles]
    if any(handle.offload.is_active for handle in handles):
        for root in context.live_modules():
            for module in root.modules():
                place_buffers(module, handles[0].shard_group.device)


def _warn_unmanaged(modules: list[nn.Module], states: list[ShardState]) -> None:
    entries = [entry for state in states for handle in state.handles for entry in handle.entries]
    managed = {id(param) for entry in entries for param in (entry.sharded, entry.unsharded)}
    managed |= {
        id(handle.flat.sharded) for state in states for handle in state.handles if handle.flat
    }
    names = {
        id(param): name
        for module in reversed(modules)
        for name, param in module.named_parameters()
        if param.requires_grad and id(param) not in managed
    }
    if names:
        warnings.warn(
            f"no unit manages the trainable parameters {list(names.values())}: their gradients "
            "stay local to each rank. Shard the module that holds them, freeze them, or reduce "
            "them yourself.",
            stacklevel=2,
        )
