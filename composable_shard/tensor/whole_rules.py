"""Ops on whole tensors: those that this rank holds, and gathered ones for rare ops.

[Note: Gathered operands]
A few ops have no meaning on one rank's range, and users call them on parameters at rest all the
same. They run on whole tensors, which every rank gathers: one all-gather for each shard. Results
are plain tensors, the same on all ranks. All other ops raise, and so does every op that writes.
`cat` raises too, because libraries flatten tensors with it to reduce or broadcast them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composable_shard.tensor.flat_shard import FlatShard, whole_of, wrap
from composable_shard.tensor.operands import (
    note_write,
    schema_arguments,
    shards_in,
    tensors_in,
)
from composable_shard.tensor.reduction_rules import check_scope, is_alone
from composable_shard.tensor.view_rules import Geometry, run_of
from composable_shard.torch_private import (
    OpOverload,
    is_in_step,
    schema_of,
    storage_of,
)

# By name, of all overloads.
_READ = """
    sum mean nansum prod var std var_mean std_mean amax amin aminmax max min _foreach_max any all
    count_nonzero logsumexp linalg_vector_norm norm _foreach_norm argmax argmin topk sort kthvalue
    median nanmedian mode histc _unique2 equal allclose
"""
_READS = frozenset(_READ.split())


def on_gathered(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Return a function that runs an op on whole tensors that all ranks gather, or None.

    [Note: Gathered operands]
    """
    name = schema_of(func).name.removeprefix("aten::")
    if name not in _READS:
        return None
    operands = (args, tuple(kwargs.values()))
    shards = shards_in(operands)
    if any(shard._shard_spec.owner is not None for shard in shards):
        if is_in_step():
            return None  # runs on the owner alone
        if all(shard._guard is None for shard in shards):
            check_scope(func, shards[0])
    is_mixed = len(shards) < len(list(tensors_in(operands)))
    if is_mixed or any(is_alone(shard._shard_spec) for shard in shards):
        return None
    return partial(_run_gathered, func, args, kwargs)


def _run_gathered(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gathered: dict[int, Tensor] = {}

    def gather(shard: FlatShard) -> Tensor:
        return gathered.setdefault(id(shard), shard.gathered())

    options = {name: _replaced(value, gather) for name, value in kwargs.items()}
    return func(*_replaced(args, gather), **options)


def on_whole(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Return a function that runs an op on whole tensors; None if this rank lacks any of them."""
    operands = (args, tuple(kwargs.values()))
    shards = shards_in(operands)
    if not all(shard._shard_spec.is_whole for shard in shards):
        return None
    for shard in shards if torch.is_grad_enabled() else ():
        spec = shard._shard_spec
        if shard.requires_grad and spec.owner is not None and not spec.is_alone:
            return None  # the other ranks raise, so this one must too
    return partial(_run, func, args, kwargs)


def _run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for shard in _written(func, args, kwargs):
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
        return type(result)(_wrap(item, shards, originals, is_elementwise) for item in result)
    return _wrap(result, shards, originals, is_elementwise)


def _written(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[FlatShard]:
    for position, argument in enumerate(schema_arguments(func)):
        if argument.is_write:
            value = kwargs.get(argument.name)
            yield from shards_in(args[position] if position < len(args) else value)


def _replaced(value: Any, by: Callable[[FlatShard], Tensor]) -> Any:
    """Return an argument with whole tensors in place of shards."""
    if isinstance(value, FlatShard):
        return by(value)
    if isinstance(value, list | tuple):
        return type(value)(_replaced(item, by) for item in value)
    return value


def _wrap(
    result: Any, shards: list[FlatShard], originals: dict[int, Tensor], is_elementwise: bool
) -> Any:
    """Return a result in the user's form: the written shard, a view, a shard, or a plain tensor."""
    if not isinstance(result, Tensor) or id(result) in originals:
        return originals.get(id(result), result)
    if isinstance(result, DTensor):
        return _wrap_distributed(result, shards, is_elementwise)
    for shard in shards:
        if _is_view(result, shard):
            return _view_of(shard, result)
    specs = [shard._shard_spec for shard in shards]
    if is_elementwise and result.shape == specs[0].shape and all(s == specs[0] for s in specs):
        return wrap(specs[0].flatten(result), specs[0])
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
