"""Fills whose values depend on an element's place: random draws and the identity matrix.

They compute the dense tensor, in its own memory layout and with the given generator, and keep this
rank's slice, so that the values are those of the unsharded tensor for any world size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from composable_shard._flat_shard import FlatShard, wrap
from composable_shard._operands import note_write, unsupported, write_to_plain
from composable_shard._rule_table import Rule

__all__ = ["RULES"]

aten = torch.ops.aten


def _empty_flat(shard: FlatShard) -> Tensor:
    return shard._local.new_empty(shard._shard_spec.numel)


def _keep_slice(shard: FlatShard, flat: Tensor) -> None:
    start, end = shard._shard_spec.local_range
    shard._local.copy_(flat[start:end])


def _fill(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShard:
    """Run an in-place random fill."""
    shard = args[0]
    if not isinstance(shard, FlatShard) or any(isinstance(arg, Tensor) for arg in args[1:]):
        raise unsupported(func, args)
    note_write(shard)
    if not shard._local.is_meta:
        flat = _empty_flat(shard)
        func(shard._shard_spec.unflatten(flat), *args[1:], **kwargs)
        _keep_slice(shard, flat)
    return shard


def _draw_like(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShard:
    """Run an out-of-place random draw in the shape of its first argument."""
    shard: FlatShard = args[0]
    spec = shard._shard_spec
    if shard._local.is_meta:
        return wrap(func(shard._local, *args[1:], **kwargs), spec)
    drawn = func(spec.unflatten(_empty_flat(shard)), *args[1:], **kwargs)
    dense = drawn.to_local() if isinstance(drawn, DTensor) else drawn
    return wrap(spec.slice(dense).clone(), spec)  # a view would keep the whole tensor alive


def _eye(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShard:
    """Run `torch.eye(rows, columns, out=shard)`."""
    shard = kwargs["out"]
    if not isinstance(shard, FlatShard):
        raise write_to_plain(func, shard, args)
    rows, columns = args[0], args[1] if len(args) > 1 else args[0]
    spec = shard._shard_spec
    if (rows, columns) != tuple(spec.shape) or spec.tensor_parallel is not None:
        raise unsupported(func, (shard,))
    note_write(shard)
    if not shard._local.is_meta:
        flat = _empty_flat(shard)
        spec.unflatten(flat).copy_(torch.eye(rows, columns, dtype=flat.dtype, device=flat.device))
        _keep_slice(shard, flat)
    return shard


RULES: dict[OpOverload, Rule] = {
    aten.normal_.default: _fill,
    aten.uniform_.default: _fill,
    aten.bernoulli_.float: _fill,
    aten.exponential_.default: _fill,
    aten.random_.default: _fill,
    getattr(aten.random_, "from"): _fill,
    aten.random_.to: _fill,
    aten.log_normal_.default: _fill,
    aten.cauchy_.default: _fill,
    aten.geometric_.default: _fill,
    aten.rand_like.default: _draw_like,
    aten.randn_like.default: _draw_like,
    aten.randint_like.default: _draw_like,
    aten.randint_like.low_dtype: _draw_like,
    aten.eye.out: _eye,
    aten.eye.m_out: _eye,
}
