"""Modules, units and handles of a tree: attach a unit, find units in order.

`replicate`, `checkpoint` and torch's `fully_shard` look at torch's registry, so each sees the
others. The unit has a key of its own: torch's is private, and random in each process.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from composable_shard.flat_param import FlatParamHandle, ParamEntry, slot_key
from composable_shard.runtime.unit import ShardState
from composable_shard.torch_private import (
    REGISTRY_KEY,
    RegistryItem,
    modules_in,
    parameters_of,
    running,
)

_API_NAME = "fully_shard"
_STATE_KEY = "_composable_shard_state"
_UNIT_KEY = "_composable_shard_unit"


def read_state(module: nn.Module) -> Any | None:
    """Return the state attached to `module` itself, or None; writes nothing."""
    return module.__dict__.get(_STATE_KEY)


def attach_state(module: nn.Module, state: Any) -> None:
    """Attach `state` to `module`. It can't fail, so it is the last step of `fully_shard`."""
    module.__dict__[_STATE_KEY] = state
    module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())[_API_NAME] = RegistryItem()


def attach_unit(module: nn.Module, state: Any) -> None:
    """Note which unit manages the module's own parameters."""
    module.__dict__[_UNIT_KEY] = state


def managed_params(module: nn.Module) -> dict[str, tuple[FlatParamHandle, ParamEntry]]:
    """Return the parameters of `module` itself that a unit manages, shown or not, by name."""
    state = module.__dict__.get(_UNIT_KEY)
    if state is None:
        return {}
    found, place = by_slot(state.handles), id(parameters_of(module))
    indices = {name: found[place, name] for name in parameters_of(module) if (place, name) in found}
    return {name: (handle, handle.entries[index]) for name, (handle, index) in indices.items()}


def by_slot(
    handles: Iterable[FlatParamHandle],
) -> dict[tuple[int, Any], tuple[FlatParamHandle, int]]:
    """Return each place that shows a parameter of some handles, with its handle and index."""
    return {
        slot_key(slot): (handle, index)
        for handle in handles
        for index, entry in enumerate(handle.entries)
        for slot in entry.slots
    }


def find_applied(module: nn.Module) -> str | None:
    """Return the name of a composable API applied to `module` that excludes ours, or None."""
    registry = module.__dict__.get(REGISTRY_KEY)
    if not registry:
        return None
    return next((name for name in (_API_NAME, "replicate") if name in registry), None)


def called_modules() -> Iterator[nn.Module]:
    """Yield the modules whose calls are on this thread's stack, innermost first, each call once."""
    for call in running("torch.nn.modules.module", "_wrapped_call_impl"):
        yield call["self"]


def find_reader(handle_ref: weakref.ref[FlatParamHandle]) -> str:
    """Return which unit's running forward reads a parameter of a unit inside it, and what to do.

    Empty if there is none: the unit itself runs, or only modules outside of all units do.
    """
    handle = handle_ref()
    for module in called_modules():
        state = read_state(module)
        if handle is None or (state is not None and handle in state.needed_handles):
            return ""
        if state is not None and handle in get_handles(module):
            return (
                f"The forward of '{state.name}' reads it, or calls a method or an inner layer of "
                f"'{handle.name}', whose own call alone gathers it. Leave '{handle.name}' out of "
                f"the units (no fully_shard, or the rule '{handle.name}': None), so that a unit "
                "around both holds it."
            )
    return ""


def get_states(module: nn.Module) -> list[ShardState]:
    """Return the states of `module` and everything below it, outermost first, each once."""
    states = [child.__dict__.get(_STATE_KEY) for child in modules_in(module)]
    return list(dict.fromkeys([state for state in states if state is not None]))


def get_handles(module: nn.Module) -> list[FlatParamHandle]:
    """Return the handles of all units in `module`, in the order of `get_states`."""
    return [handle for state in get_states(module) for handle in state.handles]


def get_root_states(module: nn.Module) -> list[ShardState]:
    """Return the outermost states in `module`, with no sharded module around them."""
    nested = {
        state
        for child in modules_in(module)
        if (outer := read_state(child)) is not None
        for below in modules_in(child)
        if (state := read_state(below)) is not None and state is not outer
    }
    return [state for state in get_states(module) if state not in nested]


def select_states(module: nn.Module, recurse: bool) -> list[ShardState]:
    """Return the states of `module` and all modules below, or only its own."""
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
    placed = [entry.spec.tensor_parallel for handle in handles for entry in handle.entries]
    meshes = dict.fromkeys([each[0] for each in placed if each is not None])
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
    """Yield `module` and the modules below it with names, not descending into sharded ones.

    Skips modules in `seen` (by id), and treats modules in `inner` as sharded.
    """
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    yield prefix, module
    for name, child in module.named_children():
        if read_state(child) is None and child not in inner:
            yield from iter_unmanaged_modules(child, f"{prefix}.{name}".lstrip("."), seen, inner)


def calling_modules(module: nn.Module) -> list[nn.Module]:
    """Return the modules around `module` whose calls are running, outermost first."""
    outer = [caller for caller in dict.fromkeys(called_modules()) if caller is not module]
    return [each for each in reversed(outer) if any(child is module for child in modules_in(each))]
