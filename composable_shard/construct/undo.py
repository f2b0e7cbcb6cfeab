"""What a call of `fully_shard` changes, remembered so that a call that raises changes nothing.

[Note: Undo]
Every step after the first change can raise: a module may refuse hooks, a property or `__setattr__`
of the user's class may raise, memory may run out. So each step registers its inverse before it
runs, on one `ExitStack` that a successful call empties. Those of modules and parameters are in one
list on the stack, which costs less than a place for each, and what they remember is in few objects,
because the garbage collector runs after as many new ones. An inverse must also be right where its
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
from composable_shard.runtime import ShardState, remember_names, remember_trees
from composable_shard.torch_private import REGISTRY_KEY, buffers_of

_KINDS = (dict, OrderedDict, set)
_CONTAINERS = (
    *(name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)),
    REGISTRY_KEY,
)


def remember(plan: Plan, inner: Sequence[ShardState], *, owns: bool) -> list[Callable[[], object]]:
    """Return functions that restore the modules of a plan, and the units inside them.

    `owns`: whether the new unit has parameters that one rank owns.
    """
    steps: list[Callable[[], object]] = [*map(_remember_module, plan.unmanaged_modules)]
    steps += remember_names(inner), remember_trees(inner, joins=bool(plan.borrowed), owns=owns)
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
    found: list[Any] = [
        each
        for each in map(attributes.get, _CONTAINERS)
        if type(each) in _KINDS or isinstance(each, dict | set)
    ]
    contents = [(each, each.copy()) for each in found if each]  # few: most are of hooks
    # Of a ScriptModule, which has no dict of them, only values are replaced.
    is_script = not isinstance(attributes.get("_buffers"), dict)
    buffers = dict(buffers_of(module).items()) if is_script else {}

    def restore() -> None:
        for name, buffer in buffers.items():
            buffers_of(module)[name] = buffer
        for container in found:
            container.clear()
        for container, before in contents:
            container.update(before)
        for name in [name for name in vars(module) if name not in attributes]:
            del vars(module)[name]
        vars(module).update(attributes)

    return restore
