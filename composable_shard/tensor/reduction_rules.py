"""Rules that need all ranks: reductions, norms, random fills.

All ranks of the shard group must call them, and get the same plain 0-dim tensor. Over the axes of
a tensor-parallel mesh that a parameter is sharded on, the parts are reduced too; where it is
replicated it counts once. Half-precision values accumulate in float32 and are rounded once.

Random fills compute the logical tensor, in its own memory layout and with the given generator, and
keep this rank's slice, so that the values are those of the unsharded tensor for any world size.

[Note: Ranks of a reduction]
For any granularity, a reduction to one value is over all ranks, or it raises. All ranks have a
shard, mostly empty, of a parameter that one rank owns: its reduction is a collective like any
other. Its gradient exists only on the owner, which would get a value that the others lack: the
reduction raises, except inside an optimizer's step, which runs on the owner alone.

Sums, means, norms, dot products and extremes reduce the slices, those over some dims by rows,
`dim_reductions`. Any other reduction (a variance, the order of elements) runs on whole tensors,
[Note: Gathered operands].
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard.comm import all_reduce, resolve_group
from composable_shard.tensor.flat_shard import FlatShard, wrap
from composable_shard.tensor.gathering import check_is_on_all_ranks
from composable_shard.tensor.operands import note_write, slice_given, unsupported
from composable_shard.tensor.pointwise_rules import local_operands
from composable_shard.tensor.rule_table import Rule
from composable_shard.tensor.shard_spec import ShardSpec
from composable_shard.torch_private import OpOverload, is_in_step, schema_of

aten = torch.ops.aten
_SUM, _MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
HALF = frozenset({torch.float16, torch.bfloat16})


def reduction_groups(spec: ShardSpec) -> tuple[str, ...]:
    """Return the names of the groups that together hold the whole tensor, one after another."""
    names = (spec.group_name,) if spec.layout.world_size > 1 else ()
    if spec.tensor_parallel is None:
        return names
    mesh, placements = spec.tensor_parallel
    if any(placement.is_partial() for placement in placements):
        raise RuntimeError(
            f"expected '{spec.label.fqn}' to be sharded or replicated on its mesh, "
            f"got {placements}: a reduction of partial sums is not defined"
        )
    return names + tuple(
        mesh.get_group(axis).group_name
        for axis, placement in enumerate(placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    )


def sum_over(values: Tensor, groups: tuple[str, ...]) -> Tensor:
    """Sum `values` over the ranks, in place if the groups can carry the dtype."""
    payload = torch.view_as_real(values) if values.is_complex() else values
    for name in groups:
        all_reduce(payload, resolve_group(name), _SUM).wait()
    return values


def max_over(values: Tensor, groups: tuple[str, ...]) -> Tensor:
    """Return the maximum over the ranks; NaN on any rank gives NaN, as `torch.max` does."""
    if not groups:
        return values
    # Backends compare with std::max or the like, which may lose a NaN: it travels as a flag.
    is_nan = values.isnan()
    payload = torch.stack([values.masked_fill(is_nan, -math.inf), is_nan.to(values.dtype)])
    for name in groups:
        all_reduce(payload, resolve_group(name), _MAX).wait()
    return payload[0].masked_fill(payload[1] > 0, math.nan)


def combine(norms: Tensor, order: float, groups: tuple[str, ...]) -> Tensor:
    """Return the norm of each norm here and those on the other ranks of these groups, in float64.

    One all-reduce for each group.
    """
    norms = norms.double()
    if math.isinf(order):
        return max_over(norms, groups)
    return sum_over(norms.pow(order), groups).pow(1.0 / order)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to accumulate in."""
    return torch.float32 if dtype in HALF else dtype


def shard_of(func: OpOverload, args: tuple[Any, ...]) -> FlatShard:
    """Return the operand of a reduction to one value."""
    shard = args[0]
    if not isinstance(shard, FlatShard) or shard._shard_spec.holds_all:
        raise unsupported(func, args)
    if shard._shard_spec.owner is not None:
        if is_in_step():
            raise unsupported(func, args)  # runs on the whole tensor, on its owner alone
        check_is_on_all_ranks(func, shard)
    return shard


