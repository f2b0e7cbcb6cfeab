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

from composable_shard._runtime import post_forward, pre_forward
from composable_shard._state import ShardState

__all__ = ["register_hooks"]


def _before_forward(state: ShardState, module: nn.Module, args: tuple[Any, ...]) -> None:
    pre_forward(state, module)


def _after_forward(state: ShardState, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return post_forward(state, module, output)


# What torch.compiler.disable does, without the import of the compiler that it costs: no hook
# becomes part of a graph, and what it calls is not compiled either.
_NEVER_COMPILE = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
for _hook in (_before_forward, _after_forward):
    _hook.__dict__["_torchdynamo_disable"] = True
    set_code_exec_strategy(_hook.__code__, _NEVER_COMPILE)


def register_hooks(module: nn.Module, state: ShardState) -> None:
    """Make calls of `module` gather and free the unit. Copies with the module."""
    module.register_forward_pre_hook(partial(_before_forward, state), prepend=True)
    # always_call: the hook runs when the forward, or another hook, has raised.
    module.register_forward_hook(partial(_after_forward, state), always_call=True)
