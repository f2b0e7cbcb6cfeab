"""Give hooks of users the final gradients of a unit while the backward goes on.

[Note: Early gradients]
A hook that `register_post_accumulate_grad_hook` put on a sharded parameter may step an optimizer
and drop the gradient. For that to save memory it must run as soon as the unit is over. When the
reduction of a unit with such hooks is started, so is an exchange of a byte for each parameter, and
when the next unit's reduction has been started, all ranks publish the unit's gradients and run the
hooks: at the same point of the same order of collectives, for a hook may issue some itself. The
byte says whether a rank used the parameter, or that its gradient may not be final: autograd is
going to accumulate more, a forward still runs, or a nested backward may come. Then the unit's
gradients are published at the end of the backward as all others are.

Ranks may have hooks on different parameters. They agree on the units that have any when they
compare their models, at the first forward; hooks that are put on other units later run at the end
of the backward. An exception in a hook is raised at the end too: all ranks finish the backward, no
further hook runs, and all gradients are published.
"""

from __future__ import annotations

import torch
from torch.autograd.graph import get_gradient_edge

from composable_shard.comm import UseExchange, trace
from composable_shard.flat_param import FlatParamHandle
from composable_shard.runtime.state import ShardState, TreeContext

__all__ = [
    "check_not_delivered",
    "check_not_written",
    "collect",
    "deliver",
    "drop_early",
    "is_accumulating",
    "raise_hook_error",
    "run_hooks",
    "start_early",
]


_MAY_CHANGE = 2  # beside False: no rank used the parameter, and True


def start_early(context: TreeContext, state: ShardState, handle: FlatParamHandle) -> None:
    """Start the exchange for a handle that is over and whose gradients are packed, if it has hooks.

    One all-reduce of a byte for each parameter, and one more, for each process group.
    """
    if context.is_ending or state.defers_all_reduce(handle) or not state.is_last_backward:
        return
    statuses = _statuses(context, state, handle)
    # Whether this rank accumulates at all goes first.
    values = [(handle.shard_group, [int(context.accumulates), *statuses])]
    exchange = UseExchange(values, highest=_MAY_CHANGE)
    context.exchanges.append(exchange)
    context.early[handle] = exchange
    handle.early_age = 0


def is_accumulating(context: TreeContext, handle: FlatParamHandle) -> bool:
    """Return whether any rank accumulates gradients in this backward; waits where this has none."""
    exchange = context.early.get(handle)
    if not context.accumulates and exchange is not None:
        accumulates, *_ = exchange.finish()[0]
        context.accumulates = bool(accumulates)
        if not accumulates:
            del context.early[handle]
            context.exchanges.remove(exchange)
    return context.accumulates


def _statuses(context: TreeContext, state: ShardState, handle: FlatParamHandle) -> list[int]:
    may_change = (
        state.may_recompute
        or context.keeps_unsharded
        or handle.num_holders > 0
        or torch._C._current_graph_task_id() != context.graph_task_id
        or (handle.is_kept and not handle.is_cast and handle.has_hidden_alias)
    )
    if may_change:
        return [_MAY_CHANGE] * len(handle.entries)
    return [
        _MAY_CHANGE if _is_pending(handle, index) else int(is_used)
        for index, is_used in enumerate(handle.grad.used)
    ]


def _is_pending(handle: FlatParamHandle, index: int) -> bool:
    """Return whether this backward is going to accumulate a gradient that it has not yet."""
    param = handle.entries[index].unsharded
    if param is None or not param.requires_grad or index in handle.accumulated:
        return False
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(param).node)
    except RuntimeError:  # autograd.grad() with respect to the parameter
        return True


def collect(context: TreeContext) -> None:
    """Wait for reductions and exchanges that had a unit's compute to run beside.

    Those with two stages get two. [Note: Two stages]
    """
    for handle, exchange in list(context.early.items()):
        group = handle.shard_group
        handle.early_age += 1
        has_second_stage = group.size > 1 and bool(group.replicate_groups)
        if has_second_stage and handle.early_age == 1 and not context.is_ending:
            continue
        handle.finish_reduction()
        _, *statuses = exchange.finish()[0]
        del context.early[handle]
        context.exchanges.remove(exchange)
        if max(statuses) != _MAY_CHANGE:
            context.ready.append((handle, [bool(status) for status in statuses]))


def deliver(context: TreeContext) -> None:
    """Publish the gradients that are ready, and run their hooks."""
    ready, context.ready = context.ready, []
    for handle, used in ready:
        handle.publish_gradients(used)
        del context.reduced[handle]
        # It may be written from here on: this backward does not need it any more.
        handle.guard.is_in_backward = False
        context.delivered[handle] = handle.guard.num_writes
        run_hooks(context, handle)


def run_hooks(context: TreeContext, handle: FlatParamHandle) -> None:
    """Run the hooks of a handle's parameters, unless one has failed in this backward."""
    if context.hook_error is not None or handle.grad.is_partial:
        return
    if trace.logs:
        trace.record("gradient_hooks", handle.name)
    try:
        handle.run_gradient_hooks()
    except BaseException as error:
        # Raised at the end: the other ranks count on this one's collectives.
        context.hook_error = error


def raise_hook_error(context: TreeContext) -> None:
    """Raise what a hook raised in this backward, if one did."""
    error, context.hook_error = context.hook_error, None
    if error is not None:
        raise error


def check_not_delivered(context: TreeContext, handle: FlatParamHandle, index: int) -> None:
    """Check that no hook has seen less than the whole gradient.

    Raises:
        RuntimeError: If a gradient arrives after the hooks have run, which only a backward nested
            in this one can make.
    """
    if handle in context.delivered:
        raise RuntimeError(
            f"a gradient of parameter '{handle.entries[index].label}' came after the hooks on its "
            "unit (register_post_accumulate_grad_hook) had run. Pass use_reentrant=False to "
            "torch.utils.checkpoint, and run no backward inside a backward."
        )


def check_not_written(context: TreeContext, handles: list[FlatParamHandle]) -> None:
    """Check that what this backward computes again has the values of the forward.

    Raises:
        RuntimeError: If hooks have written parameters that are needed again.
    """
    for handle in handles:
        if context.delivered.get(handle, handle.guard.num_writes) != handle.guard.num_writes:
            raise RuntimeError(
                f"unit '{handle.name}' is computed again in a backward whose hooks "
                "(register_post_accumulate_grad_hook) have stepped its parameters. Checkpoint "
                "units one by one, or step the optimizer after backward() has returned."
            )


def drop_early(context: TreeContext) -> None:
    """Forget everything about a backward that has ended or was aborted."""
    for exchange in context.exchanges:
        exchange.abandon()
    context.exchanges, context.ready = [], []
    context.early, context.delivered = {}, {}
    context.is_ending = False
