"""Carries out a plan: handles of groups of parameters, and the state of a unit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from composable_shard.comm import ShardGroup, compare_units
from composable_shard.construct.buffers import prepare_buffers
from composable_shard.construct.grouping import Group, group_params, lay_out
from composable_shard.construct.originals import Borrowed, Original, Plan
from composable_shard.construct.plan import buffers_to_sync
from composable_shard.flat_param import (
    FlatParamHandle,
    MemoryPlan,
    ModuleItems,
    ParamEntry,
    Slot,
    dense_stride,
    give_back,
)
from composable_shard.options import UnitOptions
from composable_shard.runtime import ShardState
from composable_shard.tensor import FlatShard, ParamLabel, ShardSpec

Built = list[tuple[list[Original], FlatParamHandle]]


def sync_states(plan: Plan, built: Built, shard_group: ShardGroup, undo: ExitStack) -> None:
    """Broadcast the parameters and buffers of the mesh's first rank, one by one.

    Shards get the parameters' values; the original parameters keep their own, because a later
    step may fail. Before that, one all-gather of 32 bytes for each process group compares the
    tensors to send.

    Args:
        undo: Gets a function for each buffer, which writes its old values into it.
    """
    lines = [
        f"'{original.fqn}' shape {tuple(original.param.shape)} {original.param.dtype} is broadcast"
        for original in plan.originals
    ]
    lines += [
        f"a buffer of shape {tuple(tensor.shape)} {tensor.dtype} is broadcast"
        for tensor in buffers_to_sync(plan)
    ]
    compare_units(shard_group.ranks, lines)
    entries = {
        id(original): entry
        for members, handle in built
        for original, entry in zip(members, handle.entries, strict=True)
    }
    for original in plan.originals:
        full = shard_group.ranks.copy_from_first(original.dense.clone())
        entries[id(original)].fill(full)
    for buffer in buffers_to_sync(plan):
        undo.callback(buffer.detach().copy_, buffer.detach().clone())
        shard_group.ranks.copy_from_first(buffer)


def build_handles(plan: Plan, shard_group: ShardGroup) -> Built:
    """Build the unit's handles, with this rank's part of the values; changes no module.

    All memory of the unit is allocated here.
    """
    return [
        (group[1], _build_handle(group, shard_group, plan.options))
        for group in group_params(plan, shard_group.size)
    ]


def build_state(
    plan: Plan, built: Built, shard_group: ShardGroup, undo: list[Callable[[], object]]
) -> ShardState:
    """Carry out the plan: put the FlatShards of the handles into the original parameters.

    Args:
        undo: Gets what restores the parameters. Attributes of the modules are the caller's.
    """
    form = plan.form
    for number, (_, handle) in enumerate(built):
        handle.shown.set_home(ModuleItems(plan.modules[0]), number)
        form.prepare(handle)
    # The entries get the users' objects before a form hides these. Places are indexed
    # before they are shown, and an inverse is registered before its change, [Note: Undo].
    replaced: list[_Replaced] = []
    hooks: list[RemovableHandle] = []
    undo += partial(_give_all_back, replaced), partial(_remove_all, hooks)
    with torch.enable_grad():  # for `_refuse_graphs_from_before`
        for members, handle in built:
            for original, entry in zip(members, handle.entries, strict=True):
                entry.add_slots(original.slots)
                _replace_parameter(original, entry, replaced, hooks)
            form.show(handle)
    for item in plan.borrowed:
        undo.append(partial(_show_in, item, item.entry.slots))
        item.entry.add_slots(item.slots)
        item.handle.shown.index_slots()
        item.handle.shown.show_again()
    for module in plan.unmanaged_modules:
        _keep_rnn_parameters(module, shard_group.device)
    state = ShardState(
        plan.options,
        plan.modules,
        [handle for _, handle in built],
        list(dict.fromkeys(item.handle for item in plan.borrowed)),
        before_forward=prepare_buffers(plan, shard_group),
        inside=(module for walk in plan.walks for _, module in walk),
    )
    state.leave_out(plan.ignored)
    return state


def _show_in(item: Borrowed, slots: tuple[Slot, ...]) -> None:
    """Let another unit's parameter be shown in its earlier places alone."""
    item.entry.set_slots(slots)
    item.handle.shown.index_slots()


