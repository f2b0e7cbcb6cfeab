"""Ops on whole tensors: those that this rank holds, and gathered ones.

The schema of an op says what it reads, writes and returns, and its tags what kind it is; there is
no rule by name. See [Note: Gathered operands].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from composable_shard.dtensors import is_dtensor
from composable_shard.tensor.flat_shard import FlatShard, whole_of, wrap
from composable_shard.tensor.gathering import base_of, gather_bases, may_gather, view_of_whole
from composable_shard.tensor.operands import (
    note_write,
    shards_in,
    slice_given,
    tensors_in,
    written_in,
)
from composable_shard.tensor.owned_numbers import mark
from composable_shard.tensor.shard_spec import ShardSpec
from composable_shard.tensor.strided_view import Geometry, StridedView
from composable_shard.tensor.view_rules import run_of
from composable_shard.tensor.write_guard import RUNNING
from composable_shard.torch_private import OpOverload, storage_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def on_gathered(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Return a function that runs an op on whole tensors that all ranks gather, or None.

    [Note: Gathered operands]
    """
    if not may_gather(func, args, kwargs):
        return None
    if any(is_dtensor(item) for item in written_in(func, args, kwargs)):
        return None
    return partial(_run_gathered, func, args, kwargs)


def _run_gathered(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shards = shards_in((args, tuple(kwargs.values())))
    written = shards_in(list(written_in(func, args, kwargs)))
    for shard in written:  # may raise: before anything is sent
        note_write(shard)
    if written:
        RUNNING.wholes.drop()
    wholes = gather_bases(func, shards)
    originals: dict[int, Tensor] = {}  # the operand of each whole tensor

    def whole_operand(tensor: Tensor) -> Tensor:
        whole = tensor
        if isinstance(tensor, FlatShard):
            whole = view_of_whole(tensor, wholes[id(base_of(tensor))])
        elif is_dtensor(tensor):
            whole = tensor.full_tensor()
        originals[id(whole)] = tensor
        return whole

    options = {name: _replaced(value, whole_operand, Tensor) for name, value in kwargs.items()}
    result = func(*_replaced(args, whole_operand, Tensor), **options)
    for base in {id(base): base for base in map(base_of, written)}.values():
        if not base._shard_spec.holds_all:  # of that the whole tensor is the memory itself
            base._local.copy_(slice_given(wholes[id(base)], base._shard_spec))

    def returned(item: Any) -> Any:
        return originals[id(item)] if id(item) in originals else _cut(item, shards)

    if isinstance(result, tuple):
        # Of several results (values and indices, factors) users take parts next: stays whole.
        return tuple(originals.get(id(item), item) for item in result)
    return list(map(returned, result)) if isinstance(result, list) else returned(result)


def _cut(result: Any, shards: list[FlatShard]) -> Any:
    """Return a result as a shard if it has the shape of an operand, else as it is."""
    if not isinstance(result, Tensor) or result.numel() <= 1:
        return result
    for spec in (base_of(shard)._shard_spec for shard in shards):
        if result.shape == spec.shape and not spec.holds_all and spec.owner is None:
            laid_out = _laid_out_as(result, spec)
            shard = wrap(slice_given(result, laid_out).clone(), laid_out)
            if RUNNING.steps:
                RUNNING.wholes.keep(shard, result)
            return shard
    return result


def _laid_out_as(result: Tensor, spec: ShardSpec) -> ShardSpec:
    """Return the spec with a dense result's own memory order, which users may have asked for."""
    geometry = Geometry(result.shape, result.stride(), 0)
    if spec.tensor_parallel is not None or result.stride() == spec.stride:
        return spec
    return replace(spec, dense_stride=geometry.stride) if geometry.is_one_run else spec


def on_whole(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Return a function that runs an op on whole tensors; None if this rank lacks any of them."""
    operands = (args, tuple(kwargs.values()))
    shards = shards_in(operands)
    if not all(x._shard_spec.is_whole and not isinstance(x, StridedView) for x in shards):
        return None
    for shard in shards if torch.is_grad_enabled() else ():
        spec = shard._shard_spec
        if shard.requires_grad and spec.owner is not None and not spec.is_alone:
            return None  # the other ranks raise, so this one must too
    return partial(_run, func, args, kwargs)


def _run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for shard in shards_in(list(written_in(func, args, kwargs))):
        note_write(shard)
    originals: dict[int, Tensor] = {}  # the shard of each whole tensor

    def view(shard: FlatShard) -> Tensor:
        whole = whole_of(shard)
        originals[id(whole)] = shard
        return whole

    options = {name: _replaced(value, view) for name, value in kwargs.items()}
    whole_args = _replaced(args, view)
    result = func(*whole_args, **options)
    shards = shards_in((args, tuple(kwargs.values())))
    is_elementwise = torch.Tag.pointwise in func.tags
    if isinstance(result, list | tuple):
        result = type(result)(_wrap(item, shards, originals, is_elementwise) for item in result)
    else:
        result = _wrap(result, shards, originals, is_elementwise)
    if RUNNING.steps:
        _mark_numbers(result, shards)
    return result


def _mark_numbers(result: Any, shards: list[FlatShard]) -> None:
    """Note of which parameters the numbers in a step's result are, [Note: Numbers of owners]."""
    specs = [shard._shard_spec for shard in shards]
    sources = frozenset(
        spec.label for spec in specs if spec.owner is not None and not spec.is_alone
    )
    for item in tensors_in(result):
        if item.numel() == 1:  # parts of joined tensors may be of one parameter again
            mark(item, sources)


def _replaced(value: Any, by: Callable[[Any], Tensor], kind: type[Tensor] = FlatShard) -> Any:
    """Return an argument with whole tensors in place of tensors of a kind."""
    if isinstance(value, kind):
        return by(value)
    if isinstance(value, list | tuple):
        return type(value)(_replaced(item, by, kind) for item in value)
    return value


def _wrap(
    result: Any, shards: list[FlatShard], originals: dict[int, Tensor], is_elementwise: bool
) -> Any:
    """Return a result in the user's form: the written shard, a view, a shard, or a plain tensor."""
    if not isinstance(result, Tensor) or id(result) in originals:
        return originals.get(id(result), result)
    if is_dtensor(result):
        return _wrap_distributed(result, shards, is_elementwise)
    for shard in shards:
        if _is_view(result, shard):
            return _view_of(shard, result)
    specs = [shard._shard_spec for shard in shards]
    if is_elementwise and result.shape == specs[0].shape and all(s == specs[0] for s in specs):
        spec = _laid_out_as(result, specs[0])
        return wrap(spec.flatten(result), spec)
    return result


def _view_of(shard: FlatShard, view: Tensor) -> Tensor:
    """Return a view of a whole shard's memory as a shard, or as it is if it can't be one."""
    start = int(view.storage_offset() - shard._local.storage_offset())
    geometry = Geometry(view.shape, view.stride(), start)
    if geometry.is_one_run:
        return run_of(shard, geometry)
    if shard._guard is not None:
        shard._guard.count_write()  # later writes into a plain view are not seen
    return view


def _is_view(result: Tensor, shard: FlatShard) -> bool:
    if result.dtype != shard.dtype or not result.numel():
        return False
    return storage_of(result) == storage_of(shard._local)


def _wrap_distributed(result: DTensor, shards: list[FlatShard], is_elementwise: bool) -> Tensor:
    spec = shards[0]._shard_spec
    mesh = (result.device_mesh, tuple(result.placements))
    if not (is_elementwise and result.shape == spec.shape and mesh == spec.tensor_parallel):
        return result
    return wrap(spec.flatten(result.to_local()), spec)
