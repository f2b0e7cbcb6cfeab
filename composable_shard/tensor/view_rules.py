"""Rules for views.

A flat range has no shape, so a view whose elements lie in one run is again a FlatShard: another
shape of the whole, or a range of rows. Any other view (a column, a transposed matrix) raises.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from composable_shard.tensor.flat_shard import FlatShard, wrap
from composable_shard.tensor.operands import unsupported
from composable_shard.tensor.rule_table import Rule
from composable_shard.tensor.shard_spec import ShardSpec
from composable_shard.torch_private import OpOverload

aten = torch.ops.aten


def _view(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShard:
    shard: FlatShard = args[0]
    spec = shard._shard_spec
    # Worked out on a tensor without data.
    view = func(torch.empty_strided(spec.shape, spec.stride, device="meta"), *args[1:], **kwargs)
    is_same = view.shape == spec.shape and view.stride() == spec.stride
    if spec.tensor_parallel is not None and is_same:
        return type(shard)(shard._local, spec, guard=shard._guard)
    if spec.tensor_parallel is not None or not _is_one_run(view):
        raise unsupported(func, args)
    part = replace(
        spec,
        shape=view.shape,
        dense_shape=view.shape,
        dense_stride=view.stride(),
        start=spec.start + view.storage_offset(),
    )
    local = shard._local
    if part.numel != shard.numel():
        start, end = part.local_range
        begin = start + view.storage_offset() - spec.local_range[0] if end > start else 0
        local = local[begin : begin + end - start]
    return FlatShard(local, part, guard=shard._guard)


def _is_one_run(view: Tensor) -> bool:
    """Return whether the elements of a view lie side by side in memory, each once."""
    expected = 1
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size != 1 and view.numel():
            if stride != expected:
                return False
            expected *= size
    return True


def _view_as_real(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShard:
    shard: FlatShard = args[0]
    spec = shard._shard_spec
    real = torch.view_as_real(shard._local).view(-1)
    return FlatShard(real, _spec_as_real(spec), guard=shard._guard)


def _spec_as_real(spec: ShardSpec) -> ShardSpec:
    return replace(
        spec,
        shape=torch.Size((*spec.shape, 2)),
        dense_shape=torch.Size((*spec.dense_shape, 2)),
        dense_stride=(*(2 * stride for stride in spec.dense_stride), 1),
        start=2 * spec.start,
        num_components=2 * spec.num_components,
    )


def _view_as_complex(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShard:
    shard: FlatShard = args[0]
    spec = shard._shard_spec
    as_complex = replace(
        spec,
        shape=spec.shape[:-1],
        dense_shape=spec.dense_shape[:-1],
        dense_stride=tuple(stride // 2 for stride in spec.dense_stride[:-1]),
        start=spec.start // 2,
        num_components=spec.num_components // 2,
    )
    # Only what view_as_real made: any other range may cut a pair in two.
    if spec.shape[-1:] != (2,) or _spec_as_real(as_complex) != spec:
        raise unsupported(func, args)
    local = torch.view_as_complex(shard._local.view(-1, 2))
    return FlatShard(local, as_complex, guard=shard._guard)


def _conjugate(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShard:
    # A copy in place of torch's lazy conjugate view; autograd computes the same.
    return wrap(torch.conj_physical(args[0]._local), args[0]._shard_spec)


_VIEWS = (
    aten.view.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.select.int,
    aten.slice.Tensor,
)

RULES: dict[OpOverload, Rule] = {
    **dict.fromkeys(_VIEWS, _view),
    aten.view_as_real.default: _view_as_real,
    aten.view_as_complex.default: _view_as_complex,
    aten._conj.default: _conjugate,
}