def option(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """Return an argument by name, given or default."""
    place = _places.get((id(func), name))
    if place is None:
        place = _places[id(func), name] = _place_of(func, name)
    position, default = place
    return args[position] if position < len(args) else kwargs.get(name, default)


# Of arguments, and their defaults, by the op's address: its own hash is a function of Python
_places: dict[tuple[int, str], tuple[int, Any]] = {}


def _place_of(func: OpOverload, name: str) -> tuple[int, Any]:
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.name == name:
            return sys.maxsize if argument.kwarg_only else position, argument.default_value
    return sys.maxsize, None


def _sum(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    shard = shard_of(func, args)
    dtype = kwargs.get("dtype") or (shard.dtype if is_inexact(shard.dtype) else torch.int64)
    total = sum_over(shard._local.sum(dtype=wide(dtype)), reduction_groups(shard._shard_spec))
    return total.to(dtype)


def _mean(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    shard = shard_of(func, args)
    dtype = kwargs.get("dtype") or shard.dtype
    if not is_inexact(dtype):
        raise unsupported(func, args)  # torch's error
    total = sum_over(shard._local.sum(dtype=wide(dtype)), reduction_groups(shard._shard_spec))
    return (total / shard.numel()).to(dtype)


def _dot(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    one, other = args
    shard = one if isinstance(one, FlatShard) else other
    shard_of(func, (shard,))
    if one.shape != other.shape or one.dtype != other.dtype:
        raise unsupported(func, args)  # torch's error
    (first, second), spec = local_operands(func, (one, other))
    kind = wide(shard.dtype)
    product = func(first.contiguous().to(kind), second.contiguous().to(kind))
    return sum_over(product, reduction_groups(spec)).to(shard.dtype)


def _extreme(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Run `max`, `min`, `any` or `all` of all elements."""
    shard = shard_of(func, args)
    local, groups = shard._local, reduction_groups(shard._shard_spec)
    if shard.numel() == 0 or shard.dtype.is_complex:
        raise unsupported(func, args)  # torch's error
    if func in (aten.any.default, aten.all.default):
        wanted = func is aten.any.default
        found = ((local != 0) == wanted).any().int()
        return sum_over(found, groups) > 0 if wanted else sum_over(found, groups) == 0
    if not shard.dtype.is_floating_point:
        raise unsupported(func, args)  # rare: gathered
    sign = 1 if func is aten.max.default else -1
    highest = (local * sign).max() if local.numel() else local.new_full((), -math.inf)
    # Negated, not the minimum: one collective carries the flag of NaN too.
    return max_over(highest, groups) * sign


def is_inexact(dtype: torch.dtype) -> bool:
    """Return whether numbers of a dtype are rounded."""
    return dtype.is_floating_point or dtype.is_complex


def _item(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return shard_of(func, args).gathered().item()


RULES: dict[OpOverload, Rule] = {
    aten.sum.default: _sum,
    aten.mean.default: _mean,
    aten.dot.default: _dot,
    aten.vdot.default: _dot,
    aten.max.default: _extreme,
    aten.min.default: _extreme,
    aten.any.default: _extreme,
    aten.all.default: _extreme,
    aten._local_scalar_dense.default: _item,
}


def _drawn(
    func: OpOverload, shard: FlatShard, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Return this rank's slice of what an op draws, in memory for the whole tensor."""
    spec = shard._shard_spec
    memory = shard._local.new_empty_strided(spec.shape, spec.stride)
    return slice_given(func(memory, *args[1:], **kwargs), spec)


def _fill(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShard:
    """Run an in-place random fill."""
    shard = args[0]
    if not isinstance(shard, FlatShard) or any(isinstance(arg, Tensor) for arg in args[1:]):
        raise unsupported(func, args)
    note_write(shard)
    if not shard._local.is_meta:
        shard._local.copy_(_drawn(func, shard, args, kwargs))
    return shard


def _draw_like(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShard:
    """Run an out-of-place random draw in the shape of its first argument."""
    shard: FlatShard = args[0]
    if shard._local.is_meta:
        return wrap(func(shard._local, *args[1:], **kwargs), shard._shard_spec)
    # A view would keep the whole tensor alive.
    return wrap(_drawn(func, shard, args, kwargs).clone(), shard._shard_spec)


RULES |= {
    aten.normal_.default: _fill,
    aten.uniform_.default: _fill,
    aten.bernoulli_.float: _fill,
    aten.exponential_.default: _fill,
    aten.random_.default: _fill,
    getattr(aten.random_, "from"): _fill,
    aten.random_.to: _fill,
    aten.rand_like.default: _draw_like,
    aten.randn_like.default: _draw_like,
    aten.randint_like.default: _draw_like,
    aten.randint_like.low_dtype: _draw_like,
}
