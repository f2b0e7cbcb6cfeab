"""Encode nested Python values as JSON, with tensors by name.

Decoding executes nothing. It returns numbers, strings, lists, tuples, dicts, sets, bytes, dtypes,
`collections.Counter` (torch's schedulers have some), `collections.deque`, and tensors that the
caller looks up by name.
Decoded values are equal to the encoded ones. A subclass, such as a named tuple, becomes the plain
class.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from composable_shard.dtensors import is_dtensor
from composable_shard.tensor import FlatShard, joined, parts_of

_SEQUENCES = {"__tuple__": tuple, "__set__": set, "__frozenset__": frozenset}
_AS_THEY_ARE = frozenset({str, bool, type(None)})  # most of what is in lists and options
_ESCAPES = str.maketrans({"~": "~0", "/": "~1", "#": "~2"})  # in components of a path
_MAX_BITS = 14_000  # Python reads no longer numbers: sys.get_int_max_str_digits()
_MARKS = frozenset(
    {"__tensor__", "__dict__", "__bytes__", "__float__", "__dtype__", "__counter__", "__deque__"}
    | {"__parts__"}
    | _SEQUENCES.keys()
)


class Elsewhere:
    """A tensor whose elements stay in a file; `encode` collects it as it does tensors."""


def encode(value: Any, path: str, tensors: dict[str, Any]) -> Any:
    """Return a JSON value; collect the tensors in `value` by names that begin with `path`.

    Names depend only on the path, so that ranks with different parts of a tree use the same ones.
    """
    match value:
        case dict():
            return _encode_dict(value, path, tensors)
        case Tensor():
            _check_has_elements(value, path)
            return _encode_tensor(value, path, tensors)
        case None | bool() | str():
            return value
        case int() if value.bit_length() <= _MAX_BITS:
            return int(value)
        case float():
            number = float(value)
            return number if math.isfinite(number) else {"__float__": repr(number)}
        case Elsewhere():
            tensors[path] = value
            return {"__tensor__": path}
        case torch.dtype():
            return {"__dtype__": str(value).removeprefix("torch.")}
        case bytes() | bytearray():
            return {"__bytes__": base64.b64encode(value).decode()}
        case list() | tuple() | set() | frozenset() | deque():
            return _encode_sequence(value, path, tensors)
    raise ValueError(
        f"can't save '{path}', a {type(value).__module__}.{type(value).__qualname__}: a checkpoint "
        "holds tensors, numbers, strings, bytes, None, and lists, tuples, sets, deques, dicts of "
        "them. Nothing is pickled, so that nothing is executed on loading. Save a description of "
        "the object instead, for example its state_dict()."
    )


def _encode_tensor(value: Tensor, path: str, tensors: dict[str, Any]) -> Any:
    """Encode a tensor; of a vector in parts, [Note: Vectors in parts], each part."""
    parts = parts_of(value) if isinstance(value, FlatShard) else [value]
    if len(parts) == 1:
        tensors[path] = value
        return {"__tensor__": path}
    names = [f"{path}/{number}" for number in range(len(parts))]
    tensors |= dict(zip(names, parts, strict=True))
    return {"__parts__": [{"__tensor__": name} for name in names]}


def _encode_sequence(value: Any, path: str, tensors: dict[str, Any]) -> Any:
    items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
    encoded = [
        item
        if (kind := type(item)) in _AS_THEY_ARE or (kind is int and item.bit_length() <= _MAX_BITS)
        else encode(item, f"{path}/{n}", tensors)
        for n, item in enumerate(items)
    ]
    if isinstance(value, list):
        return encoded
    if isinstance(value, deque):
        return {"__deque__": [value.maxlen, encoded]}
    return {next(m for m, kind in _SEQUENCES.items() if isinstance(value, kind)): encoded}


def _check_has_elements(value: Tensor, path: str) -> None:
    """Check that a tensor has its elements in memory, where they can be read and written again."""
    if isinstance(value, FlatShard):
        value = value._local  # not to_local(): [Note: Late reads]
    elif is_dtensor(value):
        value = value.to_local()
    is_dense = value.layout is torch.strided and not (value.is_quantized or value.is_nested)
    # A subclass that wraps other tensors has no memory of its own.
    is_dense &= not (value.numel() > 0 and is_dense and value.data_ptr() == 0)
    if not is_dense or value.is_meta:
        kind = "on the meta device" if value.is_meta else f"of the layout {value.layout}"
        raise ValueError(
            f"can't save '{path}', a {type(value).__qualname__} {kind}: only dense tensors with "
            "elements in memory can be saved. Save what it consists of instead; of quantised "
            "optimizer state, plain tensors: get_optimizer_state_dict(full_state_dict=True)."
        )


def _encode_dict(value: dict[Any, Any], path: str, tensors: dict[str, Any]) -> Any:
    pairs: list[tuple[Any, Any]] = []
    for key, item in value.items():
        part = key.translate(_ESCAPES) if type(key) is str else _component(key, path)
        is_leaf = type(item) in _AS_THEY_ARE
        pairs.append((key, item if is_leaf else encode(item, f"{path}/{part}", tensors)))
    is_counter = isinstance(value, Counter)
    has_names = set(map(type, value)) <= {str} or all(isinstance(key, str) for key in value)
    if has_names and not (is_counter or _MARKS & value.keys()):
        return dict(pairs)
    in_keys: dict[str, Tensor] = {}
    encoded = [[encode(key, path, in_keys), item] for key, item in pairs]
    if in_keys:
        raise ValueError(f"can't save '{path}': a key of it has a tensor in it")
    return {"__counter__" if is_counter else "__dict__": encoded}


def _component(key: Any, path: str) -> str:
    """Return a key's component of a path, unique for each key."""
    if isinstance(key, str):
        return key.translate(_ESCAPES)
    if key is None or isinstance(key, bool | int | float | tuple):
        return "#" + repr(key).replace("/", "~1")
    raise ValueError(f"can't save '{path}': a key of it is a {type(key).__qualname__}")


