"""Modules, units and handles of a tree: attach a unit, find units in order.

`replicate`, `checkpoint` and torch's `fully_shard` look at torch's registry, so each sees the
others. The unit has a key of its own: torch's is private, and random in each process.

[Note: Whole model]
A parameter that no unit manages keeps the gradient of its own rank: the ranks' copies drift apart,
and nothing fails. The usual cause is a root that was not sharded. So functions that see the whole
model look for such parameters, and the first forward does, for the outermost module whose call is
running: torch knows no parents, but the interpreter's stack holds every module that is being
called. These need no unit:

- parameters in the `ignored_params` of a unit, by object, and by place for copies of the model;
- parameters below a module that another data-parallel library manages;
- DTensors whose mesh has all ranks that average the gradients of the units.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, getitem
from types import CodeType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.jit import ScriptModule
from torch.nn.parallel import DistributedDataParallel

from composable_shard.flat_param import (
    FlatParamHandle,
    ParamEntry,
    UnshardedParameter,
    slot_key,
)
from composable_shard.runtime.unit import ShardState
from composable_shard.tensor import FlatShard, ParamLabel
from composable_shard.torch_private import (
    REGISTRY_KEY,
    RegistryItem,
    modules_of,
    parameters_of,
    running,
)

_API_NAME = "fully_shard"
_STATE_KEY = "_composable_shard_state"
_UNIT_KEY = "_composable_shard_unit"
_OTHER_LIBRARIES = (DistributedDataParallel, FSDPModule, FullyShardedDataParallel)
_Place = tuple[str, nn.Module, str, Tensor]  # a parameter's name, its module, its key there


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
    found, place = _by_slot(state.handles), id(parameters_of(module))
    indices = {name: found[place, name] for name in parameters_of(module) if (place, name) in found}
    return {name: (handle, handle.entries[index]) for name, (handle, index) in indices.items()}


def _by_slot(
    handles: Iterable[FlatParamHandle],
) -> dict[tuple[int, Any], tuple[FlatParamHandle, int]]:
    return {
        slot_key(slot): (handle, index)
        for handle in handles
        for index, entry in enumerate(handle.entries)
        for slot in entry.slots
    }


def first_names(
    modules: Iterable[tuple[str, nn.Module]], handles: Iterable[FlatParamHandle]
) -> dict[tuple[FlatParamHandle, int], str]:
    """Return the first name of each parameter of handles, by handle and index.

    `modules` is what `named_modules()` of a model returns.
    """
    found, names = _by_slot(handles), dict[tuple[FlatParamHandle, int], str]()
    for prefix, child in modules:
        for key in parameters_of(child).keys():  # noqa: SIM118 -- a ScriptModule's has no __iter__
            place = found.get((id(parameters_of(child)), key))
            if place is not None:
                names.setdefault(place, f"{prefix}.{key}".lstrip("."))
    return names


def find_applied(module: nn.Module) -> str | None:
    """Return the name of a composable API applied to `module` that excludes ours, or None."""
    registry = module.__dict__.get(REGISTRY_KEY, {})
    return next((name for name in (_API_NAME, "replicate") if name in registry), None)


def has_forward(module: nn.Module) -> bool:
    """Return whether calling `module` runs a forward, its own or its class's."""
    # torch.compile(module) has one as an attribute.
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def class_without_hooks(module: nn.Module) -> type | None:
    """Return the class whose `__call__` runs no hooks of nn.Module, as gpytorch's; None without.

    One that passes the call on runs them, and one without code to look at may.
    """
    for kind in type(module).__mro__:
        if kind is nn.Module:
            return None
        code = getattr(vars(kind).get("__call__"), "__code__", None)
        if "__call__" not in vars(kind):
            continue
        names = set() if code is None else _names_in(code)
        if "super" not in names:
            return kind if code is not None and _PASSES_ON.isdisjoint(names) else None
    return None


_PASSES_ON = {"__call__", "_call_impl", "_wrapped_call_impl"}


def _names_in(code: CodeType) -> set[str]:
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names, *(name for each in inner for name in _names_in(each))}


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
        if handle is None or (state is not None and handle in state.needed):
            return ""
        if state is not None and handle in get_handles(module):
            return (
                f"The forward of '{state.name}' reads it, or calls a method or an inner layer of "
                f"'{handle.name}', whose own call alone gathers it. Leave '{handle.name}' out of "
                f"the units (no fully_shard, or the rule '{handle.name}': None), so that a unit "
                "around both holds it."
            )
    return ""


