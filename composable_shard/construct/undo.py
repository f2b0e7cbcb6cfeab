"""What a call of `fully_shard` changes, remembered so that a call that raises changes nothing.

[Note: Undo]
Every step after the first change can raise: a module may refuse hooks, a property or `__setattr__`
of the user's class may raise, memory may run out. So each step registers its inverse before it
runs, on one `ExitStack` that a successful call empties. Those of modules and parameters are in one
list on the stack, which costs less than a place for each. An inverse must also be right where its
step has not begun or has stopped half-way. None sends a message: other ranks may have succeeded.
The original values stay in memory until the call ends, as they do while the shards are allocated.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from composable_shard.construct.originals import Plan
from composable_shard.runtime import get_states, remember_names, remember_trees
from composable_shard.torch_private import REGISTRY_KEY, buffers_of

_KINDS = (dict, OrderedDict, set)
_CONTAINERS = (
    *(name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)),
    REGISTRY_KEY,
)


def remember(plan: Plan) -> list[Callable[[], object]]:
    """Return functions that restore the modules of a plan, and the units inside them."""
    steps: list[Callable[[], object]] = [*map(_remember_module, plan.unmanaged_modules)]
    states = list(dict.fromkeys(state for root in plan.modules for state in get_states(root)))
    steps += remember_names(states), remember_trees(states, joins=bool(plan.borrowed))
    return steps


def run_backwards(steps: Sequence[Callable[[], object]]) -> None:
    """Call functions, the last one first, all of them even if some raise."""
    with ExitStack() as stack:
        for step in steps:
            stack.callback(step)


def _remember_module(module: nn.Module) -> Callable[[], None]:
    """Return a function that gives a module its attributes back, and what containers held.

    Containers that torch does not make are the user's and stay as they are.
    """
    attributes = vars(module).copy()
    found: list[Any] = [attributes[name] for name in _CONTAINERS if name in attributes]
    contents = [
        # Most are empty, as those of hooks.
        (each, each.copy() if each else ())
        for each in found
        if type(each) in _KINDS or isinstance(each, dict | set)
    ]
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