def tensor_name(encoded: Any) -> str | None:
    """Return the name of an encoded tensor, None for any other value."""
    if isinstance(encoded, dict) and isinstance(name := encoded.get("__tensor__"), str):
        return name
    return None


def tensor_names(encoded: Any) -> list[str]:
    """Return the names of the tensors in an encoded value, in any order."""
    found: list[str] = []
    waiting = [encoded]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += each
        elif isinstance(each, dict):
            if isinstance(name := each.get("__tensor__"), str):
                found.append(name)
            else:
                waiting += each.values()
    return found


def decode(encoded: Any, find_tensor: Callable[[str], Any]) -> Any:
    """Return the value that `encode` has encoded; `find_tensor` returns the tensor of a name."""
    if isinstance(encoded, list):
        return [decode(item, find_tensor) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if not _MARKS & encoded.keys():
        return {key: decode(item, find_tensor) for key, item in encoded.items()}
    # A dict with a key like a mark was encoded as pairs, so a mark is alone and none of the user's.
    ((mark, content),) = encoded.items()
    if mark == "__tensor__":
        return find_tensor(content)
    if mark in ("__float__", "__dtype__", "__bytes__"):
        return _decode_leaf(mark, content)
    if mark in ("__dict__", "__counter__"):
        pairs = {decode(key, find_tensor): decode(item, find_tensor) for key, item in content}
        return Counter(pairs) if mark == "__counter__" else pairs
    if mark == "__deque__":
        maxlen, items = content
        return deque((decode(item, find_tensor) for item in items), maxlen)
    found = [decode(item, find_tensor) for item in content]
    return joined(found) if mark == "__parts__" else _SEQUENCES[mark](found)


def _decode_leaf(mark: str, content: Any) -> Any:
    if mark == "__float__":
        return float(content)
    if mark == "__dtype__":
        return torch.empty(0, dtype=getattr(torch, content)).dtype  # no other attributes of torch
    return base64.b64decode(content, validate=True)


def merge(first: Any, second: Any, depth: int) -> Any:
    """Return an encoded tree with the entries of both; where both have one, the first's.

    Dicts are joined down to `depth` levels; below that, values are not joined.
    """
    if depth == 0 or not (isinstance(first, dict) and isinstance(second, dict)):
        return first
    if first.keys() == second.keys() == {"__dict__"}:
        one = {json.dumps(key): item for key, item in first["__dict__"]}
        two = {json.dumps(key): item for key, item in second["__dict__"]}
        joined = {key: merge(one.get(key, item), item, depth - 1) for key, item in two.items()}
        joined = {key: joined.get(key, item) for key, item in one.items()} | joined
        return {"__dict__": [[json.loads(key), item] for key, item in joined.items()]}
    if _MARKS & (first.keys() | second.keys()):
        return first
    merged = {key: merge(item, second.get(key, item), depth - 1) for key, item in first.items()}
    return merged | {key: item for key, item in second.items() if key not in first}
