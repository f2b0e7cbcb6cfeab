"""Nested values in messages between ranks, with small tensors in them."""

from __future__ import annotations

from collections.abc import Callable
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
    told = {
        name: [
            list(t.shape),
            json_tree.encode(t.dtype, name, {}),
            to_bytes(t).hex() if t.numel() <= _MAX_NUMEL else None,
        ]
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


def to_bytes(value: Tensor) -> bytes:
    """Return a tensor's elements as bytes."""
    return bytes(value.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist())


def from_bytes(data: bytes, like: Tensor) -> Tensor:
    """Return the tensor of some bytes that has the shape and dtype of another one."""
    if not data:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=like.dtype).view(like.shape)
