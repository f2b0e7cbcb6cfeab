"""`fully_shard`: shard a module in place."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_shard.comm import ShardGroup
from composable_shard.construct.build import (
    build_state,
    register_boundaries,
    register_hooks,
    register_state_dict_hooks,
    sync_states,
)
from composable_shard.construct.plan import (
    Plan,
    apply_granularity,
    apply_precision,
    as_modules,
    check_can_be_flat,
    check_sync,
    plan_unit,
)
from composable_shard.layout import GranularityOption, check_option
from composable_shard.options import (
    PREFETCH_NBYTES,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from composable_shard.runtime import (
    BufferBroadcast,
    ShardState,
    apply_policy,
    attach_state,
    check_can_broadcast,
    check_policy,
    find_small_group,
    get_handles,
    read_state,
    rename,
    settle_owners,
    share_context,
)

__all__ = ["check_options", "check_unit", "choose_policy", "form_unit", "fully_shard"]


_M = TypeVar("_M", bound=nn.Module | Iterable[nn.Module])
_NO_POLICY = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()


def fully_shard(  # noqa: PLR0913 -- one keyword-only option each, named as in FSDP2
    module: _M,
    *,
    mesh: DeviceMesh | None = None,
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    reshard_after_forward: bool | int | None = None,
    shard_over_replicas: bool = False,
    mp_policy: MixedPrecisionPolicy = _NO_POLICY,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    use_orig_params: bool = True,
    sync_module_states: bool = False,
    broadcast_buffers: bool = False,
    bucket_cap_mb: float | None = None,
    granularity: GranularityOption = "element",
    prefetch_nbytes: int = PREFETCH_NBYTES,
) -> _M:
    """Shard the parameters of `module` over the ranks of `mesh`, in place.

    The parameters of `module` that no unit inside it manages form a new unit. From then on each
    rank holds one slice of them, of their gradients and of their optimizer state, or more of them
    as the strategy says. The unit is gathered for its forward and backward, and its gradients are
    averaged over the ranks. Call it on inner modules first, on the outermost last:

        for block in model.layers:
            fully_shard(block)
        fully_shard(model)

    The same object comes back, its class and FQNs are unchanged, and its Parameter objects stay
    the same objects, so an optimizer (without state) may be built before or after. A call that
    raises leaves the module as it was.

    Args:
        module: A module, or a list of modules that form one unit.
        mesh: 1-D mesh of the ranks that share the unit, or a 2-D one `(replicate, shard)`: copies
            along its first axis of what is shared along its second. Default: all ranks share it.
        strategy: What ranks keep; strategies of units in one tree may differ.
        reshard_after_forward: For `FULL_SHARD`. True frees the full parameters between forward
            and backward, False keeps them, None keeps them only for the outermost unit of a call,
            whose backward begins at once. A divisor of the number of ranks keeps a part of them:
            so many consecutive ranks hold them all, and the backward gathers from those.
        shard_over_replicas: For a 2-D mesh. True shares parameters, gradients and optimizer state
            over all its ranks, copies none, and uses the second axis for what is near: with
            `FULL_SHARD` and `reshard_after_forward=None` its ranks keep all parameters together
            between forward and backward. `NO_SHARD` can't be combined with it.
        mp_policy: In which dtypes the unit computes and communicates, and in which it is optimized.
        offload_policy: What of the unit lives in host memory; the optimizer then steps there.
        ignored_params: Parameters to leave alone: not sharded, not moved, not reduced.
        use_orig_params: True shows the original parameters at rest. False shows one 1-D parameter
            `_flat_param` for each handle instead (`_flat_param_1` and so on where a unit has
            several), the fewest tensors for an elementwise optimizer, which must then be built
            after this call; in forward, and inside `unshard_params`, the originals are shown. What
            got no gradient, where another parameter of its handle did, counts as zero gradient.
            `register_orig_params` and `register_flat_param` change it later.
        sync_module_states: Broadcast parameters and buffers from the mesh's first rank.
        broadcast_buffers: As in DistributedDataParallel: before a forward give all ranks the
            buffers of the mesh's first rank, in one broadcast for the unit; not while gradients
            accumulate without being reduced.
        bucket_cap_mb: The most MiB (2**20 bytes) of gradients that are reduced together; a larger
            parameter is alone. Each bucket is a handle of its own, reduced in the backward as soon
            as it is complete; its full parameters are then freed. So one call on a whole model
            overlaps reductions with the backward. Not before the end of the unit's backward,
            though, where that would not be safe on all ranks: if units run inside this one, or it
            runs in a checkpointed region. None: one handle for each kind of parameters.
        granularity: How finely the unit's parameters are cut: `"element"` anywhere, `"row"` between
            rows, `Block(n)` between blocks of n elements, `"param"` not at all: one rank holds the
            whole parameter. Or a function that returns one of these for a parameter, the same on
            all ranks. Parameters of `"param"` have a handle of their own in their unit.
        prefetch_nbytes: While the unit computes the next one is gathered; small ones that come
            after it are gathered along with it while all of them have at most so many bytes, in the
            dtype in which they compute. What is gathered ahead is thus the next unit, or so much.
            0: one unit at a time. `set_forward_prefetch` and `set_backward_prefetch` go before.

    Returns:
        `module`.

    Raises:
        ValueError: If the module or a parameter can't be sharded, naming it; if called twice.
        RuntimeError: If a parameter belongs to a live autograd graph, or torch.distributed is
            not initialised.
        NotImplementedError: For sparse or unknown tensor types.
    """
    options = {
        "mesh": mesh,
        "strategy": strategy,
        "reshard_after_forward": reshard_after_forward,
        "shard_over_replicas": shard_over_replicas,
        "mp_policy": mp_policy,
        "offload_policy": offload_policy,
        "ignored_params": ignored_params,
        "use_orig_params": use_orig_params,
        "sync_module_states": sync_module_states,
        "broadcast_buffers": broadcast_buffers,
        "bucket_cap_mb": bucket_cap_mb,
        "granularity": granularity,
        "prefetch_nbytes": prefetch_nbytes,
    }
    check_options(options)
    form_unit(as_modules(module), options)
    return module


def form_unit(
    modules: list[nn.Module],
    options: Mapping[str, Any],
    owners: Mapping[nn.Parameter, int] | None = None,
) -> None:
    """Do what `fully_shard` does, with options that have been checked.

    Args:
        modules: The modules of the unit.
        options: All options of `fully_shard`.
        owners: The ranks that get the parameters that are owned whole. Default: they are planned
            together with those of all units inside, which may move. [Note: Owners]
    """
    mesh, strategy = options["mesh"], options["strategy"]
    shard_over_replicas = options["shard_over_replicas"]
    shard_group = ShardGroup.from_mesh(
        mesh,
        is_replicated=strategy is ShardingStrategy.NO_SHARD,
        spans_replicas=shard_over_replicas,
    )
    plan = check_unit(modules, shard_group, options)
    policy = check_policy(choose_policy(options), shard_group.size)
    find_small_group(shard_group, policy)  # the last thing that may fail
    if options["sync_module_states"]:
        sync_states(plan, shard_group)
    _set_owners(plan, modules, shard_group, owners)
    name = type(modules[0]).__name__
    state = build_state(
        plan,
        shard_group,
        name,
        strategy=strategy,
        reshard_after_forward=policy,
        use_orig_params=options["use_orig_params"],
    )
    state.shard_over_replicas = shard_over_replicas
    if options["broadcast_buffers"]:
        state.buffers = BufferBroadcast(plan.unmanaged_modules, shard_group)
    apply_policy(state, policy)
    register_boundaries(plan.kept_modules)
    for root in modules:
        attach_state(root, state)
        register_hooks(root, state)
    register_state_dict_hooks(modules, plan.unmanaged_modules, state)
    for root in modules:
        rename(root)
    share_context(modules)


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
        sizes = [original.nbytes for original in whole]
        found = settle_owners(inner, shard_group, sizes)
    else:
        found = [owners[original.param] for original in whole]
    for original, owner in zip(whole, found, strict=True):
        original.owner = owner


def choose_policy(options: Mapping[str, Any]) -> bool | int | None:
    """Return `reshard_after_forward`, or what stands for None where replicas share the unit."""
    policy: bool | int | None = options["reshard_after_forward"]
    is_full_shard = options["strategy"] is ShardingStrategy.FULL_SHARD
    if options["shard_over_replicas"] and policy is None and is_full_shard:
        return int(options["mesh"].size(1))
    return policy


def check_options(options: Mapping[str, Any]) -> None:
    """Check the values of the options of `fully_shard`, all of them given by name.

    Raises:
        ValueError: For a value that no module could be sharded with.
    """
    mesh, strategy = options["mesh"], options["strategy"]
    if not isinstance(mesh, (DeviceMesh, type(None))):
        raise ValueError(f"expected mesh to be a DeviceMesh or None, got {mesh!r}")
    if not isinstance(strategy, ShardingStrategy):
        raise ValueError(f"expected strategy to be a ShardingStrategy, got {strategy!r}")
    reshard_after_forward = options["reshard_after_forward"]
    if not isinstance(reshard_after_forward, (int, type(None))):
        raise ValueError(
            "expected reshard_after_forward to be True, False, None or a number of ranks, "
            f"got {reshard_after_forward!r}"
        )
    if reshard_after_forward and strategy is not ShardingStrategy.FULL_SHARD:
        raise ValueError(
            f"expected reshard_after_forward to be None or False with {strategy}, which keeps "
            f"parameters unsharded, got {reshard_after_forward!r}. Use FULL_SHARD to free them."
        )
    _check_shard_over_replicas(options["shard_over_replicas"], mesh, strategy)
    if not isinstance(options["mp_policy"], MixedPrecisionPolicy):
        raise ValueError(
            f"expected mp_policy to be a MixedPrecisionPolicy, got {options['mp_policy']!r}"
        )
    if not isinstance(options["offload_policy"], OffloadPolicy):
        raise ValueError(
            f"expected offload_policy to be an OffloadPolicy, got {options['offload_policy']!r}"
        )
    _check_ignored(options["ignored_params"])
    _check_bucket_cap(options["bucket_cap_mb"])
    check_option(options["granularity"])
    _check_prefetch_nbytes(options["prefetch_nbytes"])
    for name in ("sync_module_states", "broadcast_buffers"):
        if not isinstance(options[name], bool):
            raise ValueError(f"expected {name} to be a bool, got {options[name]!r}")
    use_orig_params = options["use_orig_params"]
    if not isinstance(use_orig_params, bool):
        raise ValueError(f"expected use_orig_params to be True or False, got {use_orig_params!r}")


def _check_shard_over_replicas(
    value: object, mesh: DeviceMesh | None, strategy: ShardingStrategy
) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"expected shard_over_replicas to be True or False, got {value!r}")
    if value and (mesh is None or mesh.ndim != 2):
        got = "none" if mesh is None else f"{mesh.ndim} axes"
        raise ValueError(
            "expected a 2-D mesh (replicate, shard) with shard_over_replicas=True, got "
            f"{got}. Without replicas, reshard_after_forward=<number of ranks> is what it does."
        )
    if value and strategy is ShardingStrategy.NO_SHARD:
        raise ValueError(
            "shard_over_replicas=True shares a unit over all ranks, and NO_SHARD shares nothing. "
            "Use SHARD_OPTIM to share the optimizer state alone."
        )


def _check_ignored(ignored_params: object) -> None:
    # Not an iterator: a second unit would find it used up.
    if ignored_params is None:
        return
    if not isinstance(ignored_params, Collection):
        kind = type(ignored_params).__name__
        raise ValueError(f"expected ignored_params to be a set of parameters, got a {kind}")
    for param in ignored_params:
        if not isinstance(param, nn.Parameter):
            kind = type(param).__name__
            raise ValueError(f"expected ignored_params to hold parameters only, got a {kind}")


def _check_bucket_cap(cap: object) -> None:
    is_number = isinstance(cap, (int, float)) and not isinstance(cap, bool)
    if cap is not None and not (is_number and 0 < cap < math.inf):  # type: ignore[operator]
        raise ValueError(
            f"expected bucket_cap_mb to be None or a positive, finite number of MiB, got {cap!r}"
        )


def _check_prefetch_nbytes(nbytes: object) -> None:
    if not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes < 0:
        raise ValueError(
            f"expected prefetch_nbytes to be a number of bytes, 0 or more, got {nbytes!r}"
        )


def check_unit(
    modules: list[nn.Module],
    shard_group: ShardGroup | None,
    options: Mapping[str, Any],
    inner: Container[nn.Module] = (),
    managed: Container[nn.Parameter] = (),
) -> Plan:
    """Check all that `fully_shard` checks of its modules before it changes anything.

    Args:
        modules: The modules of the unit.
        shard_group: The ranks that will share it; None leaves the device type unchecked.
        options: All options of `fully_shard`, checked by `check_options`.
        inner: Modules to treat as if they were sharded already.
        managed: Parameters to treat as if those modules' units managed them already.

    Returns:
        What the call is going to change.

    Raises:
        ValueError, RuntimeError, NotImplementedError: As `fully_shard`.
    """
    ignored = options["ignored_params"] or ()
    plan = plan_unit(modules, shard_group, ignored, inner, managed)
    apply_precision(plan, options["mp_policy"])
    plan.offload = options["offload_policy"]
    plan.bucket_cap_mb = options["bucket_cap_mb"]
    plan.prefetch_nbytes = options["prefetch_nbytes"]
    apply_granularity(plan, options["granularity"])
    if shard_group is not None:
        check_policy(options["reshard_after_forward"], shard_group.size)
        if options["offload_policy"].is_active:
            shard_group.check_host_collectives()
    if not options["use_orig_params"]:
        check_can_be_flat(plan)
    if options["sync_module_states"]:
        check_sync(plan)
    if options["broadcast_buffers"]:
        check_can_broadcast(plan.unmanaged_modules)
    return plan


def _state_of(module: nn.Module) -> ShardState | None:
    """Return the state that `fully_shard` attached to `module`, or None; writes nothing."""
    return cast("ShardState | None", read_state(module))


fully_shard.state = _state_of  # type: ignore[attr-defined]
