"""Ops on whole tensors: where this rank holds them, and the general way for rare ops elsewhere.

[Note: Gathered operands]
A few ops have no meaning on one rank's range, and users call them on parameters at rest all the
same. They run on whole tensors, which every rank gathers: one all-gather for each shard. Results
are plain tensors, the same on all ranks. All other ops raise, and every op that writes. Not `cat`,
by which others flatten what they then reduce or broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composable_shard.tensor.flat_shard import FlatShard, whole_of
from composable_shard.tensor.operands import note_write, schema_arguments
from composable_shard.tensor.reduction_rules import check_scope, is_alone
from composable_shard.torch_private import (
    OpOverload,
    is_in_step,
    schema_of,
    storage_of,
    tree_map_only,
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
    """Return what runs an op on whole tensors that all ranks gather, or None.

    [Note: Gathered operands]
    """
    name = schema_of(func).name.removeprefix("aten::")
    operands = (args, tuple(kwargs.values()))
    shards = list(_shards(operands))
    if name not in _READS:
        return None
    if any(shard._shard_spec.owner is not None for shard in shards):
        if is_in_step():
            return None  # runs on the owner alone
        if all(shard._guard is None for shard in shards):
            check_scope(func, shards[0])
    is_mixed = len(shards) < len(list(_leaves(operands)))
    if is_mixed or any(is_alone(shard._shard_spec) for shard in shards):
        return None
    return partial(_run, func, args, kwargs, FlatShard.full_tensor)


def on_whole(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Return what runs an op on whole tensors, None where this rank does not hold all of them."""
    operands = (args, tuple(kwargs.values()))
    shards = list(_shards(operands))
    if not all(shard._shard_spec.is_whole for shard in shards):
        return None
    for shard in shards if torch.is_grad_enabled() else ():
        spec = shard._shard_spec
        if shard.requires_grad and spec.owner is not None and not spec.is_alone:
            return None  # as on the other ranks, which would be waited for
    return partial(_run, func, args, kwargs, whole_of)


def _leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, Tensor):
        yield value


def _shards(value: Any) -> Iterator[FlatShard]:
    return (leaf for leaf in _leaves(value) if isinstance(leaf, FlatShard))


def _run(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    take: Callable[[FlatShard], Tensor],
) -> Any:
    """Run an op on what `take` makes of shards; return the shards that it writes as they are."""
    for position, argument in enumerate(schema_arguments(func)):
        if argument.is_write:
            value = kwargs.get(argument.name)
            for shard in _shards(args[position] if position < len(args) else value):
                note_write(shard)
    wholes: dict[FlatShard, Tensor] = {}

    def whole(shard: FlatShard) -> Tensor:
        if shard not in wholes:
            wholes[shard] = take(shard)
        return wholes[shard]

    whole_args, options = tree_map_only(FlatShard, whole, (args, kwargs))
    result = func(*whole_args, **options)
    shards = {id(tensor): shard for shard, tensor in wholes.items()}
    return tree_map_only(Tensor, partial(_as_shard, shards), result)


def _as_shard(shards: dict[int, FlatShard], result: Tensor) -> Tensor:
    """Return the shard whose whole tensor is a result; a view is plain, and counts as a write."""
    if id(result) in shards:
        return shards[id(result)]
    for shard in () if isinstance(result, DTensor) else shards.values():
        if shard._guard is not None and storage_of(result) == storage_of(shard._local):
            shard._guard.count_write()  # writes into a plain view are not seen
    return result
