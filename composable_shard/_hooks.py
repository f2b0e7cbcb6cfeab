"""Module events to runtime functions: the only place that registers hooks on users' modules."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)

from composable_shard._casts import Boundary, cast_arguments, cast_output
from composable_shard._model_state import (
    adopt_new_data,
    load_values,
    show_shards,
    show_whole_values,
)
from composable_shard._runtime import post_forward, pre_forward
from composable_shard._state import ShardState, TrainingState

__all__ = ["register_boundaries", "register_hooks", "register_state_dict_hooks"]


def _before_forward(state: ShardState, module: nn.Module, args: tuple[Any, ...]) -> None:
    pre_forward(state, module)


def _after_forward(state: ShardState, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return post_forward(state, module, output)


def _cast_arguments(
    state: ShardState, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    dtype = state.mp_policy.param_dtype
    if state.training_state is TrainingState.UNSHARDED_PARAMS:
        # unshard_params shows the main parameters.
        dtype = next((h.local_shard.dtype for h in state.needed if h.is_cast), dtype)
    return None if dtype is None else cast_arguments(args, kwargs, dtype)


def _cast_output(state: ShardState, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return cast_output(output, state.mp_policy.output_dtype)  # type: ignore[arg-type] # not None


# What torch.compiler.disable does, without the import of the compiler that it costs: no hook
# becomes part of a graph, and what it calls is not compiled either.
_NEVER_COMPILE = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
_BOUNDARY_HOOKS = (Boundary.before, Boundary.after)
for _hook in (_before_forward, _after_forward, _cast_arguments, _cast_output, *_BOUNDARY_HOOKS):
    _hook.__dict__["_torchdynamo_disable"] = True
    set_code_exec_strategy(_hook.__code__, _NEVER_COMPILE)


def register_hooks(module: nn.Module, state: ShardState) -> None:
    """Make calls of `module` gather and free the unit, and cast."""
    policy = state.mp_policy
    is_kept = policy.changes_compute and isinstance(module, policy.keep_fp32_classes)
    if policy.cast_forward_inputs and policy.changes_compute and not is_kept:
        # Before the hook that gathers, so that it runs after it, and a unit whose arguments can't
        # be cast is known to be in its forward.
        hook = partial(_cast_arguments, state)
        module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    if policy.output_dtype is not None:
        module.register_forward_hook(partial(_cast_output, state))
    module.register_forward_pre_hook(partial(_before_forward, state), prepend=True)
    # always_call: the hook runs when the forward, or another hook, has raised.
    module.register_forward_hook(partial(_after_forward, state), always_call=True)


def register_state_dict_hooks(
    roots: list[nn.Module], modules: list[nn.Module], state: ShardState
) -> None:
    """Make the state dicts of a unit's modules right, [Note: State dicts].

    Args:
        roots: What `fully_shard` was called on.
        modules: These and what is in the unit below them.
        state: The unit.
    """
    for module in modules:
        module.register_state_dict_post_hook(partial(show_shards, state))
        module.register_load_state_dict_pre_hook(partial(load_values, state))
    for module in roots:
        module.register_state_dict_pre_hook(partial(adopt_new_data, state))
        module.register_state_dict_post_hook(show_whole_values)


def register_boundaries(modules: list[nn.Module]) -> None:
    """Make calls of `modules` compute in the dtype of their main parameters."""
    for module in modules:
        boundary = Boundary()
        module.register_forward_pre_hook(boundary.before, prepend=True, with_kwargs=True)
        module.register_forward_hook(boundary.after)