class ModuleTree:
    """The modules of a model, each once, in an order in which they can be made units."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        # Maps every module to its FQNs, several where it is shared; the root's is "". A module
        # comes after all modules inside it, the root last.
        self.fqns: dict[nn.Module, list[str]] = {}
        self._visit(root, "", [], {})

    def _visit(
        self, module: nn.Module, fqn: str, path: list[nn.Module], found: dict[nn.Module, list[str]]
    ) -> None:
        if any(module is outer for outer in path):
            return  # a cycle; named_modules() follows it once too
        found.setdefault(module, []).append(fqn)
        for name, child in modules_of(module).items():
            if child is not None:
                self._visit(child, f"{fqn}.{name}".lstrip("."), [*path, module], found)
        # Share the list with `found`, so that names found later are in it.
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
    """Return the outermost states in `module`, with no sharded module around them."""
    nested = {
        state
        for child in module.modules()
        if (outer := read_state(child)) is not None
        for below in child.modules()
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


def rename(module: nn.Module) -> None:
    """Name all units and parameters in `module` as seen from it, for messages."""
    named: dict[ShardState, str] = {}
    modules = list(module.named_modules())
    for name, child in modules:
        state = read_state(child)
        if state is not None and state not in named:
            state.name, named[state] = name or type(child).__name__, name
    handles = [handle for state in named for handle in state.handles]
    labels: dict[int, tuple[ParamLabel, str]] = {}  # copies of a unit share them
    for (handle, index), name in first_names(modules, handles).items():
        label = handle.entries[index].label
        labels.setdefault(id(label), (label, name))
    for label, name in labels.values():
        label.rename(name)
    for state, name in named.items():
        for handle in state.handles:
            handle.label.rename(state.name)
            if handle.shown.flat is not None:
                flat_name = f"{name}.{handle.shown.flat_slot.name}"
                handle.shown.flat.label.rename(flat_name.lstrip("."))


def remember_names(states: Iterable[ShardState]) -> Callable[[], None]:
    """Return a function that undoes `rename` for units."""
    states = list(states)
    handles = [handle for state in states for handle in state.handles]
    state_names = [(state, state.name) for state in states]
    unit_names = [(handle.label, handle.label.name) for handle in handles]
    names = [(label, label.fqn) for handle in handles for label in handle.labels()]

    def restore() -> None:
        for state, name in state_names:
            state.name = name
        for unit_label, name in unit_names:
            unit_label.rename(name)
        for label, fqn in names:
            label.rename(fqn)

    return restore


def check_whole(model: nn.Module) -> None:
    """Check that units manage all trainable parameters of a model, see [Note: Whole model].

    Local; the same on all ranks that have the same model. A model without units passes.
    """
    if (names := find_unmanaged([model])) and get_states(model):
        raise_unmanaged(names, get_states(model))


def find_unmanaged(modules: Sequence[nn.Module]) -> list[str]:
    """Return names of trainable parameters in `modules` that no unit manages, outermost first."""
    seen: set[nn.Module] = set()
    places = [place for module in modules for place in _iter_unknown(module, "", seen)]
    states = [state for module in modules for state in get_states(module)] if places else []
    return _unmanaged_names(places, states) if places else []


def raise_unmanaged(names: list[str], states: Sequence[ShardState]) -> None:
    """Raise the error that names trainable parameters that no unit manages."""
    handles = [handle for state in states for handle in state.handles]
    managed = {str(label) for handle in handles for label in handle.labels()}
    if managed.issuperset(names):
        raise RuntimeError(
            f"no unit manages the trainable parameters {names}, which have taken the place of "
            "parameters of units, as where resize_token_embeddings or a swap replaces a layer: "
            "every rank would train a copy of its own. Replace layers before fully_shard, or call "
            "fully_shard on the new one and build the optimizer anew."
        )
    raise RuntimeError(
        f"no unit manages the trainable parameters {names}: every rank would train a copy of its "
        "own with its own gradients. Call fully_shard on the module that holds them (the model "
        "itself, after its layers), freeze them, or pass them in ignored_params of any fully_shard "
        "call and reduce their gradients yourself. What a sharded module gets later goes into a "
        "module of its own. Where a parameter was replaced, as by functional_call or assignment, "
        "write the values into the existing one."
    )


def calling_modules(module: nn.Module) -> list[nn.Module]:
    """Return the modules around `module` whose calls are running, outermost first."""
    outer = [caller for caller in dict.fromkeys(called_modules()) if caller is not module]
    return [each for each in reversed(outer) if any(child is module for child in each.modules())]


class _Contents:
    """The modules and parameters below a module when it was last looked at.

    Objects are compared by `id`; `freed` counts too, as a new module may reuse an id.
    """

    __slots__ = ("empty", "filled", "flags", "freed", "ids", "num_children", "places", "refs")

    def __init__(self, module: nn.Module | None = None) -> None:
        found = [] if module is None else module.modules()
        # A ScriptModule's contents never change, and it has no dicts of them.
        modules = [each for each in found if not isinstance(each, ScriptModule)]
        children, params = ([*map(of, modules)] for of in (modules_of, parameters_of))
        self.empty = [each for each in (*children, *params) if not each]
        self.filled = [each for each in (*children, *params) if each]
        self.ids = [id(item) for each in self.filled for item in each.values()]
        self.num_children = sum(map(len, children))
        self.freed: list[Any] = []
        self.refs = [weakref.ref(each, self.freed.append) for each in modules]
        items = [(each, key, item) for each in params for key, item in each.items()]
        items = [item for item in items if not isinstance(item[-1], _MANAGED)]
        self.places = [each for each, _, _ in items], [key for _, key, _ in items]
        self.flags = [param.requires_grad for _, _, param in items]

    def __reduce__(self) -> Any:
        """Start empty in copies, because the contents are of these modules."""
        return _Contents, ()


_MANAGED = FlatShard, UnshardedParameter, type(None)
_CONTENTS_KEY = "_composable_shard_contents"
_requires_grad: Callable[[Any], bool] = attrgetter("requires_grad")


def has_changed(module: nn.Module) -> bool:
    """Return whether a module's contents changed since `note_contents`; runs in each forward."""
    known: _Contents | None = module.__dict__.get(_CONTENTS_KEY)
    return known is not None and (
        [*map(id, chain.from_iterable(map(dict.values, known.filled)))] != known.ids
        or any(known.empty)
        or bool(known.freed)
        or [*map(_requires_grad, map(getitem, *known.places))] != known.flags
    )


