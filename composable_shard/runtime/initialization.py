"""Lazy initialization: buffers and hooks of handles, and when the ranks are compared."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import partial

import torch.distributed as dist
from torch import nn

from composable_shard.comm import exchange_always
from composable_shard.flat_param import balance_owners, drop_gradient, has_gradient_hooks
from composable_shard.options import UnitSettings
from composable_shard.runtime.aborted import next_backward_id
from composable_shard.runtime.backward import on_gradient
from composable_shard.runtime.bucket_windows import Buckets
from composable_shard.runtime.comparison import check_agreement
from composable_shard.runtime.contents import note_contents
from composable_shard.runtime.early_hooks import EarlyHooks
from composable_shard.runtime.gathers import Gathers
from composable_shard.runtime.gradient_hooks import GradientHooks, note_hook
from composable_shard.runtime.launched_gathers import LaunchedGathers, LaunchedKeptGathers
from composable_shard.runtime.launched_reductions import LaunchedBatches, LaunchedReductions
from composable_shard.runtime.membership import has_other_units, renew_context, share_context
from composable_shard.runtime.meta_buffers import check_buffers, place_buffers
from composable_shard.runtime.open_graphs import alive
from composable_shard.runtime.postponed import Postponed, keep_gradients
from composable_shard.runtime.reduction_order import AgreedOrder
from composable_shard.runtime.reduction_queue import Order, ReductionQueue
from composable_shard.runtime.tree import find_reader, get_states, read_state
from composable_shard.runtime.unit import ShardState, TreeContext
from composable_shard.runtime.whole_model import find_unmanaged, raise_unmanaged
from composable_shard.torch_private import groups_calls, modules_in


def attach_or_refresh(state: ShardState) -> None:
    """Give a unit's handles buffers and hooks, and adopt changes of their sharded parameters.

    Local and idempotent: touches no tensor if nothing has changed.
    """
    for handle in state.handles:
        if not handle.is_attached:
            handle.guard.let_find_reader(partial(find_reader, weakref.ref(handle)))
            handle.guard.let_note_hooks(partial(note_hook, state.ref))
            keep = partial(keep_gradients, state.ref)
            handle.attach(partial(on_gradient, state.ref), drop_gradient, keep)
        handle.adopt_changes()
    for handle in state.borrowed:
        handle.adopt_changes()


def lazy_init(module: nn.Module) -> None:
    """Do now what otherwise happens at the first forward of `module`.

    Allocates buffers, adopts parameters that `.to()` or `to_empty()` gave new data, and checks that
    all ranks shard the same model in the same way. The first call issues one small all-gather for
    each process group, and a broadcast of each shard to the ranks that hold copies of it, so that
    replicas start equal. A second call touches no tensor.

    Raises:
        ValueError: If no module in `module` was sharded.
        RuntimeError: If the ranks disagree, parameters are still on the meta device, no unit
            manages a trainable parameter of `module` that is not in any unit's `ignored_params`,
            or buffers have not been initialised after `to_empty()`.
    """
    initialize(module)


def initialize(module: nn.Module, callers: Sequence[nn.Module] = ()) -> None:
    """Do what `lazy_init` does, for a call of `module` inside calls of `callers`."""
    lazy_init_params(module, callers, has_values=True)
    contexts = [state.context for state in get_states(module) if state.context is not None]
    unchecked = list(dict.fromkeys(context for context in contexts if not context.is_checked))
    if unchecked:
        modules = [*callers, *_outermost(unchecked, module)]
        check_buffers(modules)
        if unmanaged := find_unmanaged(modules):  # a scope may have compared the ranks before
            raise_unmanaged(unmanaged, get_states(module))
        for context in unchecked:
            _place_buffers(context)
            context.graphs.last_backward_id = next_backward_id()
            _watch(context, [*callers, module][0])
            context.is_checked = True  # last: an interrupt before leaves all to the next call


def _watch(context: TreeContext, outermost: nn.Module) -> None:
    """Note what is in a tree, and what is in an unsharded module around it."""
    modules = alive(context.modules)
    around = modules if read_state(outermost) is not None else [outermost]
    context.callers = dict.fromkeys(map(weakref.ref, around))
    for module in dict.fromkeys([*modules, *around]):
        note_contents(module)


def lazy_init_params(
    module: nn.Module, callers: Sequence[nn.Module] = (), *, has_values: bool = False
) -> None:
    """Do what `lazy_init` does, except for buffers, which a scope may be about to initialise.

    Args:
        module: As for `lazy_init`.
        callers: Modules around it whose calls are running, outermost first.
        has_values: Whether all parameters have their values; a scope may be about to shard some.

    Raises:
        ValueError: If no module in `module` was sharded.
        RuntimeError: If the ranks disagree, parameters are still on the meta device, or with
            `has_values` no unit manages a trainable parameter, see [Note: Whole model].
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
    for context in contexts:
        is_idle = context.call is None and context.backward is None
        if is_idle and not context.has_agreed and has_other_units(context):
            renew_context(context)
    contexts = list(dict.fromkeys(state.context for state in states if state.context))
    _fix_owners([context for context in contexts if not context.has_agreed])
    # Whole trees: a unit may borrow parameters of one that is not in `module`.
    for state in [state for context in contexts for state in context.live_states()]:
        attach_or_refresh(state)
    unchecked = [context for context in contexts if not context.has_agreed]
    if unchecked:
        _check_trees(unchecked, [*callers, *_outermost(unchecked, module)], has_values)


