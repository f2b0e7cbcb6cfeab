"""Objects in optimizer state that have a `state_dict` of their own.

[Note: Objects in state]
A dict stands for such an object: the name of its class, and what its `state_dict()` returns, which
is state as any other. A load passes that to `load_state_dict` of the object that the optimizer has
in this place. An optimizer may make its objects in its first step only: then a step with zero
gradients makes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

_KIND, _STATE = "__object__", "__state_dict__"
_METHODS = ("state_dict", "load_state_dict")


def has_state_dict(value: object) -> bool:
    """Return whether a value is an object that says its state, and takes it."""
    if isinstance(value, Tensor | type):
        return False
    return all(callable(getattr(value, name, None)) for name in _METHODS)


def told(value: Any) -> Any:
    """Return nested state with what stands for objects in their place; containers are copied.

    Named tuples stay: no save can hold them.
    """
    if has_state_dict(value):
        return {_KIND: type(value).__qualname__, _STATE: told(value.state_dict())}
    if is_named_tuple(value) or not any(has_state_dict(each) for each in _objects_in(value)):
        return value
    if isinstance(value, dict):
        return {key: told(item) for key, item in value.items()}
    items = [told(item) for item in value]
    return deque(items, value.maxlen) if isinstance(value, deque) else type(value)(items)


def is_named_tuple(value: object) -> bool:
    """Return whether a value is a tuple of a class with names, which a load would make a tuple."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def named_tuples_in(value: Any) -> Iterator[Any]:
    """Yield the named tuples in nested state."""
    if is_named_tuple(value):
        yield value
    elif isinstance(value, dict | list | tuple | deque):
        for item in value.values() if isinstance(value, dict) else value:
            yield from named_tuples_in(item)


def _objects_in(value: Any) -> Iterator[Any]:
    """Yield what is in containers, at any depth."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple | deque):
        yield value
        return
    for item in value:
        yield from _objects_in(item)


def stands_for_objects(value: Any) -> bool:
    """Return whether nested state, encoded or not, has what stands for an object."""
    if isinstance(value, Mapping):
        return _KIND in value or any(map(stands_for_objects, value.values()))
    return isinstance(value, list | tuple | deque) and any(map(stands_for_objects, value))


def missing_objects(value: Any, held: Sequence[Any]) -> list[str]:
    """Return the class of each object that has a state to take and is in none of some states."""
    if _is_mark(value):
        return [] if _find(value, held) is not None else [value[_KIND]]
    return [kind for item, below in _items(value, held) for kind in missing_objects(item, below)]


def with_objects(value: Any, held: Sequence[Any]) -> Any:
    """Return nested state with objects, which have taken theirs, in place of what stands for them.

    What stands for an object that no state has stays.

    Args:
        value: The state to load.
        held: States that have the objects; the first one that has an object gives it.
    """
    if _is_mark(value):
        found = _find(value, held)
        if found is None:
            return value
        found.load_state_dict(value[_STATE])
        return found
    if not stands_for_objects(value):
        return value
    items = [with_objects(item, below) for item, below in _items(value, held)]
    if isinstance(value, dict):
        return dict(zip(value, items, strict=True))
    return deque(items, value.maxlen) if isinstance(value, deque) else type(value)(items)


def _is_mark(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {_KIND, _STATE}


def _find(mark: dict[str, Any], held: Sequence[Any]) -> Any:
    kind = mark[_KIND]
    found = (each for each in held if has_state_dict(each) and type(each).__qualname__ == kind)
    return next(found, None)


def _items(value: Any, held: Sequence[Any]) -> Iterator[tuple[Any, list[Any]]]:
    """Yield what is in a container, with what states have in the same place."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield item, [each[key] for each in held if isinstance(each, dict) and key in each]
    elif isinstance(value, list | tuple | deque):
        lists = [each for each in held if isinstance(each, list | tuple | deque)]
        for number, item in enumerate(value):
            yield item, [each[number] for each in lists if number < len(each)]
