"""Rules for views.

A flat range has no shape, so a view whose elements lie in one run is again a FlatShard: another
shape of the whole, or a range of rows. Any other view (a column, a transposed matrix) raises.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from composable_shard.tensor.flat_shard import FlatShard, wrap
from composable_shard.tensor.operands import unsupported
from composable_shard.tensor.rule_table import Rule
from composable_shard.tensor.shard_spec import ShardSpec
from composable_shard.torch_private import OpOverload

aten = torch.ops.aten


@dataclass(frozen=True)
class Geometry:
    """Which elements of a dense tensor a view selects, in memory order."""

    shape: torch.Size
    stride: tuple[int, ...]
    start: int

    def apply(
        self, func: OpOverload, numel: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Geometry:
        """Return the geometry after a view op, worked out on a tensor without data."""
        base = torch.empty(numel, device="meta").as_strided(self.shape, self.stride, self.start)
        view = func(base, *args, **kwargs)
        return Geometry(view.shape, view.stride(), view.storage_offset())

    @property
    def is_one_run(self) -> bool:
        """Whether the elements lie side by side in memory, each once."""
        expected = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size != 1 and self.shape.numel():
                if stride != expected:
                    return False
                expected *= size
        return True


def _view(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShard:
    shard: FlatShard = args[0]
    spec = shard._shard_spec
    before = Geometry(shard.shape, spec.stride, 0)
    after = before.apply(func, shard.numel(), args[1:], kwargs)
    if spec.tensor_parallel is not None and after == before:
        return type(shard)(shard._local, spec, guard=shard._guard)
    if spec.tensor_parallel is not None or not after.is_one_run:
        raise unsupported(func, args)
    return run_of(shard, after)


def run_of(shard: FlatShard, geometry: Geometry) -> FlatShard:
    """Return the shard of the elements that `geometry` selects, which lie side by side."""
    spec = replace(
        shard._shard_spec,
        shape=geometry.shape,
        dense_shape=geometry.shape,
        dense_stride=geometry.stride,
        start=shard._shard_spec.start + geometry.start,
    )
    local = shard._local
    if spec.numel != shard.numel():
        start, end = spec.local_range
        begin = start + geometry.start - shard._shard_spec.local_range[0] if end > start else 0
        local = local[begin : begin + end - start]
    return FlatShard(local, spec, guard=shard._guard)


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
    # Only results of view_as_real: any other range may cut a pair in two.
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