def _fix_owners(contexts: list[TreeContext]) -> None:
    """Fix the owner of each whole parameter, see [Note: Owners of whole parameters]."""
    states = [state for context in contexts for state in context.live_states()]
    handles = [handle for state in states for handle in state.handles]
    if not all(handle.has_fixed_owners for handle in handles):
        # The ranks compare everything soon, which finds a rank with a different plan.
        if any(handle.layout.owners for handle in handles):
            balance_owners(handles, always_compare=False)
        for handle in handles:
            handle.fix_owners()


def _outermost(contexts: list[TreeContext], module: nn.Module) -> list[nn.Module]:
    # Outermost modules first, for the longest names.
    return [*dict.fromkeys([root for each in contexts for root in alive(each.modules)] + [module])]


def _check_trees(contexts: list[TreeContext], modules: list[nn.Module], has_values: bool) -> None:
    """Check whole trees, and all of `modules`, whichever was called first."""
    for context in contexts:
        for state in context.live_states():
            for handle in state.handles:
                handle.check_ready()
                handle.shown.check_registered()
    unmanaged = find_unmanaged(modules) if has_values else []  # a scope shows sharded ones only
    for context in contexts:
        check_agreement(context.live_states(), unmanaged)
        # Ranks that initialised copies of a shard differently would train different models.
        for state in context.live_states():
            for handle in state.handles:
                handle.shard.copy_to_replicas()
    for context in contexts:
        exchange_always(_always_checked(context.live_states()))
        for handle in context.live_handles():
            handle.shown.remember_agreed_flags()
            handle.guard.pop_writes()  # ranks may have initialised by themselves
        _choose_ways(context)
        context.has_agreed = True  # last: an interrupt before leaves all to the next call


def _choose_ways(context: TreeContext) -> None:
    """Choose how a tree gathers and reduces, by what the backends of its groups can do."""
    handles = context.live_handles()
    for state in context.live_states():
        state.choose_orders(_find_orders)
        if any(has_gradient_hooks(handle.shown) for handle in state.handles):
            state.add_order(GradientHooks)
    context.keeps_gradients = any(handle.grads.is_persistent for handle in handles)
    context.kept.clear()
    groups = {group for handle in handles for group in handle.shard_group.groups}
    several = [group for group in groups if group.size() > 1]
    if not (several and all(groups_calls(group, context.device) for group in several)):
        context.gathers, context.make_queue = Gathers(), ReductionQueue
    elif not context.keeps_gradients:
        context.gathers, context.make_queue = LaunchedGathers(), LaunchedReductions
    else:
        context.gathers, context.make_queue = LaunchedKeptGathers(), LaunchedBatches


def _find_orders(state: ShardState, settings: UnitSettings) -> Iterator[type[Order]]:
    """Yield the orders of reductions that a unit with these settings needs, besides the default."""
    if state.options.bucket_cap_mb is not None:
        yield Buckets
    if any(handle.shown.has_early_hooks for handle in state.handles):
        yield EarlyHooks
    if any(handle.grads.is_persistent for handle in state.handles):
        yield AgreedOrder
    grads = [handle.grads for handle in state.handles]
    if not settings.reduces_fully or any(g.marks or g.waits_for_reduction for g in grads):
        yield Postponed


def _always_checked(states: list[ShardState]) -> list[dist.ProcessGroup]:
    """Return the groups of units with `check_order="always"`."""
    checked = [state for state in states if state.options.check_order == "always"]
    groups = [handle.shard_group for state in checked for handle in state.handles]
    return [each for one in groups for each in (*one.groups, *one.joint_groups)]


def _place_buffers(context: TreeContext) -> None:
    """Move buffers to the device: `to_empty(device="cpu")` for offloaded shards moved them too."""
    handles = [handle for state in context.live_states() for handle in state.handles]
    if any(handle.memory.offload.is_active for handle in handles):
        for root in alive(context.modules):
            for module in modules_in(root):
                place_buffers(module, handles[0].shard_group.device)
