"""Turn a plan into handles, a state and hooks."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from composable_shard.comm import ShardGroup, compare_lines
from composable_shard.construct.plan import FLAT_PARAM_NAME, Original, Plan, states_to_sync
from composable_shard.flat_param import (
    FlatParamHandle,
    FlatSlot,
    ParamEntry,
    Precision,
    dense_stride,
    make_flat_entry,
    plan_layout,
    show_flat,
)
from composable_shard.layout import FlatLayout, cut_buckets
from composable_shard.options import UnitOptions
from composable_shard.runtime import (
    Boundary,
    Buckets,
    BufferBroadcast,
    ShardState,
    TrainingState,
    attach_unit,
    cast_arguments,
    cast_buffers,
    cast_output,
    place_buffers,
    post_forward,
    pre_forward,
    read_state,
    watch_meta_buffers,
)
from composable_shard.state_dict import (
    adopt_new_data,
    check_torch_call,
    load_values,
    show_shards,
    show_whole_values,
)
from composable_shard.tensor import FlatShard, ParamLabel, ShardSpec
from composable_shard.torch_private import never_compile, set_state_dict_guard

Group = tuple[Precision, list[Original]]
_MIB = 1 << 20
_MAX_IMBALANCE = 1.25  # the largest shard of a unit and the mean


def group_params(plan: Plan, *, shard_size: int, is_alone: bool) -> list[Group]:
    """Return the original parameters of each handle that the unit will have, and its dtypes.

    Args:
        plan: The unit's; the owners of its parameters are known.
        shard_size: The ranks that share a flat parameter.
        is_alone: No other rank has gradients: nothing is reduced, so there are no buckets.
    """
    groups, cap_mb = _by_kind(plan), plan.options.bucket_cap_mb
    if cap_mb is None or is_alone:
        return _sort_by_owner(groups)
    cap_nbytes = int(cap_mb * _MIB)
    buckets = [
        (precision, [members[index] for index in bucket])
        for precision, members in groups
        for bucket in _cut(precision, members, cap_nbytes, shard_size)
    ]
    # [Note: Buckets] The order of reductions, across kinds.
    position = {id(original): index for index, original in enumerate(plan.originals)}
    in_order = sorted(buckets, key=lambda bucket: -position[id(bucket[1][-1])])
    return _sort_by_owner(in_order)


def lay_out(members: Sequence[Original], shard_size: int, precision: Precision) -> FlatLayout:
    """Lay out the parameters of one handle as their granularities ask for.

    Warns where blocks are so large that a rank gets much more than the mean.
    """
    dense = [original.dense for original in members]
    if members[0].is_owned:
        owners = [original.owner for original in members]
        return plan_layout(dense, shard_size, precision, owners=owners)
    if precision.extension is not None:  # [Note: Extended gathers]
        return FlatLayout.plan([dense[0].numel()], shard_size, members[0].block_numel)
    blocks = [original.block_numel for original in members]
    layout = plan_layout(dense, shard_size, precision, blocks=blocks)
    if layout.blocks:
        _warn_of_imbalance(members, layout)
    return layout


def _warn_of_imbalance(members: Sequence[Original], layout: FlatLayout) -> None:
    """Warn where the largest shard is well above the mean, and the difference counts."""
    mean = layout.span / layout.world_size
    nbytes = (layout.shard_numel - mean) * (members[0].nbytes / max(1, members[0].dense.numel()))
    if layout.shard_numel <= _MAX_IMBALANCE * mean or nbytes < _MIB:
        return
    # As many as explain it: a cut is off by half of a block.
    coarse = [each for each in members if each.block_numel > (_MAX_IMBALANCE - 1) * mean]
    names = ", ".join(f"'{each.fqn}' ({each.block_numel})" for each in coarse)
    warnings.warn(
        f"one of {layout.world_size} ranks holds {layout.shard_numel / mean:.2f} times the mean of "
        f"a unit's shards, {mean:.0f} elements, because these parameters are cut in blocks of as "
        f"many elements: {names}. Pass a finer granularity for them, make the unit larger, or use "
        'granularity="param", which balances over all units.',
        stacklevel=2,
    )


def _by_kind(plan: Plan) -> list[Group]:
    groups: dict[object, Group] = {}
    for original in plan.originals:
        param, tensor_parallel = original.param, original.tensor_parallel
        mesh = None if tensor_parallel is None else tensor_parallel[0]
        placements = None if plan.options.use_orig_params or mesh is None else tensor_parallel
        precision = Precision.of(plan.options.mp_policy, param.dtype, is_kept=original.is_kept)
        if original.extension is not None:
            precision = replace(precision, extension=original.extension)
        main_dtype = precision.main_dtype or param.dtype
        is_owned = original.is_owned
        kind = (main_dtype, precision, param.requires_grad, mesh, placements, is_owned)
        groups.setdefault(kind, (precision, []))[1].append(original)
    return list(groups.values())


def _sort_by_owner(groups: list[Group]) -> list[Group]:
    """Bring parameters that are owned whole into the order that `FlatLayout` wants."""
    for _, members in groups:
        if members[0].is_owned:
            members.sort(key=lambda original: original.owner)
    return groups


def _cut(
    precision: Precision, members: list[Original], cap_nbytes: int, shard_size: int
) -> list[range]:
    dense = [original.dense for original in members]
    if not members[0].param.requires_grad:
        return [range(len(members))]  # nothing to reduce
    reduce_dtype = precision.reduces_in(precision.main_dtype or dense[0].dtype)
    alignment = plan_layout(dense, shard_size, precision).alignment
    numels = [tensor.numel() for tensor in dense]
    # Parameters that are owned whole need no padding.
    blocks = () if members[0].is_owned else [original.block_numel for original in members]
    cap_numel = cap_nbytes // reduce_dtype.itemsize
    return cut_buckets(numels, cap_numel, shard_size, alignment, blocks=blocks)


def sync_states(plan: Plan, shard_group: ShardGroup) -> None:
    """Give every rank the parameters and buffers of the mesh's first: a broadcast for each.

    One all-gather of 32 bytes for each process group compares what will be sent.

    Raises:
        RuntimeError: If the ranks would send other tensors, naming the first; nothing was sent.
    """
    lines = [
        f"'{original.fqn}' shape {tuple(original.param.shape)} {original.param.dtype} is broadcast"
        for original in plan.originals
    ]
    lines += [
        f"a buffer of shape {tuple(tensor.shape)} {tensor.dtype} is broadcast"
        for tensor in states_to_sync(plan)[len(lines) :]
    ]
    compare_lines(shard_group.ranks, lines)
    for tensor in states_to_sync(plan):
        shard_group.ranks.copy_from_first(tensor)


def build_state(plan: Plan, shard_group: ShardGroup) -> ShardState:
    """Carry out the plan: build handles, and put FlatShards into the original parameters.

    All memory is allocated before the first parameter is changed.

    Raises:
        RuntimeError: If the parameters of a handle can't be one, and `use_orig_params` is False.
    """
    options = plan.options
    is_alone = shard_group.num_ranks == 1
    groups = group_params(plan, shard_size=shard_group.size, is_alone=is_alone)
    built = [
        (members, _build_handle(members, shard_group, precision, options))
        for precision, members in groups
    ]
    for number, (_, handle) in enumerate(built):
        suffix = f"_{number}" if number else ""
        handle.shown.set_flat_slot(FlatSlot(plan.modules[0], f"{FLAT_PARAM_NAME}{suffix}"))
        if not options.use_orig_params:
            make_flat_entry(handle)
    for members, handle in built:
        for original, entry in zip(members, handle.entries, strict=True):
            entry.add_slots(original.slots)
            original.strip()
            _replace_parameter(original.param, entry)
        if not options.use_orig_params:
            show_flat(handle)
    for item in plan.borrowed:
        item.entry.add_slots(item.slots)
        item.handle.shown.index_slots()
        item.handle.shown.show_again()
    buffer_dtype = options.mp_policy.buffer_dtype
    if buffer_dtype is not None:
        cast_buffers(plan.unmanaged_modules, plan.kept_modules, buffer_dtype)
    for module in plan.unmanaged_modules:
        watch_meta_buffers(module)
        place_buffers(module, shard_group.device)
        _keep_rnn_parameters(module, shard_group.device)
    has_buckets = options.bucket_cap_mb is not None and not is_alone
    buffers = None
    if options.broadcast_buffers:
        buffers = BufferBroadcast(plan.unmanaged_modules, shard_group)
    state = ShardState(
        options,
        plan.modules,
        [handle for _, handle in built],
        list(dict.fromkeys(item.handle for item in plan.borrowed)),
        buckets=Buckets() if has_buckets else None,
        buffers=buffers,
    )
    state.leave_out(plan.ignored)
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
    precision: Precision,
    options: UnitOptions,
) -> FlatParamHandle:
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
            label=ParamLabel(original.fqn),
        )
        for index, (original, tensor) in enumerate(zip(members, dense, strict=True))
    ]
    handle = FlatParamHandle(
        dense,
        shard_group,
        layout,
        specs,
        [original.granularity for original in members],
        requires_grad=members[0].param.requires_grad,
        strategy=options.strategy,
        precision=precision,
        offload=options.offload_policy,
    )
    handle.grads.reduction.check_finite(options.check_for_nan_in_grad)
    # Where each rank holds everything, the first rank's values are taken.
    is_compared = options.check_initial_values and not options.sync_module_states
    if is_compared and handle.is_sharded and not handle.local_shard.is_meta:
        handle.initial.note(dense, [spec.label for spec in specs])
    return handle


def _replace_parameter(param: nn.Parameter, entry: ParamEntry) -> None:
    """Turn the original Parameter object into the FlatShard; attributes and `.grad` carry over."""
    grad = param.grad
    param.grad = None
    entry.replace(param)
    if grad is not None and not entry.spec.is_owned_by_other_rank:
        param.grad = FlatShard.from_full(grad.to(param.device, param.dtype), entry.spec)


def _cast_arguments(
    state: ShardState, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    dtype = state.options.mp_policy.param_dtype
    if dtype is None:
        # main_dtype alone: the unit computes in the dtypes that it had before.
        dtypes = {
            handle.precision.computes_in(handle.local_shard.dtype)
            for handle in state.needed
            if handle.full.is_cast
        }
        dtype = dtypes.pop() if len(dtypes) == 1 else None
    if state.training_state is TrainingState.UNSHARDED_PARAMS:
        # unshard_params shows the main parameters.
        dtype = next((h.local_shard.dtype for h in state.needed if h.full.is_cast), dtype)
    return None if dtype is None else cast_arguments(args, kwargs, dtype)


def _cast_output(state: ShardState, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return cast_output(output, state.options.mp_policy.output_dtype)  # type: ignore[arg-type] # not None


# No hook becomes part of a compiled graph, and what it calls is not compiled either.
for _hook in (
    pre_forward,
    post_forward,
    _cast_arguments,
    _cast_output,
    Boundary.before,
    Boundary.after,
):
    never_compile(_hook)


def register_hooks(module: nn.Module, state: ShardState) -> None:
    """Make calls of `module` gather and free the unit, and cast."""
    policy = state.options.mp_policy
    is_kept = policy.changes_compute and isinstance(module, policy.keep_fp32_classes)
    if policy.cast_forward_inputs and policy.changes_compute and not is_kept:
        # Before the hook that gathers, so that it runs after it, and a unit whose arguments can't
        # be cast is known to be in its forward.
        hook = partial(_cast_arguments, state)
        module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    if policy.output_dtype is not None:
        module.register_forward_hook(partial(_cast_output, state))
    module.register_forward_pre_hook(partial(pre_forward, state), prepend=True)
    # always_call: the hook runs when the forward, or another hook, has raised.
    module.register_forward_hook(partial(post_forward, state), always_call=True)
    module.__dict__["extra_repr"] = _UnitPrinter(module, vars(module).get("extra_repr"))


class _UnitPrinter:
    """Stands in for a module's `extra_repr`: what it returns, and a line on the unit."""

    def __init__(self, module: nn.Module, own: Callable[[], str] | None) -> None:
        self._module, self._own = weakref.ref(module), own  # it holds this object

    def __call__(self) -> str:
        module: Any = self._module()
        if module is None:
            return ""  # of a shallow copy
        own = type(module).extra_repr(module) if self._own is None else self._own()
        return f"{own}\n{_unit_line(read_state(module))}".lstrip()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._module(), self._own)


