"""Names of units and parameters, as seen from the outermost module so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from composable_shard.flat_param import FlatParamHandle
from composable_shard.runtime.tree import by_slot, read_state
from composable_shard.runtime.unit import ShardState
from composable_shard.tensor import ParamLabel
from composable_shard.torch_private import parameters_of


def first_names(
    modules: Iterable[tuple[str, nn.Module]], handles: Iterable[FlatParamHandle]
) -> dict[tuple[FlatParamHandle, int], str]:
    """Return the first name of each parameter of handles, by handle and index.

    `modules` is what `named_modules_in` returns of a model.
    """
    found, names = by_slot(handles), dict[tuple[FlatParamHandle, int], str]()
    for prefix, child in modules:
        for key in parameters_of(child).keys():  # noqa: SIM118 -- a ScriptModule's has no __iter__
            place = found.get((id(parameters_of(child)), key))
            if place is not None:
                names.setdefault(place, f"{prefix}.{key}".lstrip("."))
    return names


def rename(modules: Sequence[tuple[str, nn.Module]]) -> None:
    """Name all units in a module as seen from it, for messages, and parameters of those inside.

    `modules` is what `named_modules_in` returns of a new unit's module, whose own parameters have
    their names.
    """
    named: dict[ShardState, str] = {}
    for name, child in modules:
        state = read_state(child)
        if state is not None and state not in named:
            state.name, named[state] = name or type(child).__name__, name
    handles = [handle for state, name in named.items() if name for handle in state.handles]
    labels: dict[int, tuple[ParamLabel, str]] = {}  # copies of a unit share them
    for (handle, index), name in (first_names(modules, handles) if handles else {}).items():
        label = handle.entries[index].label
        labels.setdefault(id(label), (label, name))
    for label, name in labels.values():
        label.rename(name)
    for state, name in named.items():
        for handle in state.handles:
            handle.label.rename(state.name)
            handle.shown.form.rename(name)


def remember_names(states: Sequence[ShardState]) -> Callable[[], None]:
    """Return a function that undoes `rename` for units."""
    handles = [handle for state in states for handle in state.handles]
    state_names = [(state, state.name) for state in states]
    unit_names = [(handle.label, handle.label.name) for handle in handles]
    labels = [label for handle in handles for label in handle.labels()]
    names = [label.fqn for label in labels]

    def restore() -> None:
        for state, name in state_names:
            state.name = name
        for unit_label, name in unit_names:
            unit_label.rename(name)
        for label, fqn in zip(labels, names, strict=True):
            label.rename(fqn)

    return restore
