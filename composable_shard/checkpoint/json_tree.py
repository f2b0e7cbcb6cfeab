"""Nested Python values as JSON: what a checkpoint holds besides tensors, which it only names.

Nothing is executed on reading: what comes back is numbers, strings, lists, tuples, dicts, sets,
bytes, `collections.Counter` (in torch's schedulers), and tensors that the caller looks up by name.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["decode", "encode", "merge", "tensor_name"]


_MARKS = frozenset(
    {"__tensor__", "__dict__", "__tuple__", "__set__", "__bytes__", "__float__", "__counter__"}
)


def encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return a JSON value, and collect the tensors in `value` by names that begin with `path`.

    Names depend on the path alone, so that ranks with different parts of a tree agree on them.

    Raises:
        ValueError: For a value that JSON can't hold, naming its path.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        number = float(value)
        return number if math.isfinite(number) else {"__float__": repr(number)}
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"__tensor__": path}
    return _encode_container(value, path, tensors)


def _encode_container(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        return _encode_dict(value, path, tensors)
    if isinstance(value, bytes | bytearray):
        return {"__bytes__": base64.b64encode(value).decode()}
    if isinstance(value, list | tuple | set | frozenset):
        is_set = isinstance(value, set | frozenset)
        items = sorted(value, key=repr) if is_set else value
        encoded = [encode(item, f"{path}/{n}", tensors) for n, item in enumerate(items)]
        if isinstance(value, list):
            return encoded
        return {"__set__" if is_set else "__tuple__": encoded}
    raise ValueError(
        f"can't save '{path}', a {type(value).__module__}.{type(value).__qualname__}: a checkpoint "
        "holds tensors, numbers, strings, bytes, None, and lists, tuples, sets and dicts of them. "
        "Nothing is pickled, so that nothing is executed on loading: save what describes the "
        "object, its state_dict() for example."
    )


def _encode_dict(value: dict[Any, Any], path: str, tensors: dict[str, Tensor]) -> Any:
    pairs = [
        (key, encode(item, f"{path}/{_component(key, path)}", tensors))
        for key, item in value.items()
    ]
    if isinstance(value, Counter):
        return {"__counter__": [[encode(key, path, tensors), item] for key, item in pairs]}
    if all(isinstance(key, str) for key, _ in pairs) and not _MARKS & value.keys():
        return dict(pairs)
    return {"__dict__": [[encode(key, path, tensors), item] for key, item in pairs]}


def _component(key: Any, path: str) -> str:
    """Return a key's part of a path, another for each key."""
    if isinstance(key, str):
        return key.replace("~", "~0").replace("/", "~1").replace("#", "~2")
    if key is None or isinstance(key, bool | int | float | tuple):
        return "#" + repr(key).replace("/", "~1")
    raise ValueError(f"can't save '{path}': a key of it is a {type(key).__qualname__}")


def tensor_name(encoded: Any) -> str | None:
    """Return the name where an encoded value is a tensor."""
    if isinstance(encoded, dict) and isinstance(name := encoded.get("__tensor__"), str):
        return name
    return None


def decode(encoded: Any, find_tensor: Callable[[str], Any]) -> Any:
    """Return the value that was encoded.

    Args:
        encoded: What `encode` returned.
        find_tensor: Returns what stands for the tensor of a name.

    Raises:
        ValueError: If nothing can have been encoded so.
    """
    if isinstance(encoded, list):
        return [decode(item, find_tensor) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if not _MARKS & encoded.keys():
        return {key: decode(item, find_tensor) for key, item in encoded.items()}
    ((mark, content),) = encoded.items()
    if mark == "__tensor__":
        return find_tensor(content)
    if mark == "__float__":
        return float(content)
    if mark == "__bytes__":
        return base64.b64decode(content, validate=True)
    if mark in ("__dict__", "__counter__"):
        pairs = {decode(key, find_tensor): decode(item, find_tensor) for key, item in content}
        return Counter(pairs) if mark == "__counter__" else pairs
    items = [decode(item, find_tensor) for item in content]
    return set(items) if mark == "__set__" else tuple(items)


def merge(first: Any, second: Any) -> Any:
    """Return an encoded tree with the entries of both; where both have one, the first's."""
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return first
    if _MARKS & (first.keys() | second.keys()):
        return first
    merged = {key: merge(item, second.get(key, item)) for key, item in first.items()}
    return merged | {key: item for key, item in second.items() if key not in first}
