"""Modules, units and handles of a tree: attach a unit, find units in order.

`replicate`, `checkpoint` and torch's `fully_shard` look at torch's registry, so each sees the
others. The unit has a key of its own: torch's is random in each process and would not survive a
pickle.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from composable_shard.flat_param import FlatParamHandle, slot_key
from composable_shard.runtime.unit import ShardState
from composable_shard.torch_private import REGISTRY_KEY, RegistryItem, modules_of, parameters_of

_API_NAME = "fully_shard"
_STATE_KEY = "_composable_shard_state"


def read_state(module: nn.Module) -> Any | None:
    """Return the state attached to `module` itself, or None; writes nothing."""
    return module.__dict__.get(_STATE_KEY)


def attach_state(module: nn.Module, state: Any) -> None:
    """Attach `state` to `module`. Nothing in it can fail, so it is the last thing a call does."""
    module.__dict__[_STATE_KEY] = state
    module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())[_API_NAME] = RegistryItem()


def find_applied(module: nn.Module) -> str | None:
    """Return the name of a composable API applied to `module` that excludes ours, or None."""
    registry = module.__dict__.get(REGISTRY_KEY, {})
    return next((name for name in (_API_NAME, "replicate") if name in registry), None)


def has_forward(module: nn.Module) -> bool:
    """Return whether calling `module` runs a forward, its own or that of its class."""
    # torch.compile(module) has one as an attribute.
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


class ModuleTree:
    """The modules of a model, each once, in an order in which they can be made units.

    Attributes:
        root: The model.
        fqns: Maps every module to its FQNs, several where it is shared; the root's is "". A module
            comes after all modules inside it, the root last.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.fqns: dict[nn.Module, list[str]] = {}
        self._visit(root, "", [], {})

    def _visit(
        self, module: nn.Module, fqn: str, path: list[nn.Module], found: dict[nn.Module, list[str]]
    ) -> None:
        if any(module is outer for outer in path):
            return  # a cycle, which named_modules() goes round once too
        found.setdefault(module, []).append(fqn)
        for name, child in modules_of(module).items():
            if child is not None:
                self._visit(child, f"{fqn}.{name}".lstrip("."), [*path, module], found)
        # The same list: names that are found later are in it.
        self.fqns.setdefault(module, found[module])

    def fqn(self, module: nn.Module) -> str:
        """Return the first FQN of `module`, the one in `named_modules()`."""
        return self.fqns[module][0]

    def describe(self, module: nn.Module) -> str:
        """Return the FQN and class of `module`, for messages."""
        kind = type(module).__name__
        return (
            f"'{self.fqn(module)}' ({kind})" if module is not self.root else f"the model ({kind})"
        )


def get_states(module: nn.Module) -> list[ShardState]:
    """Return the states of `module` and everything below it, outermost first, each once."""
    states = (read_state(child) for child in module.modules())
    return list(dict.fromkeys(state for state in states if state is not None))


def get_handles(module: nn.Module) -> list[FlatParamHandle]:
    """Return the handles of all units in `module`, in the order of `get_states`."""
    return [handle for state in get_states(module) for handle in state.handles]


def get_root_states(module: nn.Module) -> list[ShardState]:
    """Return the outermost states in `module`: those with no sharded module between."""
    roots: dict[ShardState, None] = {}
    seen: set[int] = set()
    pending = [module]
    while pending:
        child = pending.pop()
        if id(child) in seen:
            continue
        seen.add(id(child))
        state = read_state(child)
        if state is not None:
            roots[state] = None
        else:
            pending.extend(reversed(list(child.children())))
    nested = {
        state
        for child in module.modules()
        if read_state(child) in roots
        for below in child.modules()
        if (state := read_state(below)) is not None and state is not read_state(child)
    }
    return [state for state in roots if state not in nested]


def select_states(module: nn.Module, recurse: bool) -> list[ShardState]:
    """Return the states of `module` and below, or its own alone.

    Raises:
        ValueError: If there is none.
    """
    own = read_state(module)
    states = get_states(module) if recurse else [own] if own is not None else []
    if not states:
        where = "a module with sharded units" if recurse else "a sharded module"
        raise ValueError(
            f"expected {where}, got {type(module).__name__}. Call fully_shard on it first"
            + (
                ", or pass the module around it that was sharded."
                if recurse
                else ", or pass recurse=True for the units inside it."
            )
        )
    return states


def tensor_groups(handles: Iterable[FlatParamHandle]) -> list[dist.ProcessGroup]:
    """Return the process groups of all axes of parameters' tensor-parallel meshes, each once."""
    placed = (entry.spec.tensor_parallel for handle in handles for entry in handle.entries)
    meshes = dict.fromkeys(each[0] for each in placed if each is not None)
    return [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)]


def is_sharded(module: nn.Module) -> bool:
    """Return whether `fully_shard` was applied to `module` itself."""
    return read_state(module) is not None


def iter_unmanaged_modules(
    module: nn.Module,
    prefix: str = "",
    seen: set[int] | None = None,
    inner: Container[nn.Module] = (),
) -> Iterator[tuple[str, nn.Module]]:
    """Yield `module` and what is below it with names, not descending into sharded modules.

    Args:
        module: Where to begin.
        prefix: Its name.
        seen: Modules, by id, to leave out; those that are yielded are added.
        inner: Modules below to treat as sharded.
    """
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    yield prefix, module
    for name, child in module.named_children():
        if read_state(child) is None and child not in inner:
            yield from iter_unmanaged_modules(child, f"{prefix}.{name}".lstrip("."), seen, inner)


def rename(module: nn.Module) -> None:
    """Name all units and parameters in `module` as seen from it, for messages."""
    labels = {
        slot_key(slot): entry.label
        for handle in get_handles(module)
        for entry in handle.entries
        for slot in entry.slots
    }
    renamed: set[int] = set()
    for prefix, child in module.named_modules():
        for key in parameters_of(child):
            label = labels.get((id(parameters_of(child)), key))
            if label is not None and id(label) not in renamed:
                renamed.add(id(label))
                label.rename(f"{prefix}.{key}".lstrip("."))
    named: set[ShardState] = set()
    for name, child in module.named_modules():
        state = read_state(child)
        if state is None or state in named:
            continue
        named.add(state)
        state.name = name or type(child).__name__
        for handle in state.handles:
            handle.rename(state.name)
            if handle.shown.flat is not None:
                flat_name = f"{name}.{handle.shown.flat_slot.name}"
                handle.shown.flat.label.rename(flat_name.lstrip("."))
