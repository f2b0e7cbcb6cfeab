"""`fully_shard`: shard a module in place. A plan becomes handles, a state and hooks."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_shard.comm import ShardGroup, compare_lines
from composable_shard.construct.plan import (
    FLAT_PARAM_NAME,
    Original,
    Plan,
    as_modules,
    plan_unit,
    states_to_sync,
)
from composable_shard.flat_param import (
    FlatParamHandle,
    FlatSlot,
    ParamEntry,
    Precision,
    dense_stride,
    make_flat_entry,
    plan_layout,
    settle_owners,
    show_flat,
)
from composable_shard.layout import FlatLayout, cut_buckets
from composable_shard.options import (
    DEFAULT_STRATEGY,
    CheckOrder,
    GranularityOption,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ReshardAfterForward,
    ShardingStrategy,
    StrategyName,
    UnitOptions,
    check_no_others,
    strategy_of,
)
from composable_shard.runtime import (
    Boundary,
    Buckets,
    BufferBroadcast,
    ShardState,
    TrainingState,
    apply_policy,
    attach_state,
    attach_unit,
    cast_arguments,
    cast_buffers,
    cast_output,
    find_small_group,
    get_handles,
    join_owners,
    part_joined_trees,
    place_buffers,
    post_forward,
    pre_forward,
    read_state,
    rename,
    share_context,
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
    sized = [original.sized for original in members]
    if members[0].is_owned:
        owners = [original.owner for original in members]
        return plan_layout(sized, shard_size, precision, owners=owners)
    if precision.extension is not None:  # [Note: Extended gathers]
        return FlatLayout.plan([sized[0].numel()], shard_size, members[0].block_numel)
    blocks = [original.block_numel for original in members]
    layout = plan_layout(sized, shard_size, precision, blocks=blocks)
    if layout.blocks:
        _warn_of_imbalance(members, layout)
    return layout


def _warn_of_imbalance(members: Sequence[Original], layout: FlatLayout) -> None:
    """Warn where the largest shard is well above the mean, and the difference counts."""
    mean = layout.span / layout.world_size
    nbytes = (layout.shard_numel - mean) * (members[0].nbytes / max(1, members[0].sized.numel()))
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
    known: dict[object, Group] = {}  # by what the kind follows from, which is quicker to compare
    for original in plan.originals:
        param, own = original.param, original.tensor_parallel
        given = (param.dtype, param.requires_grad, original.is_kept, original.is_owned)
        facts = (*given, own, original.extension)
        group = known.get(facts)
        if group is None:
            group = known[facts] = groups.setdefault(*_new_group(original, plan.options))
        group[1].append(original)
    return list(groups.values())


def _new_group(original: Original, options: UnitOptions) -> tuple[object, Group]:
    """Return what a handle's parameters have in common, and an empty group of them."""
    param, tensor_parallel = original.param, original.tensor_parallel
    mesh = None if tensor_parallel is None else tensor_parallel[0]
    placements = None if options.use_orig_params or mesh is None else tensor_parallel
    precision = Precision.of(options.mp_policy, param.dtype, is_kept=original.is_kept)
    if original.extension is not None:
        precision = replace(precision, extension=original.extension)
    main_dtype = precision.main_dtype or param.dtype
    is_owned = original.is_owned
    kind = (main_dtype, precision, param.requires_grad, mesh, placements, is_owned)
    return kind, (precision, [])


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

    One all-gather of 32 bytes for each process group compares before what will be sent.
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
    shapes: dict[Any, Any] = {}  # parameters of one shape share what says so
    strides: dict[Any, Any] = {}
    specs = [
        ShardSpec(
            shape=shapes.setdefault(size := original.param.shape, size),
            dense_shape=shapes.setdefault(size := tensor.shape, size),
            dense_stride=strides.setdefault(stride := dense_stride(tensor), stride),
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
    """Make the state dicts of a unit's modules right, [Note: State dicts]."""
    show, load = partial(show_shards, state), partial(load_values, state)
    for module in modules:
        attach_unit(module, state)
        module.register_state_dict_post_hook(show)
        module.register_load_state_dict_pre_hook(load)
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


_M = TypeVar("_M", bound=nn.Module | Iterable[nn.Module])
_NO_POLICY = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()


def fully_shard(  # noqa: PLR0913 -- one keyword-only option each, named as in FSDP2
    module: _M,
    *,
    mesh: DeviceMesh | None = None,
    strategy: ShardingStrategy | StrategyName = DEFAULT_STRATEGY,
    reshard_after_forward: ReshardAfterForward = None,
    shard_over_replicas: bool = False,
    mp_policy: MixedPrecisionPolicy = _NO_POLICY,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    use_orig_params: bool = True,
    sync_module_states: bool = False,
    check_initial_values: bool = True,
    check_for_nan_in_grad: bool = False,
    check_order: CheckOrder = "first",
    broadcast_buffers: bool = False,
    bucket_cap_mb: float | None = None,
    granularity: GranularityOption = "element",
    prefetch_nbytes: int = 4 << 20,
    **others: NoReturn,
) -> _M:
    """Shard the parameters of `module` over the ranks of `mesh`, in place.

    The parameters of `module` that no unit inside it manages form a new unit. Each rank keeps a
    shard of them, of their gradients and of their optimizer state, or more as the strategy says.
    The unit is all-gathered for its forward and backward, and its gradients are averaged over the
    ranks. Call it on inner modules first, on the outermost last:

        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)

    The module's class and FQNs and its Parameter objects stay the same, so an optimizer (without
    state) may be built before or after. A call that raises leaves the module as it was.

    Args:
        module: A module, or a list of modules that form one unit.
        mesh: 1-D mesh of the ranks that share the unit, or a 2-D mesh `(replicate, shard)`: copies
            along the first axis of what is sharded along the second. Default: all ranks share it.
        strategy: The parts that each rank keeps, as a member or its name: `"shard_optim"`. Units of
            one tree may have different ones.
        reshard_after_forward: For `FULL_SHARD`. True frees the full parameters between forward
            and backward. False keeps them, which saves the backward's all-gather. None keeps them
            only for the outermost unit of a call, whose backward begins at once. An integer n that
            divides the number of ranks keeps 1/n of each parameter, so that the backward
            all-gathers inside groups of n neighbouring ranks.
        shard_over_replicas: For a 2-D mesh. True shards over all its ranks and copies nothing. With
            `FULL_SHARD` and `reshard_after_forward=None` the ranks of the second axis keep all
            parameters together between forward and backward, so that the backward all-gathers only
            there: put near ranks on it. Not for `NO_SHARD`.
        mp_policy: Dtypes for compute, communication and the optimizer.
        offload_policy: The parts of the unit that live in host memory; the optimizer steps there.
        ignored_params: Parameters to leave alone: not sharded, not moved, not reduced.
        use_orig_params: True shows the original parameters at rest. False shows one 1-D parameter
            `_flat_param` for each handle instead (`_flat_param_1` and so on where a unit has
            several). An elementwise optimizer then steps the fewest tensors; build it after this
            call. Forwards and `unshard_params` show the originals. If some parameter of a handle
            got a gradient, those without one count as zero gradient. `register_orig_params` and
            `register_flat_param` change it later.
        sync_module_states: Broadcast parameters and buffers from the mesh's first rank.
        check_initial_values: Compare the parameters as this call finds them between the ranks, by
            checksums, when the ranks are compared: at `lazy_init` or the first forward. Different
            ones are an error. Left out where there is nothing to compare: after
            `sync_module_states`, on the meta device, under `NO_SHARD` (the first rank's are
            taken), and for units whose parameters were written since. It reads all parameters
            once: 60 ms for 110 M of them on one CPU core.
        check_for_nan_in_grad: Look for NaN and infinity in the gradients of each rank before they
            are averaged, which would hide where they are from, and raise the same error on all
            ranks: the rank and the first parameter of the backward. No gradient is published. To
            debug, as it costs one pass over the gradients, a wait for the device and an all-gather
            of 31 bytes for each backward.
        check_order: When ranks exchange what they are about to issue, before they issue it, so that
            different collectives are an error at once and not wrong values until the backward ends.
            `"first"`: in the first steps, and after something new in a step. `"always"`: to debug,
            as each collective of NCCL costs an all-reduce of 16 bytes and a wait for the device,
            and on gloo groups of more than eight ranks, where a difference of sizes aborts the
            process. Up to eight ranks on gloo do so in each message, whatever is chosen.
        broadcast_buffers: Before each forward give all ranks the buffers of the mesh's first rank,
            as DistributedDataParallel does, in one broadcast for the unit. Skipped while gradients
            accumulate without being reduced.
        bucket_cap_mb: Reduce gradients in buckets of at most this many MiB (2**20 bytes), a larger
            parameter alone. Each bucket is a handle of its own. The backward reduces it and frees
            its full parameters as soon as its gradients are complete, so that one call on a whole
            model overlaps reductions with the backward. Use it on a module that contains no other
            sharded module and does not run inside a checkpointed region. Otherwise buckets are
            reduced only when the unit's backward ends. None: one handle for each kind of
            parameters.
        granularity: How finely the unit's parameters are cut: `"element"` anywhere, `"row"` between
            rows, `Block(n)` between blocks of n elements, `"param"` not at all: one rank holds the
            whole parameter. Or a function of a parameter that returns one of these, the same on all
            ranks. Parameters of `"param"` have a handle of their own in their unit.
        prefetch_nbytes: While the unit computes, the next one is all-gathered, and with it the
            small units after that, as long as all of them have at most this many bytes in their
            compute dtype. 0: one unit at a time. Overridden by `set_forward_prefetch` and
            `set_backward_prefetch`.
        others: None. Arguments of other libraries are refused by name, with what to pass instead.

    Returns:
        `module`.

    Raises:
        ValueError: If the module or a parameter can't be sharded, naming it; if called twice.
        TypeError: For an argument that it does not have.
        RuntimeError: If a parameter belongs to a live autograd graph, or torch.distributed is
            not initialised, in one of several processes that torchrun has not launched. A single
            process gets a process group of its own.
        NotImplementedError: For sparse or unknown tensor types.
    """
    if others:
        check_no_others(fully_shard, others)
    options = UnitOptions(
        mesh=mesh,
        strategy=strategy_of(strategy),
        reshard_after_forward=reshard_after_forward,
        shard_over_replicas=shard_over_replicas,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        ignored_params=ignored_params,
        use_orig_params=use_orig_params,
        sync_module_states=sync_module_states,
        check_initial_values=check_initial_values,
        check_for_nan_in_grad=check_for_nan_in_grad,
        check_order=check_order,
        broadcast_buffers=broadcast_buffers,
        bucket_cap_mb=bucket_cap_mb,
        granularity=granularity,
        prefetch_nbytes=prefetch_nbytes,
    )
    form_unit(as_modules(module), options)
    return module


def form_unit(
    modules: list[nn.Module],
    options: UnitOptions,
    owners: Mapping[nn.Parameter, int] | None = None,
) -> None:
    """Do what `fully_shard` does.

    `owners` are the ranks that get the parameters that are owned whole. Default: they are planned
    together with those of all units inside, which may move. [Note: Owners]
    """
    shard_group = find_shard_group(options)
    plan = plan_unit(modules, options, shard_group.size, shard_group)
    find_small_group(shard_group, plan.reshard_after_forward)  # the last thing that may fail
    if options.sync_module_states:
        sync_states(plan, shard_group)
    _set_owners(plan, modules, shard_group, owners)
    state = build_state(plan, shard_group)
    apply_policy(state, plan.reshard_after_forward)
    register_boundaries(plan.kept_modules)
    for root in modules:
        attach_state(root, state)
        register_hooks(root, state)
    register_state_dict_hooks(modules, plan.unmanaged_modules, state)
    for root in modules:
        rename(root)
    part_joined_trees(state)
    join_owners(share_context(modules), [item.handle for item in plan.borrowed])


def find_shard_group(options: UnitOptions) -> ShardGroup:
    """Return the ranks that share a unit with these options."""
    return ShardGroup.from_mesh(
        options.mesh,
        is_replicated=options.strategy.facts.is_replicated,
        spans_replicas=options.shard_over_replicas,
    )


def _set_owners(
    plan: Plan,
    modules: Sequence[nn.Module],
    shard_group: ShardGroup,
    owners: Mapping[nn.Parameter, int] | None,
) -> None:
    """Enter into the plan who gets parameters whole."""
    whole = [original for original in plan.originals if original.is_owned]
    if owners is None:
        inner = list(dict.fromkeys(each for root in modules for each in get_handles(root)))
        if not whole and not any(handle.layout.owners for handle in inner):
            return
        sizes = [original.nbytes for original in whole]
        found = settle_owners(inner, shard_group, sizes)
    else:
        found = [owners[original.param] for original in whole]
    for original, owner in zip(whole, found, strict=True):
        original.give_to(owner)


fully_shard.state = read_state  # type: ignore[attr-defined]
