"""Reductions of whole FlatShards to one value: exact, global, and collective.

All ranks of the shard group must call them, and get the same plain 0-dim tensor. Over the axes of
a tensor-parallel mesh that a parameter is sharded on, the parts are reduced too; where it is
replicated it counts once. Half-precision values accumulate in float32 and are rounded once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload

from composable_shard._collectives import all_reduce, resolve_group
from composable_shard._flat_shard import FlatShard, Rule
from composable_shard._operands import check_same_spec, describe_operands, note_write, unsupported
from composable_shard._shard_spec import ShardSpec

__all__ = ["RULES", "reduction_groups"]

aten = torch.ops.aten
_SUM, _MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
_HALF = frozenset({torch.float16, torch.bfloat16})


def reduction_groups(spec: ShardSpec) -> tuple[str, ...]:
    """Return the names of the groups that together hold the whole tensor, one after another."""
    names = [spec.group_name] if spec.world_size > 1 else []
    if spec.tensor_parallel is not None:
        mesh, placements = spec.tensor_parallel
        if any(placement.is_partial() for placement in placements):
            raise RuntimeError(
                f"expected '{spec.label.fqn}' to be sharded or replicated on its mesh, "
                f"got {placements}: a reduction of partial sums is not defined"
            )
        names += [
            mesh.get_group(axis).group_name
            for axis, placement in enumerate(placements)
            if not placement.is_replicate() and mesh.size(axis) > 1
        ]
    return tuple(names)


def _sum_over(values: Tensor, groups: tuple[str, ...]) -> Tensor:
    """Sum `values` over the ranks, in place if the groups can carry the dtype."""
    payload = torch.view_as_real(values) if values.is_complex() else values
    for name in groups:
        all_reduce(payload, resolve_group(name), _SUM).wait()
    return values


def _max_over(values: Tensor, groups: tuple[str, ...]) -> Tensor:
    """Return the maximum over the ranks; NaN on any rank gives NaN, as `torch.max` does."""
    if not groups:
        return values
    if not values.is_floating_point():
        for name in groups:
            all_reduce(values, resolve_group(name), _MAX).wait()
        return values
    # Backends compare with std::max or the like, which may lose a NaN: it travels as a flag.
    is_nan = values.isnan()
    payload = torch.stack([values.masked_fill(is_nan, -math.inf), is_nan.to(values.dtype)])
    for name in groups:
        all_reduce(payload, resolve_group(name), _MAX).wait()
    return payload[0].masked_fill(payload[1] > 0, math.nan)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to accumulate in."""
    return torch.float32 if dtype in _HALF else dtype


def _exact(device: torch.device) -> torch.dtype:
    """Return the dtype in which the ranks' norms are combined."""
    return torch.float32 if device.type == "mps" else torch.float64


def _shard_of(func: OpOverload, args: tuple[Any, ...], dims: Any = None) -> FlatShard:
    """Return the operand of a reduction over all dims; raise if `dims` leaves some out."""
    shard = args[0]
    if not isinstance(shard, FlatShard):
        raise unsupported(func, args)
    if dims is not None and shard.dim():
        listed = [dims] if isinstance(dims, int) else list(dims)
        if listed and {dim % shard.dim() for dim in listed} != set(range(shard.dim())):
            raise unsupported(func, args)
    return shard


