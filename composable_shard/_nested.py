"""Walk the tensors in what a module returns: tuples, dicts, dataclasses and the like."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

__all__ = ["iter_tensors", "map_tensors"]


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in `value`, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (str, bytes, int, float, type(None))):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from iter_tensors(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from iter_tensors(item)
    else:
        for name in _attributes(value):
            yield from iter_tensors(getattr(value, name))


def _attributes(value: Any) -> list[str]:
    """Return the attributes of a dataclass or plain result object that may hold tensors."""
    if isinstance(value, type):
        return []
    if dataclasses.is_dataclass(value):
        names = [entry.name for entry in dataclasses.fields(value)]
        return [name for name in names if hasattr(value, name)]
    # One level of attributes is what users write.
    kinds = (Tensor, Mapping, list, tuple)
    return [
        name for name, item in getattr(value, "__dict__", {}).items() if isinstance(item, kinds)
    ]


def map_tensors(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with `fn` applied to every tensor in it.

    Tuples, sets and read-only mappings are rebuilt; other containers and objects are changed in
    place, so their type and whatever else they hold stay.
    """
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, tuple):
        items = [map_tensors(item, fn) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, (set, frozenset)):
        return type(value)(map_tensors(item, fn) for item in value)
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        mapped = {key: map_tensors(item, fn) for key, item in value.items()}
        return type(value)(mapped)  # type: ignore[call-arg]
    if isinstance(value, list):
        value[:] = [map_tensors(item, fn) for item in value]
    elif isinstance(value, MutableMapping):
        for key in list(value):
            value[key] = map_tensors(value[key], fn)
    else:
        for name in _attributes(value):
            # Past a frozen dataclass's own __setattr__.
            object.__setattr__(value, name, map_tensors(getattr(value, name), fn))
    return value