def note_contents(module: nn.Module) -> bool:
    """Note the contents of a module; return whether modules are new or were taken out."""
    known, found = module.__dict__.get(_CONTENTS_KEY, _Contents()), _Contents(module)
    # The entry is the module's and not the unit's: hooks of the modules inside lead to the unit.
    module.__dict__[_CONTENTS_KEY] = found
    children = found.ids[: found.num_children]
    return bool(known.freed) or children != known.ids[: known.num_children]


def _iter_unknown(module: nn.Module, prefix: str, seen: set[nn.Module]) -> Iterator[_Place]:
    """Yield the trainable parameters below a module that no unit or other library manages."""
    if module in seen:
        return
    seen.add(module)
    if isinstance(module, _OTHER_LIBRARIES):
        return
    if read_state(module) is None and find_applied(module) is not None:
        return
    for key, param in parameters_of(module).items():
        is_unit = isinstance(param, FlatShard | UnshardedParameter)
        if param is not None and not is_unit and param.requires_grad:
            yield f"{prefix}{key}", module, key, param
    for key, child in modules_of(module).items():
        if child is not None:
            yield from _iter_unknown(child, f"{prefix}{key}.", seen)


def _unmanaged_names(places: Iterable[_Place], states: Sequence[ShardState]) -> list[str]:
    handles = list(dict.fromkeys(handle for state in states for handle in state.needed))
    slots = [slot for handle in handles for entry in handle.entries for slot in entry.slots]
    slots += [slot for state in states for slot in state.ignored]
    known = set(map(slot_key, slots))
    exempt: set[int] = set()
    for state in states:
        exempt.update(map(id, state.options.ignored_params or ()))
    flats = [handle.shown.flat for handle in handles if handle.shown.flat is not None]
    exempt.update(id(form) for flat in flats for form in (flat.sharded, flat.unsharded))
    ranks = {
        rank
        for handle in handles
        for group in handle.shard_group.joint_groups
        for rank in dist.get_process_group_ranks(group)
    }
    found: dict[int, str] = {}
    for name, module, key, param in places:
        is_known = (id(parameters_of(module)), key) in known or id(param) in exempt
        if not is_known and not _spans(param, ranks):
            found.setdefault(id(param), name)
    return list(found.values())


def _spans(param: Any, ranks: set[int]) -> bool:
    """Return whether a parameter is a DTensor over all of these ranks."""
    return isinstance(param, DTensor) and ranks.issubset(param.device_mesh.mesh.flatten().tolist())
