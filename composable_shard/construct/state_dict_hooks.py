"""Hooks of state dicts, whose code is imported when the first of them runs: a step needs none."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from torch import nn
from torch.jit import ScriptModule

from composable_shard.runtime import ShardState, attach_unit
from composable_shard.torch_private import set_state_dict_guard


@cache
def _functions() -> dict[str, Callable[..., Any]]:
    from composable_shard.state_dict import (  # noqa: PLC0415 -- see above
        adopt_new_data,
        check_torch_call,
        load_values,
        show_shards,
        show_whole_values,
    )

    hooks = adopt_new_data, check_torch_call, load_values, show_shards, show_whole_values
    return {hook.__name__: hook for hook in hooks}


def _call(name: str, *args: Any, **kwargs: Any) -> Any:
    return _functions()[name](*args, **kwargs)


def register_state_dict_hooks(
    roots: list[nn.Module], modules: list[nn.Module], state: ShardState
) -> None:
    """Register the state dict hooks of a unit's modules, [Note: State dicts]."""
    show, load = partial(_call, "show_shards", state), partial(_call, "load_values", state)
    for module in modules:
        if isinstance(module, ScriptModule):
            continue  # it has no parameters, and takes no hooks
        attach_unit(module, state)
        module.register_state_dict_post_hook(show)
        module.register_load_state_dict_pre_hook(load)
    for module in roots:
        module.register_state_dict_pre_hook(partial(_call, "adopt_new_data", state))
        module.register_state_dict_post_hook(partial(_call, "show_whole_values"))
        set_state_dict_guard(module, partial(_call, "check_torch_call", state))
