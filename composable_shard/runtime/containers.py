"""The tensors in the inputs and outputs of a forward: containers are looked through, or copied."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

from torch import Tensor, nn

_WHY = "they are cast, or of earlier graphs, or views of full parameters"


def iter_tensors(value: Any, around: tuple[int, ...] = ()) -> Iterator[Tensor]:
    """Yield every tensor in `value`, in order.

    Args:
        around: The `id` of each container around it, as one may contain itself.
    """
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, (str, bytes, int, float, type(None))) or id(value) in around:
        return
    around = (*around, id(value))
    if isinstance(value, Mapping):
        # Before attributes: a dataclass that is a dict too, as of transformers, may have items
        # without a field.
        for item in value.values():
            yield from iter_tensors(item, around)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        for item in value:
            yield from iter_tensors(item, around)
    else:
        for name in _attributes(value):
            yield from iter_tensors(getattr(value, name), around)


def _attributes(value: Any) -> list[str]:
    """Return the attributes of a dataclass or plain result object that may hold tensors.

    A module in an output keeps its parameters and buffers: they are the model's, not results.
    """
    if isinstance(value, (type, nn.Module)):
        return []
    if dataclasses.is_dataclass(value):
        names = [entry.name for entry in dataclasses.fields(value)]
        return [name for name in names if hasattr(value, name)]
    # One level of attributes is what users write.
    kinds = (Tensor, Mapping, list, tuple, deque)
    return [
        name for name, item in getattr(value, "__dict__", {}).items() if isinstance(item, kinds)
    ]


def map_tensors(
    value: Any,
    fn: Callable[[Tensor], Tensor],
    *,
    looks_into_objects: bool = True,
    around: dict[int, bool] | None = None,
) -> Any:
    """Return `value` with `fn` applied to every tensor in it.

    Containers and objects in which a tensor changes are replaced by shallow copies, because the
    model or its caller may keep the originals: a running state, a cache, a batch. Unless
    `looks_into_objects`, objects that are neither containers nor dataclasses are left alone. So are
    modules, always.

    Args:
        around: Of each container around it the `id`, and whether it contains itself.

    Raises:
        RuntimeError: If a container that contains itself would have to be copied.
    """
    if isinstance(value, Tensor):
        return fn(value)
    around = {} if around is None else around
    if (key := id(value)) in around:
        around[key] = True
        return value
    # Before its items, and `pop` after them: what is in it may be itself.
    around[key], items = False, list[tuple[Any, Any]]()
    mapped = partial(map_tensors, fn=fn, looks_into_objects=looks_into_objects, around=around)
    new = value
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        new = _map_sequence(value, mapped)
    elif isinstance(value, Mapping):
        items = list(value.items())
    elif looks_into_objects or dataclasses.is_dataclass(value):
        items = [(name, getattr(value, name)) for name in _attributes(value)]
    if changed := {name: found for name, old in items if (found := mapped(old)) is not old}:
        new = _changed_copy(value, changed)
    if around.pop(key) and new is not value:
        raise RuntimeError(
            f"the {type(value).__name__} that a forward takes or returns contains itself, and "
            f"tensors in it are replaced ({_WHY}), so it would have to be copied. Take the "
            "reference to itself out."
        )
    return new


def _changed_copy(value: Any, changed: dict[Any, Any]) -> Any:
    """Return a copy of a mapping or an object, with other items or attributes."""
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)({**value, **changed})  # type: ignore[call-arg]
    twin = _copied(value)
    for key, new in changed.items():
        if isinstance(twin, MutableMapping):
            twin[key] = new
        else:
            # Past a frozen dataclass's own __setattr__.
            object.__setattr__(twin, key, new)
    return twin


def _map_sequence(value: Any, mapped: Callable[[Any], Any]) -> Any:
    items = [mapped(item) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    if isinstance(value, (list, deque)):
        twin = _copied(value)  # a deque's with its limit
        twin.clear()
        twin.extend(items)
        return twin
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _copied(value: Any) -> Any:
    try:
        return copy.copy(value)
    except Exception as error:
        raise RuntimeError(
            f"can't copy the {type(value).__name__} that a forward takes or returns, in which "
            f"tensors are replaced ({_WHY}): {error}. Give the class a __copy__ that works, or "
            "pass a dict."
        ) from error