def _keep_rnn_parameters(module: nn.Module, device: torch.device) -> None:
    if isinstance(module, nn.RNNBase) and device.type != "cpu":
        # cuDNN's flattening would move our views into a buffer of its own.
        module.flatten_parameters = _keep_parameters  # type: ignore[method-assign]


def _keep_parameters() -> None:
    """Stand in for `flatten_parameters` of an RNN whose weights live in a flat parameter."""


def _build_handle(group: Group, shard_group: ShardGroup, options: UnitOptions) -> FlatParamHandle:
    precision, members = group
    facts = options.strategy.facts
    dense = [original.dense for original in members]
    layout = lay_out(members, shard_group.size, precision)
    shapes: dict[Any, Any] = {}  # parameters of one shape share what says so
    strides: dict[Any, Any] = {}
    specs = [
        ShardSpec(
            shape=shapes.setdefault(size := original.shape, size),
            dense_shape=shapes.setdefault(size := tensor.shape, size),
            dense_stride=strides.setdefault(stride := dense_stride(tensor), stride),
            layout=layout,
            index=index,
            rank=shard_group.rank,
            group_name=shard_group.name,
            tensor_parallel=original.tensor_parallel,
            plain_gradients=part.gradient_placements if (part := original.plain_part) else None,
            label=ParamLabel(original.fqn),
            is_split=not facts.is_replicated,
        )
        for index, (original, tensor) in enumerate(zip(members, dense, strict=True))
    ]
    is_kept = facts.keeps_params(shard_group.size)
    handle = FlatParamHandle(
        dense,
        MemoryPlan(shard_group, precision, options.offload_policy, is_kept),
        layout,
        specs,
        [original.granularity for original in members],
        requires_grad=members[0].param.requires_grad,
        strategy=options.strategy,
    )
    # Where each rank holds everything, the first rank's values are taken.
    is_compared = options.check_initial_values and not options.sync_module_states
    if is_compared and handle.is_sharded and not handle.shard.values.is_meta:
        handle.initial.note(dense, [spec.label for spec in specs])
    return handle


# What undoes the replacement of a parameter: arguments of `give_back`
_Replaced = tuple[nn.Parameter, Tensor, Tensor | None, dict[str, Any]]


def _give_all_back(replaced: list[_Replaced]) -> None:
    """Undo replacements, the last one first, all of them even if some raise."""
    with ExitStack() as stack:
        for each in replaced:
            stack.callback(give_back, *each)


def _remove_all(hooks: list[RemovableHandle]) -> None:
    for handle in hooks:
        handle.remove()


def _replace_parameter(
    original: Original, entry: ParamEntry, replaced: list[_Replaced], hooks: list[RemovableHandle]
) -> None:
    """Turn the original Parameter object into the FlatShard; attributes and `.grad` carry over."""
    param, grad = original.param, original.param.grad
    replaced.append((param, entry.sharded, grad, vars(param).copy()))
    param.grad = None
    if param.requires_grad and not param.is_inference():  # no graph can have recorded those
        hooks.append(_refuse_graphs_from_before(param, entry.label))
    original.strip()
    entry.replace(param)
    if grad is not None and not entry.spec.is_owned_by_other_rank:
        param.grad = FlatShard.from_full(grad.to(param.device, param.dtype), entry.spec)


def _refuse_graphs_from_before(param: nn.Parameter, label: ParamLabel) -> RemovableHandle:
    # A graph from before keeps the node alive, and would accumulate an unused gradient.
    node: Any = param.view_as(param).grad_fn  # as `get_gradient_edge` does
    accumulate: Node = node.next_functions[0][0]
    return accumulate.register_prehook(partial(_refuse_backward, label))


def _refuse_backward(label: ParamLabel, _: object) -> NoReturn:
    raise RuntimeError(
        f"a backward reached parameter '{label}' through a graph that was recorded before "
        "fully_shard. Run its backward before fully_shard, or the forward again."
    )
