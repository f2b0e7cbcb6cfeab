"""Ops on whole tensors, where this rank holds every operand whole; [Note: Whole shards]."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from composable_shard._flat_shard import FlatShard, wrap
from composable_shard._operands import note_write, schema_arguments
from composable_shard._view_rules import FlatRegion, view_of

__all__ = ["on_whole"]


def on_whole(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Return what runs an op on whole tensors, None where this rank does not hold all of them."""
    shards = _shards((args, tuple(kwargs.values())))
    if not all(shard._shard_spec.is_whole for shard in shards):
        return None
    return partial(_run, func, args, kwargs)


def _shards(value: Any) -> Iterator[FlatShard]:
    if isinstance(value, FlatShard):
        yield value
    elif isinstance(value, FlatRegion):
        yield value._shard
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _shards(item)


def _run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for shard in _written(func, args, kwargs):
        note_write(shard)
    originals: dict[int, Tensor] = {}
    whole_args = _unwrap(args, originals)
    whole_kwargs = {name: _unwrap(value, originals) for name, value in kwargs.items()}
    result = func(*whole_args, **whole_kwargs)
    shards = list(_shards((args, tuple(kwargs.values()))))
    is_elementwise = torch.Tag.pointwise in func.tags
    if isinstance(result, list | tuple):
        return type(result)(_wrap(item, shards, originals, is_elementwise) for item in result)
    return _wrap(result, shards, originals, is_elementwise)


def _written(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[FlatShard]:
    for position, argument in enumerate(schema_arguments(func)):
        if argument.is_write:
            value = kwargs.get(argument.name)
            yield from _shards(args[position] if position < len(args) else value)


def _unwrap(value: Any, originals: dict[int, Tensor]) -> Any:
    """Replace shards by whole tensors, and remember what each stands for."""
    if isinstance(value, FlatShard | FlatRegion):
        whole = value._whole()
        originals[id(whole)] = value
        return whole
    if isinstance(value, list | tuple):
        return type(value)(_unwrap(item, originals) for item in value)
    return value


def _wrap(
    result: Any, shards: list[FlatShard], originals: dict[int, Tensor], is_elementwise: bool
) -> Any:
    """Return what stands for a result: what was written, a view, a shard, or the plain result."""
    if not isinstance(result, Tensor) or id(result) in originals:
        return originals.get(id(result), result)
    if isinstance(result, DTensor):
        return _wrap_distributed(result, shards, is_elementwise)
    for shard in shards:
        if _is_view(result, shard):
            return view_of(shard, result)
    if is_elementwise and shards[0].shape == result.shape and _is_of_one(shards):
        spec = shards[0]._shard_spec
        return wrap(spec.flatten(result), spec)
    return result


def _is_of_one(shards: list[FlatShard]) -> bool:
    return all(shard._shard_spec == shards[0]._shard_spec for shard in shards)


def _is_view(result: Tensor, shard: FlatShard) -> bool:
    if result.dtype != shard.dtype or not result.numel():
        return False
    return result.untyped_storage().data_ptr() == shard._local.untyped_storage().data_ptr()


def _wrap_distributed(result: DTensor, shards: list[FlatShard], is_elementwise: bool) -> Tensor:
    spec = shards[0]._shard_spec
    mesh = (result.device_mesh, tuple(result.placements))
    if not (is_elementwise and result.shape == spec.shape and mesh == spec.tensor_parallel):
        return result
    return wrap(spec.flatten(result.to_local()), spec)
