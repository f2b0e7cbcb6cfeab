"""The places where modules show a parameter: `Slot`, and how each is found and written."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor, nn

from composable_shard.torch_private import (
    buffers_of,
    flat_weights_names_of,
    flat_weights_of,
    modules_of,
    parameters_of,
)


class _Container(Protocol):
    def __getitem__(self, key: Any, /) -> Any: ...
    def __setitem__(self, key: Any, value: Any, /) -> None: ...


# container[key] is where a module shows a parameter; the module, if the key is an attribute's name
Slot = tuple[_Container, Any, "ModuleItems | None"]


class ModuleItems:
    """A container that is found through its module on every access.

    Holds the module weakly: the module's hooks lead to the handle that holds the slot, and a
    strong reference would close a cycle.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)

    def get(self) -> nn.Module:
        """Return the module."""
        module = self.module()
        if module is None:
            raise RuntimeError("the module that shows this parameter was deleted")
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleItems:
        # Hooks are copied before child modules, so the module may not have been reached yet.
        return type(self)(copy.deepcopy(self.module() or nn.Module(), memo))


class _Attributes(ModuleItems):
    """The parameters of a module that overrides `__setattr__`."""

    def __getitem__(self, name: str) -> Any:
        return parameters_of(self.get())[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if (module := self.module()) is not None:
            setattr(module, name, value)


class _FlatWeights(ModuleItems):
    """The list that an RNN's forward reads; RNNBase makes a new one in `.to()` and `to_empty()`."""

    def __getitem__(self, position: int) -> Any:
        return flat_weights_of(self.get())[position]

    def __setitem__(self, position: int, value: Any) -> None:
        if (module := self.module()) is not None:
            flat_weights_of(module)[position] = value


class _KeptItem(ModuleItems):
    """An item of a list or dict in which a program keeps a parameter; the program may change it.

    Stands for the parameter that was shown here last, and shows another only where that still is.
    """

    def __init__(self, module: nn.Module, shown: Tensor) -> None:
        super().__init__(module)
        self._known: tuple[Any, ...] = (shown,)  # an interrupt leaves either of the last two

    def __getitem__(self, path: tuple[Any, ...]) -> Any:
        return self._known[-1]

    def __setitem__(self, path: tuple[Any, ...], value: Any) -> None:
        known = self._known
        self._known = (known[-1], value)
        if (module := self.module()) is None:
            return
        *outer, key = path
        container: Any = vars(module)
        try:
            for each in outer:
                container = container[each]
        except (LookupError, TypeError):
            return  # the program keeps something else there
        if type(container) not in (list, dict):
            return
        keys = range(len(container)) if type(container) is list else container.keys()
        for shown in reversed(known):
            if key not in keys or container[key] is not shown:
                # Moved inside the container, or taken out of it.
                key = next((each for each in keys if container[each] is shown), key)
            if key in keys and container[key] is shown:
                container[key] = value
                return

    def __deepcopy__(self, memo: dict[int, Any]) -> _KeptItem:
        module = copy.deepcopy(self.module() or nn.Module(), memo)
        return type(self)(module, copy.deepcopy(self._known[-1], memo))


class AddedSlot(ModuleItems):
    """An entry of a module's `_parameters` that its unit adds, for a parameter of its own."""

    def __init__(self, module: nn.Module, name: str, is_ours: bool = False) -> None:
        super().__init__(module)
        self.name = name
        self._is_ours = is_ours  # False: a user's parameter may be there
        self._shadow: Any = None  # a user's attribute that would hide the shown parameter
        self._shown: Tensor | None = None  # what `show` has set

    def reserve(self) -> dict[str, Any]:
        """Return the module's dict of parameters, in which the unit's will be shown."""
        self._is_ours = True
        return parameters_of(self.get())

    def show(self, param: Tensor | None) -> None:
        """Show `param`, or None, among the module's parameters; its position there is kept."""
        if param is None and not self._is_ours:
            return
        if self.module() is None:
            return  # deleted, as by replacing it in its parent
        self._shown = param
        attributes = self.get().__dict__
        if self._shadow is not None:
            attributes[self.name], self._shadow = self._shadow, None
        if param is not None:
            self._shadow = attributes.pop(self.name, None)
        parameters = self.reserve()
        if param is not None or self.name in parameters:
            parameters[self.name] = param

    def remove(self) -> None:
        """Give up the place."""
        if self._is_ours and (module := self.module()) is not None:
            self._is_ours = False
            parameters_of(module).pop(self.name, None)

    def is_free(self, ours: Tensor | None) -> bool:
        """Return whether no attribute of the module but `ours` has the name."""
        module = self.get()
        found = [vars(module).get(self.name), parameters_of(module).get(self.name)]
        taken = [buffers_of(module).get(self.name), modules_of(module).get(self.name)]
        taken.append(getattr(type(module), self.name, None))
        taken += [each for each in found if each is not ours and each is not self._shown]
        return all(each is None for each in taken)

    def keep_reachable(self, param: Tensor) -> None:
        """Make `param` a plain attribute of the module, found also while it is not registered."""
        self.get().__dict__[self.name] = param

    def __deepcopy__(self, memo: dict[int, Any]) -> AddedSlot:
        return type(self)(copy.deepcopy(self.get(), memo), self.name, self._is_ours)


def find_slots(place: ModuleItems, name: str) -> tuple[Slot, ...]:
    """Return every place where a module itself keeps its parameter `name`.

    `place` is the module's; one object serves all its parameters.
    """
    module = place.get()
    if isinstance(module, nn.RNNBase) and name in flat_weights_names_of(module):
        position = flat_weights_names_of(module).index(name)
        return (parameters_of(module), name, place), (_FlatWeights(module), position, None)
    if type(module).__setattr__ is nn.Module.__setattr__:
        return ((parameters_of(module), name, place),)
    return ((_Attributes(module), name, place),)


def find_kept_items(module: nn.Module) -> Iterator[tuple[nn.Parameter, Slot]]:
    """Yield each parameter that a module keeps in a list or dict of its own, and its slot."""
    for name, value in vars(module).items():
        if name not in _OWN_NAMES and type(value) in (list, dict):  # most are of torch
            for path, param in _params_in(value, (name,)):
                yield param, (_KeptItem(module, param), path, None)


_OWN_NAMES = frozenset([*vars(nn.Module()), "_flat_weights"])


def _params_in(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], nn.Parameter]]:
    is_list = type(value) is list
    for key, item in enumerate(value) if is_list else value.items():
        if isinstance(item, Tensor):
            if isinstance(item, nn.Parameter):
                yield (*path, key), item
        elif type(item) in (list, dict) and len(path) < _MAX_DEPTH:
            yield from _params_in(item, (*path, key))


_MAX_DEPTH = 4  # of lists in lists, which may refer to each other


def slot_key(slot: Slot) -> tuple[int, Any]:
    """Return a key that identifies an entry of a module's `_parameters`."""
    container, key, _ = slot
    if isinstance(container, _Attributes):
        container = parameters_of(container.get())
    return id(container), key