def _unit_line(state: Any) -> str:
    # Without its name: ModuleList prints neighbours with the same text once.
    num_params = sum(len(handle.entries) for handle in state.handles)
    numel = sum(handle.layout.unpadded_numel for handle in state.handles)
    line = f"unit: {state.options.strategy.name}, {num_params} parameter{'s' * (num_params != 1)}"
    for group in [handle.shard_group for handle in state.handles][:1]:
        num_copies = group.num_ranks // group.size
        line += f", {numel:,} elements" + f" over {group.size} ranks" * (group.size > 1)
        line += f" in {num_copies} copies" * (num_copies > 1)
    return line


def register_state_dict_hooks(
    roots: list[nn.Module], modules: list[nn.Module], state: ShardState
) -> None:
    """Make the state dicts of a unit's modules right, [Note: State dicts].

    Args:
        roots: The modules that `fully_shard` was called on.
        modules: These and what is in the unit below them.
        state: The unit.
    """
    for module in modules:
        attach_unit(module, state)
        module.register_state_dict_post_hook(partial(show_shards, state))
        module.register_load_state_dict_pre_hook(partial(load_values, state))
    for module in roots:
        module.register_state_dict_pre_hook(partial(adopt_new_data, state))
        module.register_state_dict_post_hook(show_whole_values)
        set_state_dict_guard(module, partial(check_torch_call, state))


def register_boundaries(modules: list[nn.Module]) -> None:
    """Make calls of `modules` compute in the dtype of their main parameters."""
    for module in modules:
        boundary = Boundary()
        module.register_forward_pre_hook(boundary.before, prepend=True, with_kwargs=True)
        module.register_forward_hook(boundary.after)
