"""From a checked plan to handles and a state: allocate everything, then change."""

from __future__ import annotations

import torch
from torch import nn

from composable_shard import _collectives
from composable_shard._buckets import Buckets
from composable_shard._buffers import place_buffers, watch_meta_buffers
from composable_shard._casts import cast_buffers
from composable_shard._flat_mode import make_flat_entry, show_flat
from composable_shard._flat_param import FlatParamHandle, ParamEntry
from composable_shard._flat_shard import FlatShard
from composable_shard._grouping import group_params, lay_out
from composable_shard._mesh import ShardGroup
from composable_shard._plan import FLAT_PARAM_NAME, Original, Plan, states_to_sync
from composable_shard._precision import Precision
from composable_shard._shard_spec import ParamLabel, ShardSpec
from composable_shard._state import ShardState
from composable_shard._storage import FlatSlot, dense_stride, take_place
from composable_shard.api import ShardingStrategy

__all__ = ["build_state", "sync_states"]


def sync_states(plan: Plan, shard_group: ShardGroup) -> None:
    """Give every rank the parameters and buffers of the mesh's first: a broadcast for each."""
    for tensor in states_to_sync(plan):
        staged = tensor.to(shard_group.device).contiguous()
        for group in shard_group.joint_groups:
            _collectives.broadcast(staged, 0, group).wait()
        if staged.data_ptr() != tensor.data_ptr():
            tensor.copy_(staged)


def build_state(
    plan: Plan,
    shard_group: ShardGroup,
    name: str,
    *,
    strategy: ShardingStrategy,
    reshard_after_forward: bool | int | None,
    use_orig_params: bool,
) -> ShardState:
    """Carry out the plan: build handles, and put FlatShards into the original parameters.

    All memory is allocated before the first parameter is changed.

    Raises:
        RuntimeError: If the parameters of a handle can't be one, and `use_orig_params` is False.
    """
    state = ShardState(name, strategy, reshard_after_forward, len(plan.modules))
    state.use_orig_params = use_orig_params
    state.mp_policy = plan.policy
    state.offload_policy = plan.offload
    state.bucket_cap_mb = plan.bucket_cap_mb
    state.buffer_pool = plan.buffer_pool
    state.prefetch_nbytes = plan.prefetch_nbytes
    is_alone = shard_group.num_ranks == 1
    state.buckets = None if is_alone or plan.bucket_cap_mb is None else Buckets()
    groups = group_params(plan, use_orig_params, shard_size=shard_group.size, is_alone=is_alone)
    built = [
        (members, _build_handle(members, shard_group, strategy, precision, plan))
        for precision, members in groups
    ]
    for number, (_, handle) in enumerate(built):
        suffix = f"_{number}" if number else ""
        handle.flat_slot = FlatSlot(plan.modules[0], f"{FLAT_PARAM_NAME}{suffix}")
        if not use_orig_params:
            make_flat_entry(handle)
    for members, handle in built:
        for original, entry in zip(members, handle.entries, strict=True):
            entry.slots = original.slots
            _replace_parameter(original.param, entry)
        state.handles.append(handle)
        if not use_orig_params:
            show_flat(handle)
    state.borrowed = list(dict.fromkeys(item.handle for item in plan.borrowed))
    state.needed = state.handles + state.borrowed
    for item in plan.borrowed:
        item.entry.slots = item.entry.slots + item.slots
        item.handle.index_slots()
        item.handle.show_again()
    if plan.policy.buffer_dtype is not None:
        cast_buffers(plan.unmanaged_modules, plan.kept_modules, plan.policy.buffer_dtype)
    for module in plan.unmanaged_modules:
        watch_meta_buffers(module)
        place_buffers(module, shard_group.device)
        _keep_rnn_parameters(module, shard_group.device)
    return state


def _keep_rnn_parameters(module: nn.Module, device: torch.device) -> None:
    if isinstance(module, nn.RNNBase) and device.type != "cpu":
        # cuDNN's flattening would move our views into a buffer of its own.
        module.flatten_parameters = _keep_parameters  # type: ignore[method-assign]


def _keep_parameters() -> None:
    """Stand in for `flatten_parameters` of an RNN whose weights live in a flat parameter."""


def _build_handle(
    members: list[Original],
    shard_group: ShardGroup,
    strategy: ShardingStrategy,
    precision: Precision,
    plan: Plan,
) -> FlatParamHandle:
    labels = [ParamLabel(original.fqn) for original in members]
    dense = [original.dense for original in members]
    layout = lay_out(members, shard_group.size, precision)
    specs = [
        ShardSpec(
            shape=original.param.shape,
            dense_shape=tensor.shape,
            dense_stride=dense_stride(tensor),
            layout=layout,
            index=index,
            rank=shard_group.rank,
            group_name=shard_group.name,
            tensor_parallel=original.tensor_parallel,
            label=label,
        )
        for index, (original, tensor, label) in enumerate(zip(members, dense, labels, strict=True))
    ]
    return FlatParamHandle(
        dense,
        labels,
        shard_group,
        layout,
        specs,
        [original.granularity for original in members],
        requires_grad=members[0].param.requires_grad,
        strategy=strategy,
        precision=precision,
        offload=plan.offload,
        buffer_pool=plan.buffer_pool,
    )


def _replace_parameter(param: nn.Parameter, entry: ParamEntry) -> None:
    """Turn the original Parameter object into the FlatShard; attributes and `.grad` carry over."""
    grad = param.grad
    param.grad = None
    take_place(param, entry.sharded)
    entry.sharded = param  # type: ignore[assignment]
    if entry.shard_view is None or param.dtype != entry.shard_view.dtype:
        raise RuntimeError(
            f"parameter '{entry.label}' has {param.dtype} after it was sharded, not that of its "
            "shard; please report this"
        )
    if grad is not None and not entry.spec.is_elsewhere:
        param.grad = FlatShard.from_full(grad.to(param.device, param.dtype), entry.spec)
