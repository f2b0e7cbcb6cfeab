"""Nested values in messages between ranks, with small tensors in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from composable_shard.state_dict import json_tree

_MAX_NUMEL = 16  # of tensors whose elements are in messages


def pack(value: Any, tensors: dict[str, Tensor]) -> list[Any]:
    """Return JSON that stands for a nested value; collect its tensors by name.

    A tensor of more than 16 elements is described without its elements. Raises ValueError for
    values that no checkpoint can hold.
    """
    tree = json_tree.encode(value, "", tensors)
    small = {name: t for name, t in tensors.items() if t.numel() <= _MAX_NUMEL}
    found = dict(zip(small, _bytes_of_each([*small.values()]), strict=True))
    told = {
        name: [list(t.shape), json_tree.encode(t.dtype, name, {}), found.get(name)]
        for name, t in tensors.items()
    }
    return [tree, told]


def unpack(
    packed: list[Any], fetch: Callable[[str, Tensor], Tensor] = lambda name, empty: empty
) -> Any:
    """Return a packed value, tensors on the CPU.

    `fetch` returns a large tensor, given its name and a meta tensor like it; by default that one.
    """
    told = json_tree.decode(packed[1], lambda name: None)

    def find(name: str) -> Tensor:
        shape, dtype, data = told[name]
        empty = torch.empty(shape, dtype=dtype, device="meta")
        return fetch(name, empty) if data is None else from_bytes(bytes.fromhex(data), empty)

    return json_tree.decode(packed[0], find)


def _bytes_of_each(values: Sequence[Tensor]) -> list[str]:
    """Return each tensor's elements as hexadecimal bytes; one copy from each device."""
    flat = [_flat_bytes(value) for value in values]
    found = [""] * len(values)
    for device in {each.device for each in flat}:
        here = [number for number, each in enumerate(flat) if each.device == device]
        joined = to_bytes(torch.cat([flat[number] for number in here])).hex()
        ends = [0, *accumulate([2 * flat[number].numel() for number in here])]
        for number, start, end in zip(here, ends[:-1], ends[1:], strict=True):
            found[number] = joined[start:end]
    return found


def to_bytes(value: Tensor) -> bytes:
    """Return a tensor's elements as bytes."""
    return bytes(_flat_bytes(value).cpu().tolist())


def _flat_bytes(value: Tensor) -> Tensor:
    """Return a tensor's elements in a row, as bytes, of a view of any kind."""
    flat = value.detach().reshape(-1)
    if flat.stride(0) != 1 or flat.is_conj() or flat.is_neg():  # no bytes to show as they are
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def from_bytes(data: bytes, like: Tensor) -> Tensor:
    """Return the tensor of some bytes that has the shape and dtype of another one."""
    if not data:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=like.dtype).view(like.shape)
