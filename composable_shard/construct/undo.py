"""What a call of `fully_shard` changes, remembered so that a call that raises changes nothing.

[Note: Undo]
Every step after the first change can raise: a module may refuse hooks, a property or `__setattr__`
of the user's class may raise, memory may run out. So each step registers its inverse before it
runs, on one `ExitStack` that a successful call empties. An inverse must also be right where its
step has not begun or has stopped half-way. None sends a message: other ranks may have succeeded.
The original values stay in memory until the call ends, as they do while the shards are allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from composable_shard.construct.originals import Plan
from composable_shard.runtime import remember_names, remember_trees
from composable_shard.torch_private import REGISTRY_KEY, buffers_of


def remember(plan: Plan, undo: ExitStack) -> None:
    """Let `undo` restore the modules of a plan, and the units inside them."""
    own = vars(nn.Module())
    names = [name for name, value in own.items() if isinstance(value, dict | set)]
    for module in plan.unmanaged_modules:
        undo.callback(_remember_module(module, [*names, REGISTRY_KEY]))
    undo.callback(remember_names(plan.modules))
    undo.callback(remember_trees(plan.modules, joins=bool(plan.borrowed)))


def _remember_module(module: nn.Module, names: list[str]) -> Callable[[], None]:
    """Return a function that gives a module its attributes back, and what containers held.

    Args:
        names: The containers among the attributes. Others are the user's and stay as they are.
    """
    attributes = vars(module).copy()
    found: list[Any] = [attributes[name] for name in names if name in attributes]
    contents = [(each, each.copy()) for each in found if isinstance(each, dict | set)]
    # Of a ScriptModule, which has no dict of them, only values are replaced.
    buffers = {} if isinstance(buffers_of(module), dict) else dict(buffers_of(module).items())

    def restore() -> None:
        for name, buffer in buffers.items():
            buffers_of(module)[name] = buffer
        for container, before in contents:
            container.clear()
            container.update(before)
        for name in [name for name in vars(module) if name not in attributes]:
            del vars(module)[name]
        vars(module).update(attributes)

    return restore
