"""Reductions over some dims of a parameter: of rows, of columns, of filters.

[Note: Reduced rows]
A rank's range of a row-major tensor touches some rows (elements of one index of the first dim), the
first and the last of them perhaps in part. Filled up with an element that changes nothing (0 of a
sum, -inf of a maximum) they are reduced like a tensor, and the results of all ranks are combined by
one all-reduce of the size of the result. A gather would send the whole parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from composable_shard.tensor.flat_shard import FlatShard
from composable_shard.tensor.operands import unsupported
from composable_shard.tensor.reduction_rules import (
    combine,
    is_inexact,
    max_over,
    option,
    reduction_groups,
    shard_of,
    sum_over,
    wide,
)
from composable_shard.tensor.rule_table import Rule
from composable_shard.torch_private import OpOverload

aten = torch.ops.aten


def _run(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fill: float,
    reduce: Callable[[Tensor, list[int]], Tensor],
    combined: Callable[[Tensor, tuple[str, ...]], Tensor],
) -> Tensor:
    """Reduce the rows that this rank holds, [Note: Reduced rows]; dims stay with size 1.

    Args:
        func: The op.
        args: Its arguments.
        kwargs: Its keyword arguments.
        fill: What changes no result.
        reduce: Reduces a tensor over dims, and keeps them.
        combined: Combines the results of the ranks of some groups.
    """
    shard = shard_of(func, args)
    spec = shard._shard_spec
    dims = _dims(func, args, kwargs, shard.dim())
    is_row_major = spec.tensor_parallel is None and spec.wrapper[1] is None
    if not shard.dim() or not shard.numel() or not is_inexact(shard.dtype):
        raise unsupported(func, args)
    sizes = [1 if dim in dims else size for dim, size in enumerate(spec.shape)]
    # The reduction of all elements asks for no order, so a range of any layout will do. Rows go to
    # their places before ranks are combined, for each rank has other rows.
    if len(dims) == shard.dim():
        local = shard._local if shard._local.numel() else shard._local.new_full((1,), fill)
        result = reduce(local.view(-1), [0]).view(sizes)
    elif is_row_major:
        rows, first = _rows(shard, fill)
        result = reduce(rows, dims)
        if 0 not in dims:
            all_rows = result.new_full(sizes, fill)
            all_rows[first : first + len(result)] = result
            result = all_rows
    else:
        raise unsupported(func, args)
    result = combined(result, reduction_groups(spec))
    return result if option(func, args, kwargs, "keepdim") else result.squeeze(dims)


def _rows(shard: FlatShard, fill: float) -> tuple[Tensor, int]:
    """Return the rows that this rank's range touches, filled up, and the first one's index."""
    spec, local = shard._shard_spec, shard._local
    start, end = spec.local_range
    row = spec.shape[1:].numel()
    if start == end:
        return local.new_full((1, *spec.shape[1:]), fill), 0
    first, last = start // row, -(-end // row)
    if start == first * row and end == last * row:
        return local.view(-1, *spec.shape[1:]), first
    rows = local.new_full(((last - first) * row,), fill)
    rows[start - first * row : end - first * row] = local
    return rows.view(-1, *spec.shape[1:]), first


def _dims(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], num_dims: int
) -> list[int]:
    given = option(func, args, kwargs, "dim")
    listed = [given] if isinstance(given, int) else list(given or range(num_dims))
    dims = sorted({dim % num_dims for dim in listed}) if num_dims else []
    if len(dims) != len(listed) or any(not -num_dims <= dim < num_dims for dim in listed):
        raise unsupported(func, args)  # torch's error
    return dims


def _sum(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    dtype = kwargs.get("dtype") or args[0].dtype
    kind = wide(dtype)
    total = _run(func, args, kwargs, 0, lambda x, d: x.sum(d, True, dtype=kind), sum_over)
    result: Tensor = total.to(dtype)
    return result


def _mean(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    dtype = kwargs.get("dtype") or args[0].dtype
    kind = wide(dtype)
    total = _run(func, args, kwargs, 0, lambda x, d: x.sum(d, True, dtype=kind), sum_over)
    result: Tensor = (total / (args[0].numel() / total.numel())).to(dtype)
    return result


def norm(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], order: float) -> Tensor:
    """Return the norms over the op's dims, of an order greater than 0."""
    dtype = option(func, args, kwargs, "dtype") or args[0].dtype.to_real()

    def reduce(rows: Tensor, dims: list[int]) -> Tensor:
        wide_rows = rows.to(wide(rows.dtype))
        found: Tensor = torch.linalg.vector_norm(wide_rows, order, dims, True)
        return found

    return _run(
        func, args, kwargs, 0, reduce, lambda norms, groups: combine(norms, order, groups)
    ).to(dtype)


def _extreme(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    if args[0].dtype.is_complex:
        raise unsupported(func, args)  # torch's error
    sign = 1 if func is aten.amax.default else -1
    # Negated, not the minimum: one collective carries the flag of NaN too.
    found = _run(
        func, args, kwargs, -sign * math.inf, lambda x, d: func(x, d, True), _highest(sign)
    )
    return found


def _highest(sign: int) -> Callable[[Tensor, tuple[str, ...]], Tensor]:
    return lambda values, groups: max_over(values * sign, groups) * sign


RULES: dict[OpOverload, Rule] = {
    aten.sum.dim_IntList: _sum,
    aten.mean.dim: _mean,
    aten.amax.default: _extreme,
    aten.amin.default: _extreme,
}
