"""Hooks of a unit's module: forward and backward, casts and `zero_grad`."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from torch import nn

from composable_shard.runtime import (
    Boundary,
    ShardState,
    TrainingState,
    cast_arguments,
    cast_output,
    get_handles,
    post_forward,
    pre_forward,
)
from composable_shard.torch_private import never_compile


def _cast_arguments(
    state: ShardState, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    dtype = state.options.mp_policy.param_dtype
    if dtype is None:
        # With main_dtype alone the unit computes in its earlier dtypes.
        dtypes = {
            handle.memory.precision.computes_in(handle.shard.values.dtype)
            for handle in state.needed_handles
            if handle.full.is_cast
        }
        dtype = dtypes.pop() if len(dtypes) == 1 else None
    if state.training_state is TrainingState.UNSHARDED_PARAMS:
        # unshard_params shows the main parameters.
        dtype = next((h.shard.values.dtype for h in state.needed_handles if h.full.is_cast), dtype)
    return None if dtype is None else cast_arguments(args, kwargs, dtype)


def _cast_output(state: ShardState, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return cast_output(output, state.options.mp_policy.output_dtype)  # type: ignore[arg-type] # not None


# No hook becomes part of a compiled graph, and the functions it calls are not compiled.
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
        # Registered before the hook that gathers, so it runs after it: if the cast fails, the unit
        # is known to be in its forward.
        hook = partial(_cast_arguments, state)
        module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    if policy.output_dtype is not None:
        module.register_forward_hook(partial(_cast_output, state))
    module.register_forward_pre_hook(partial(pre_forward, state), prepend=True)
    # always_call: the hook runs when the forward, or another hook, has raised.
    module.register_forward_hook(partial(post_forward, state), always_call=True)
    module.__dict__.setdefault("zero_grad", _ZeroGrad(module))


class _ZeroGrad:
    """Replaces a module's `zero_grad`, which would use the parameters that modules show.

    It clears the gradients of the parameters at rest, also between `unshard` and `reshard`, and
    after an interrupt that has left a module in its forward.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)  # it holds this object

    def __call__(self, set_to_none: bool = True) -> None:
        module = self._module()
        if module is None:
            return  # of a shallow copy
        type(module).zero_grad(module, set_to_none)
        for handle in get_handles(module):
            if not handle.shown.is_unsharded or handle.shown.state.is_fixed:
                continue
            for each in handle.shown.at_rest:
                if set_to_none:
                    each.sharded.grad = None
                elif each.sharded.grad is not None:
                    each.sharded.grad.zero_()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._module(),)


def register_boundaries(modules: list[nn.Module]) -> None:
    """Make calls of `modules` compute in the dtype of their main parameters."""
    for module in modules:
        boundary = Boundary()
        module.register_forward_pre_hook(boundary.before, prepend=True, with_kwargs=True)
        module.register_forward_hook(boundary.after)
