"""`fully_shard`: shard a module in place. A plan becomes handles, a state and hooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Never

from composable_shard.comm import ShardGroup
from composable_shard.construct.build import build_handles, build_state, sync_states
from composable_shard.construct.hooks import register_boundaries, register_hooks
from composable_shard.construct.originals import Plan
from composable_shard.construct.plan import as_modules, plan_unit, set_owners
from composable_shard.construct.state_dict_hooks import register_state_dict_hooks
from composable_shard.construct.undo import remember, run_backwards
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
    check_options,
    strategy_of,
)
from composable_shard.runtime import (
    ShardState,
    attach_state,
    join_owners,
    new_context,
    read_state,
    rename,
)

_M = TypeVar("_M", bound=nn.Module | Iterable[nn.Module])
_NO_POLICY = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()


def fully_shard(  # noqa: PLR0913 -- one keyword-only option each, named as in FSDP2
    module: _M,
    *,
    mesh: DeviceMesh | None = None,
    strategy: ShardingStrategy | StrategyName = DEFAULT_STRATEGY,
    reshard_after_forward: ReshardAfterForward = None,
    mp_policy: MixedPrecisionPolicy = _NO_POLICY,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    use_orig_params: bool = True,
    sync_module_states: bool = False,
    check_initial_values: bool = True,
    check_order: CheckOrder = "first",
    broadcast_buffers: bool = False,
    bucket_cap_mb: float | None = None,
    granularity: GranularityOption = "element",
    prefetch_nbytes: int = 4 << 20,
    separate_reduce_group: bool = False,
    **others: Never,
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
        mp_policy: Dtypes for compute, communication and the optimizer.
        offload_policy: The parts of the unit that live in host memory; the optimizer steps there.
        ignored_params: Parameters to leave alone: not sharded, not moved, not reduced.
        use_orig_params: True shows the original parameters at rest. False shows one 1-D parameter
            `_flat_param` for each handle instead (`_flat_param_1` and so on where a unit has
            several). An elementwise optimizer then steps the fewest tensors; build it after this
            call. Forwards and `unshard_params` show the originals. If some parameter of a handle
            got a gradient, the others count as zero gradient. `register_orig_params` and
            `register_flat_param` change it later.
        sync_module_states: Broadcast parameters and buffers from the mesh's first rank.
        check_initial_values: Compare the parameters as this call finds them between the ranks, by
            checksums, when the ranks are compared: at `lazy_init` or the first forward. A
            difference is an error. Skipped where there is nothing to compare: after
            `sync_module_states`, on the meta device, under `NO_SHARD` (the first rank's are taken),
            and for units whose parameters were written since. It reads all parameters
            once: 60 ms for 110 M of them on one CPU core.
        check_order: When ranks exchange which collectives they are about to issue, before they
            issue them, so that a difference is an error at once, and not wrong values until the
            backward ends. `"first"`: in the first steps, and after something new in a step.
            `"always"`: to debug, as each collective of NCCL costs an all-reduce of 16 bytes and a
            wait for the device. On gloo all collectives are exchanged, whatever is chosen.
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
            `set_backward_prefetch`. On NCCL, as many bytes of small units' gradients may wait to be
            reduced together, or be in flight.
        separate_reduce_group: For `FULL_SHARD`. True gives reductions a process group of their own,
            so that they run beside the backward's gathers; the collectives of one NCCL group run
            one after another. Use it where a layer's gather and reduction together take longer
            than its backward. All units over the same ranks share the group. It costs the memory of
            one more communicator: of NCCL's about 12 MB for each channel and peer, reported as 0.1
            to 1.6 GB (github.com/NVIDIA/nccl/issues/864 and 1685); `NCCL_MAX_NCHANNELS` limits it.
        others: Nothing; an option that it does not have is refused by name.

    Returns:
        `module`.

    Raises:
        ValueError: If the module or a parameter can't be sharded, naming it; if called twice.
        RuntimeError: If torch.distributed is not initialised, in one of several processes that
            torchrun has not launched and whose environment lacks `WORLD_SIZE`, `RANK`,
            `MASTER_ADDR` or `MASTER_PORT`: with these the process group is made. A single process
            gets one of its own. Later, in the backward of a graph that was recorded before the
            call.
        NotImplementedError: For sparse or unknown tensor types.
    """
    check_options("fully_shard", others, UnitOptions.names())
    options = UnitOptions(
        mesh=mesh,
        strategy=strategy_of(strategy),
        reshard_after_forward=reshard_after_forward,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        ignored_params=ignored_params,
        use_orig_params=use_orig_params,
        sync_module_states=sync_module_states,
        check_initial_values=check_initial_values,
        check_order=check_order,
        broadcast_buffers=broadcast_buffers,
        bucket_cap_mb=bucket_cap_mb,
        granularity=granularity,
        prefetch_nbytes=prefetch_nbytes,
        separate_reduce_group=separate_reduce_group,
    )
    form_unit(as_modules(module), options)
    return module


def form_unit(
    modules: list[nn.Module],
    options: UnitOptions,
    owners: Mapping[nn.Parameter, int] | None = None,
) -> None:
    """Do what `fully_shard` does.

    `owners` are the ranks that get the whole parameters. Default: they are planned together with
    the owners in all units inside, which may change. [Note: Owners of whole parameters]
    """
    shard_group = find_shard_group(options)
    plan = plan_unit(modules, options, shard_group.size, shard_group)
    plan.choose_policy(shard_group)
    if options.separate_reduce_group:
        shard_group = shard_group.with_reduce_group()
    # Tensors made inside inference mode, or kept from it, could not be trained or written.
    with ExitStack() as undo, torch.inference_mode(False):
        inside = (read_state(module) for walk in plan.walks for _, module in walk)
        inner = list(dict.fromkeys(state for state in inside if state is not None))
        handles = [handle for state in inner for handle in state.handles]
        set_owners(plan, handles, shard_group, owners, undo)
        _form(plan, inner, shard_group, undo)
        undo.pop_all()  # nothing has failed


def _form(
    plan: Plan, inner: Sequence[ShardState], shard_group: ShardGroup, undo: ExitStack
) -> None:
    """Carry out a plan around some units. [Note: Undo]"""
    modules = plan.modules
    built = build_handles(plan, shard_group)
    if plan.options.sync_module_states:
        sync_states(plan, built, shard_group, undo)
    owns = any(handle.has_owned for _, handle in built)
    steps = remember(plan, inner, owns=owns)
    undo.callback(run_backwards, steps)
    state = build_state(plan, built, shard_group, steps)
    plan.policy.apply(state)
    register_boundaries(plan.kept_modules)
    for root in modules:
        attach_state(root, state)
        register_hooks(root, state)
    register_state_dict_hooks(modules, plan.unmanaged_modules, state)
    for walk in plan.walks:
        rename(walk)
    context = new_context(modules, [state, *inner])
    join_owners(context, [item.handle for item in plan.borrowed])
    number = shard_group.next_unit_number()
    for handle in state.handles:
        handle.label.set_number(number)
    undo.callback(shard_group.count_unit, number - 1)
    shard_group.count_unit(number)  # last: a call that failed on some ranks is not counted


def find_shard_group(options: UnitOptions) -> ShardGroup:
    """Return the ranks that share a unit with these options."""
    is_replicated = options.strategy.facts.is_replicated
    if options.mesh is None:
        return ShardGroup.of_all_ranks(is_replicated=is_replicated)
    return ShardGroup.from_mesh(options.mesh, is_replicated=is_replicated)


fully_shard.state = read_state  # type: ignore[attr-defined]
