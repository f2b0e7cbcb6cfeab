"""Optimizer state and options as JSON, exactly: what is small, and what large values are like."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from composable_shard._flat_shard import FlatShard

__all__ = ["decode", "describe", "encode"]

_MAX_NUMEL = 16  # of tensors that are told by value


def describe(value: Any) -> dict[str, Any]:
    """Return what a state value is; `decode` makes it again where it `holds` the value itself."""
    if isinstance(value, FlatShard):
        return {"kind": "shard", "dtype": _name(value.dtype)}
    return encode(value)


def encode(value: Any) -> dict[str, Any]:
    """Return a number, a list of them, or a tensor as JSON; a large tensor without its elements.

    Raises:
        TypeError: For anything else.
    """
    if isinstance(value, Tensor):
        told: dict[str, Any] = {
            "kind": "tensor",
            "dtype": _name(value.dtype),
            "shape": list(value.shape),
        }
        if value.numel() <= _MAX_NUMEL:
            data = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
            told["bytes"] = bytes(data.tolist()).hex()
        return told
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {"kind": kind, "items": [encode(item) for item in value]}
    if isinstance(value, bool | int | float | str | None):
        return {"kind": "plain", "value": value}
    raise TypeError(f"expected a tensor, a number, a string or a list, got {type(value).__name__}")


def decode(told: dict[str, Any]) -> Any:
    """Return the value; of a large tensor an empty one of its shape and dtype, on the CPU."""
    if told["kind"] in ("tuple", "list"):
        items = [decode(item) for item in told["items"]]
        return tuple(items) if told["kind"] == "tuple" else items
    if told["kind"] == "plain":
        return told["value"]
    dtype: torch.dtype = getattr(torch, told["dtype"])
    if "bytes" not in told:
        return torch.empty(told["shape"], dtype=dtype)
    data = bytearray.fromhex(told["bytes"])
    if not data:
        return torch.empty(told["shape"], dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).clone().view(told["shape"])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