def _option(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """Return an argument by name, given or default."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            if not argument.kwarg_only and position < len(args):
                return args[position]
            return kwargs.get(name, argument.default_value)
    return None


def _shaped(shard: FlatShard, value: Tensor, keepdim: Any) -> Tensor:
    return value.reshape((1,) * shard.dim()) if keepdim else value.reshape(())


def _sum(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    shard = _shard_of(func, args, _option(func, args, kwargs, "dim"))
    dtype = kwargs.get("dtype") or (shard.dtype if _is_inexact(shard.dtype) else torch.int64)
    total = _sum_over(shard._local.sum(dtype=_wide(dtype)), reduction_groups(shard._shard_spec))
    return _shaped(shard, total.to(dtype), _option(func, args, kwargs, "keepdim"))


def _mean(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    shard = _shard_of(func, args, _option(func, args, kwargs, "dim"))
    dtype = kwargs.get("dtype") or shard.dtype
    if not _is_inexact(dtype):
        raise RuntimeError(
            f"{func.overloadpacket} needs a floating-point or complex dtype, got {dtype}"
        )
    total = _sum_over(shard._local.sum(dtype=_wide(dtype)), reduction_groups(shard._shard_spec))
    mean = (total / shard.numel()).to(dtype)
    return _shaped(shard, mean, _option(func, args, kwargs, "keepdim"))


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _variance(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    shard = _shard_of(func, args, _option(func, args, kwargs, "dim"))
    groups = reduction_groups(shard._shard_spec)
    local = shard._local.to(_wide(shard.dtype))
    mean = _sum_over(local.sum(), groups) / shard.numel()
    squares = _sum_over((local - mean).abs().square().sum(), groups)
    correction = kwargs.get("correction")
    freedom = max(shard.numel() - (1 if correction is None else correction), 0)
    result = squares / freedom
    if func is aten.std.correction:
        result = result.sqrt()
    real = shard.dtype.to_real()
    return _shaped(shard, result.to(real), _option(func, args, kwargs, "keepdim"))


def _extreme(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Run max, min, amax or amin."""
    shard = _shard_of(func, args, _option(func, args, kwargs, "dim"))
    if shard.numel() == 0 or shard.is_complex():
        raise RuntimeError(
            f"{func.overloadpacket} needs at least one element and real numbers, got "
            f"{describe_operands(args)} of {shard.dtype}"
        )
    is_max = func in (aten.max.default, aten.amax.default)
    value = _extreme_of(shard._local, is_max)
    value = _max_over(value, reduction_groups(shard._shard_spec))
    result = _undo_order(value, shard.dtype, is_max)
    return _shaped(shard, result, _option(func, args, kwargs, "keepdim"))


def _extreme_of(local: Tensor, is_max: bool) -> Tensor:
    """Return a slice's maximum in a dtype that collectives carry; minima as negated maxima.

    An empty slice gives what no element is below.
    """
    if local.dtype.is_floating_point:
        values = local.to(_wide(local.dtype))
    else:
        values = local.to(torch.int64)
    # For integers the complement, as the most negative one has no negative.
    ordered = values if is_max else (-values if values.is_floating_point() else ~values)
    if ordered.numel():
        return ordered.max()
    lowest = -math.inf if ordered.is_floating_point() else torch.iinfo(ordered.dtype).min
    return ordered.new_full((), lowest)


def _undo_order(value: Tensor, dtype: torch.dtype, is_max: bool) -> Tensor:
    result = value if is_max else (-value if value.is_floating_point() else ~value)
    return result.to(dtype)


def _foreach_max(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return [
        _extreme(aten.max.default, (item,), {}) if isinstance(item, FlatShard) else item.max()
        for item in args[0]
    ]


def _product(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    shard = _shard_of(func, args)
    dtype = kwargs.get("dtype") or (shard.dtype if _is_inexact(shard.dtype) else torch.int64)
    if dtype.is_complex:
        raise unsupported(func, args)
    product = shard._local.prod(dtype=_wide(dtype))
    for name in reduction_groups(shard._shard_spec):
        all_reduce(product, resolve_group(name), dist.ReduceOp.PRODUCT).wait()
    return product.to(dtype)


def _truth(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Run any or all."""
    shard = _shard_of(func, args, _option(func, args, kwargs, "dim"))
    is_any = func._schema.name == "aten::any"
    local = shard._local.any() if is_any else shard._local.logical_not().any()
    found = _max_over(local.to(torch.int32), reduction_groups(shard._shard_spec)) > 0
    result = found if is_any else ~found
    return _shaped(shard, result, _option(func, args, kwargs, "keepdim"))


def _count_nonzero(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    shard = _shard_of(func, args, _option(func, args, kwargs, "dim"))
    return _sum_over(shard._local.count_nonzero(), reduction_groups(shard._shard_spec))


def _equal(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    first, second = args
    if not isinstance(first, FlatShard) or not isinstance(second, FlatShard):
        raise unsupported(func, args)
    check_same_spec(func, first._shard_spec, second._shard_spec)
    return _is_true_everywhere(torch.equal(first._local, second._local), first)


def _allclose(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    first, second, *options = args
    if not isinstance(first, FlatShard) or not isinstance(second, FlatShard):
        raise unsupported(func, args)
    check_same_spec(func, first._shard_spec, second._shard_spec)
    is_close = torch.isclose(first._local, second._local, *options, **kwargs)
    return _is_true_everywhere(bool(is_close.all()), first)


def _is_true_everywhere(value: bool, shard: FlatShard) -> bool:
    flag = torch.tensor(int(not value), dtype=torch.int32, device=shard._local.device)
    return not _max_over(flag, reduction_groups(shard._shard_spec)).item()


def _item(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard: FlatShard = args[0]
    if shard.numel() != 1:
        raise RuntimeError(
            f"item() needs one element, got '{shard._shard_spec.label.fqn}' {tuple(shard.shape)}"
        )
    return shard.full_tensor().item()


def _norm(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    shard = _shard_of(func, args, _option(func, args, kwargs, "dim"))
    name = "ord" if func is aten.linalg_vector_norm.default else "p"
    order = _option(func, args, kwargs, name)
    norm = _norms([shard], 2.0 if order is None else float(order), kwargs.get("dtype"))[0]
    return _shaped(shard, norm, _option(func, args, kwargs, "keepdim"))


def _foreach_norm(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    order = float(_option(func, args, kwargs, "ord"))
    dtype = _option(func, args, kwargs, "dtype")
    shards = [item for item in args[0] if isinstance(item, FlatShard)]
    norms = iter(_norms(shards, order, dtype))
    return [
        next(norms)
        if isinstance(item, FlatShard)
        else torch.linalg.vector_norm(item, order, dtype=dtype)
        for item in args[0]
    ]


def _norms(shards: Sequence[FlatShard], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """Return each shard's norm; one collective for all that have the same groups."""
    norms: list[Tensor | None] = [None] * len(shards)
    if not all(_is_inexact(shard.dtype) for shard in shards):
        # Torch would raise only on the ranks whose slice is not empty, and the others would wait.
        raise RuntimeError(f"norms need floating-point tensors, got {describe_operands(shards)}")
    by_groups: dict[tuple[tuple[str, ...], torch.device], list[int]] = defaultdict(list)
    for index, shard in enumerate(shards):
        if shard.numel() == 0:  # torch knows which orders an empty tensor has
            empty = torch.empty(shard.shape, dtype=shard.dtype, device=shard._local.device)
            norms[index] = torch.linalg.vector_norm(empty, order, dtype=dtype)
        else:
            key = reduction_groups(shard._shard_spec), shard._local.device
            by_groups[key].append(index)
    for (groups, _), indices in by_groups.items():
        found = _combined_norms([shards[i]._local for i in indices], order, groups)
        for index, norm in zip(indices, found, strict=True):
            norms[index] = norm.to(dtype or shards[index].dtype.to_real())
    return [norm for norm in norms if norm is not None]


def _combined_norms(locals_: list[Tensor], order: float, groups: tuple[str, ...]) -> list[Tensor]:
    device = locals_[0].device
    norms = _local_norms(locals_, order)
    if math.isinf(order):
        sign = 1 if order > 0 else -1
        identity = torch.tensor([0.0 if order > 0 else math.inf] * len(locals_), device=device)
        values = _fill_at(identity.to(_exact(device)), locals_, norms)
        return list((sign * _max_over(sign * values, groups)).unbind())
    exponent = order if order != 0 else 1.0
    powers = [norm.to(_exact(device)) ** exponent for norm in norms]
    zeros = torch.zeros(len(locals_), dtype=_exact(device), device=device)
    total = _sum_over(_fill_at(zeros, locals_, powers), groups)
    return list((total ** (1.0 / exponent)).unbind())


def _local_norms(locals_: list[Tensor], order: float) -> list[Tensor]:
    """Return the norms of the slices that are not empty, in order."""
    filled = [local for local in locals_ if local.numel()]
    if not filled:
        return []
    if order == 0 or order < 0 or any(local.dtype in _HALF for local in filled):
        return [
            torch.linalg.vector_norm(local, order, dtype=_accumulate(local)) for local in filled
        ]
    return list(torch._foreach_norm(filled, order))


def _accumulate(local: Tensor) -> torch.dtype | None:
    return torch.float32 if local.dtype in _HALF else None


def _fill_at(target: Tensor, locals_: list[Tensor], values: list[Tensor]) -> Tensor:
    """Write the values to the places of the slices that are not empty."""
    if values:
        is_filled = [local.numel() > 0 for local in locals_]
        stacked = torch.stack([value.to(target.dtype) for value in values])
        target[torch.tensor(is_filled, device=target.device)] = stacked
    return target


def _unscale(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale gradients for GradScaler, and tell every rank if any of them found an inf or NaN."""
    grads, found_inf, inverse_scale = args
    shards = [grad for grad in grads if isinstance(grad, FlatShard)]
    for shard in shards:
        note_write(shard)
    locals_ = [grad._local if isinstance(grad, FlatShard) else grad for grad in grads]
    func(locals_, found_inf, inverse_scale)
    names = {name: None for shard in shards for name in reduction_groups(shard._shard_spec)}
    for name in names:
        all_reduce(found_inf, resolve_group(name), _MAX).wait()


RULES: dict[OpOverload, Rule] = {
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.var.correction: _variance,
    aten.std.correction: _variance,
    aten.max.default: _extreme,
    aten.min.default: _extreme,
    aten.amax.default: _extreme,
    aten.amin.default: _extreme,
    aten.prod.default: _product,
    aten.any.default: _truth,
    aten.any.dim: _truth,
    aten.any.dims: _truth,
    aten.all.default: _truth,
    aten.all.dim: _truth,
    aten.all.dims: _truth,
    aten.count_nonzero.dim_IntList: _count_nonzero,
    aten.count_nonzero.default: _count_nonzero,
    aten.equal.default: _equal,
    aten.allclose.default: _allclose,
    aten._local_scalar_dense.default: _item,
    aten.norm.Scalar: _norm,
    aten.norm.ScalarOpt_dtype: _norm,
    aten.norm.ScalarOpt_dim: _norm,
    aten.norm.ScalarOpt_dim_dtype: _norm,
    aten.linalg_vector_norm.default: _norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten._foreach_max.default: _foreach_max,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
