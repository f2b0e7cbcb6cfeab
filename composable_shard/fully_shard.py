"""`fully_shard`: shard a module in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_shard._construct import as_modules, build_state, plan_unit, sync_states
from composable_shard._contract import attach_state, read_state
from composable_shard._hooks import register_hooks
from composable_shard._lazy_init import share_context
from composable_shard._mesh import ShardGroup
from composable_shard._state import ShardState
from composable_shard._traversal import rename
from composable_shard.api import ShardingStrategy

__all__ = ["fully_shard"]

_M = TypeVar("_M", bound=nn.Module | Iterable[nn.Module])


def fully_shard(  # noqa: PLR0913 -- one keyword-only option each, named as in FSDP2
    module: _M,
    *,
    mesh: DeviceMesh | None = None,
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    reshard_after_forward: bool | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    use_orig_params: bool = True,
    sync_module_states: bool = False,
) -> _M:
    """Shard the parameters of `module` over the ranks of `mesh`, in place.

    The parameters of `module` that no unit inside it manages form a new unit. From then on each
    rank holds one slice of them, of their gradients and of their optimizer state. The unit is
    gathered for its forward and backward, and its gradients are averaged over the ranks. Call it
    on inner modules first, on the outermost last:

        for block in model.layers:
            fully_shard(block)
        fully_shard(model)

    The same object comes back, its class and FQNs are unchanged, and its Parameter objects stay
    the same objects, so an optimizer (without state) may be built before or after. A call that
    raises leaves the module as it was.

    Args:
        module: A module, or a list of modules that form one unit.
        mesh: 1-D mesh of the ranks that share the unit. Default: all ranks.
        strategy: What ranks keep; `FULL_SHARD` shards everything at rest.
        reshard_after_forward: True frees the full parameters between forward and backward, False
            keeps them, None keeps them only for the outermost unit of a call, whose backward
            begins at once.
        ignored_params: Parameters to leave alone: not sharded, not moved, not reduced.
        use_orig_params: True shows the original parameters; the only mode so far.
        sync_module_states: Broadcast parameters and buffers from the mesh's first rank.

    Returns:
        `module`.

    Raises:
        ValueError: If the module or a parameter can't be sharded, naming it; if called twice.
        RuntimeError: If a parameter belongs to a live autograd graph, or torch.distributed is
            not initialised.
        NotImplementedError: For `use_orig_params=False` and for sparse or unknown tensor types.
    """
    _check_options(strategy, reshard_after_forward, use_orig_params)
    modules = as_modules(module)
    shard_group = ShardGroup.from_mesh(mesh)
    plan = plan_unit(modules, shard_group, ignored_params or set())
    if sync_module_states:
        sync_states(plan, shard_group)
    name = type(modules[0]).__name__
    state = build_state(plan, shard_group, name, reshard_after_forward)
    for root in modules:
        attach_state(root, state)
        register_hooks(root, state)
    for root in modules:
        rename(root)
    share_context(modules)
    return module


def _check_options(
    strategy: ShardingStrategy, reshard_after_forward: object, use_orig_params: bool
) -> None:
    if strategy is not ShardingStrategy.FULL_SHARD:
        raise ValueError(f"expected strategy ShardingStrategy.FULL_SHARD, got {strategy!r}")
    if not isinstance(reshard_after_forward, (bool, type(None))):
        raise ValueError(
            f"expected reshard_after_forward to be True, False or None, "
            f"got {reshard_after_forward!r}"
        )
    if not use_orig_params:
        raise NotImplementedError(
            "use_orig_params=False (one flat parameter for each handle) is not supported yet; "
            "pass True"
        )


def _state_of(module: nn.Module) -> ShardState | None:
    """Return the state that `fully_shard` attached to `module`, or None; writes nothing."""
    return cast("ShardState | None", read_state(module))


fully_shard.state = _state_of  # type: ignore[attr-defined]
