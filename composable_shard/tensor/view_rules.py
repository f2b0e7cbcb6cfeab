"""Rules for views.

A flat range has no shape, so a view whose elements lie in one run is again a FlatShard: another
shape of the whole, its transpose, or a range of rows. Any other view is a StridedView.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from composable_shard.tensor.concatenation import ConcatSpec, run_of_parts
from composable_shard.tensor.flat_shard import FlatShard, kind_of, wrap
from composable_shard.tensor.operands import schema_arguments, unsupported
from composable_shard.tensor.rule_table import Rule
from composable_shard.tensor.shard_spec import ShardSpec
from composable_shard.tensor.strided_view import Geometry, StridedView
from composable_shard.torch_private import OpOverload, no_dispatch, schema_of

aten = torch.ops.aten
_MAX_VIEWS = 64  # of one spec that are kept


def view_family(func: OpOverload) -> Rule | None:
    """Return a rule if the op returns views of its one tensor, or makes the tensor one of them."""
    if torch.Tag.inplace_view in func.tags:
        view = _view_op_of(func)
        return None if view is None else partial(_become, view)
    return _view if func.is_view else None


def _view_op_of(func: OpOverload) -> OpOverload | None:
    """Return the op whose view the tensor becomes; `aten.transpose.int` for `transpose_`."""
    packet = getattr(aten, schema_of(func).name.removeprefix("aten::").removesuffix("_"), None)
    types = [str(argument.type) for argument in schema_arguments(func)]
    for name in () if packet in (None, aten.detach, aten.as_strided) else packet.overloads():
        view: OpOverload = getattr(packet, name)
        if view.is_view and types == [str(argument.type) for argument in schema_arguments(view)]:
            return view
    return None


def _become(
    view: OpOverload, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> FlatShard:
    """Give a shard the form of its view, as `transpose_` does; not a parameter."""
    shard: FlatShard = args[0]
    after = None if shard._guard is not None else _view(view, args, kwargs)
    if after is None or StridedView in (type(shard), type(after)):
        raise unsupported(func, args)
    with no_dispatch():
        func(*args, **kwargs)
    shard._local, shard._shard_spec = after._local, after._shard_spec
    return shard


def _view(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard: FlatShard = args[0]
    views, key = shard._shard_spec.views, None
    if not kwargs and not isinstance(shard, StridedView):
        # By the op's address: its own hash is a function of Python.
        key = id(func), *[tuple(x) if isinstance(x, list) else x for x in args[1:]]
        known = views.get(key)
        if known is not None:
            spec, begin = known
            local = shard._local
            if spec.numel != shard._shard_spec.numel:  # else the object stays, as in `run_of`
                start, end = spec.local_range
                local = local[begin : begin + end - start]
            view = wrap(local, spec)
            view._guard = shard._guard
            return view
    view = _new_view(func, args, kwargs)
    # A StridedView is of its base alone, and other classes have attributes.
    if key is not None and kind_of(view) is FlatShard is kind_of(shard):
        if len(views) >= _MAX_VIEWS:  # a loop over rows
            views.clear()
        views[key] = view._shard_spec, view._local.storage_offset() - shard._local.storage_offset()
    return view


def _new_view(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard: FlatShard = args[0]
    if isinstance(shard, StridedView):
        base, before = shard.base, shard.geometry
    else:
        base, before = shard, Geometry(shard.shape, shard._shard_spec.stride, 0)
    after = before.apply(func, base, args[1:], kwargs)
    if after is None:
        raise unsupported(func, args)
    if isinstance(after, list):
        return [_view_of(func, args, base, each) for each in after]
    return _view_of(func, args, base, after)


def _view_of(
    func: OpOverload, args: tuple[Any, ...], base: FlatShard, geometry: Geometry
) -> FlatShard:
    spec = base._shard_spec
    if spec.tensor_parallel is not None:
        if geometry == Geometry(base.shape, spec.stride, 0):
            return type(base)(base._local, spec, guard=base._guard)
    elif geometry.is_one_run and not isinstance(spec, ConcatSpec):
        return run_of(base, geometry)
    elif geometry.is_one_run and len(geometry.shape) == 1:
        return run_of_parts(base, geometry.start, geometry.shape.numel(), run_of_rows)
    if spec.holds_all or spec.owner is not None:
        raise unsupported(func, args)  # of the whole tensor, on its owner alone
    return StridedView(base, geometry)


def run_of_rows(part: FlatShard, start: int, numel: int) -> FlatShard:
    """Return the shard of `numel` elements of a 1-D shard, from `start` on."""
    return run_of(part, Geometry(torch.Size([numel]), (1,), start))


def run_of(shard: FlatShard, geometry: Geometry) -> FlatShard:
    """Return the shard of the elements that `geometry` selects, which lie side by side."""
    if geometry == Geometry(shard.shape, shard._shard_spec.stride, 0):  # rules compare by identity
        return FlatShard(shard._local, shard._shard_spec, guard=shard._guard)
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


def _view_as_dtype(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShard:
    """View the bits of each element as another dtype of its size, as stochastic rounding does."""
    shard: FlatShard = args[0]
    dtype: torch.dtype = args[1]
    if isinstance(shard, StridedView) or dtype.itemsize != shard.dtype.itemsize:
        raise unsupported(func, args)
    return FlatShard(shard._local.view(dtype), shard._shard_spec, guard=shard._guard)


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


# No views for torch: results of these share memory all the same.
_VIEWS = (
    aten._unsafe_view.default,
    aten._reshape_alias.default,
)

RULES: dict[OpOverload, Rule] = {
    **dict.fromkeys(_VIEWS, _view),
    aten.view.dtype: _view_as_dtype,
    aten.view_as_real.default: _view_as_real,
    aten.view_as_complex.default: _view_as_complex,
    aten._conj.default: _conjugate,
}
