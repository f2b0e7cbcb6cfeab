"""Rules for views, and for ops that an owner runs on a whole parameter.

A flat range has no shape, so a view whose elements lie in one run is again a FlatShard: another
shape of the whole, or a range of rows. Any other selection (a column, say) is a `FlatRegion`, which
can only be written: `weight[:, 3] = 0`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable_shard.options import advise
from composable_shard.tensor.flat_shard import OP_RULES, FlatShard, NeedsWhole, Rule, whole_of, wrap
from composable_shard.tensor.operands import note_write, owner_error, schema_arguments, unsupported
from composable_shard.tensor.pointwise_rules import fill_mask
from composable_shard.tensor.shard_spec import ShardSpec
from composable_shard.torch_private import (
    OpOverload,
    disabled_torch_function,
    make_wrapper,
    schema_of,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class _Geometry:
    """Which elements of a dense tensor a view selects, in memory order."""

    shape: torch.Size
    stride: tuple[int, ...]
    start: int

    def apply(
        self, func: OpOverload, numel: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Geometry:
        """Return the geometry after a view op, worked out on a tensor without data."""
        base = torch.empty(numel, device="meta").as_strided(self.shape, self.stride, self.start)
        view = func(base, *args, **kwargs)
        return _Geometry(view.shape, view.stride(), view.storage_offset())

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

    def positions(self, device: torch.device) -> Tensor:
        """Return where each selected element lies in the dense tensor; of the view's shape."""
        result = torch.full((), self.start, device=device)
        for size, stride in zip(self.shape, self.stride, strict=True):
            result = result.unsqueeze(-1) + torch.arange(size, device=device) * stride
        return result


class FlatRegion(Tensor):
    """Elements of a FlatShard that don't lie side by side; can be written, not read.

    Where the shard is whole they can be read too, see [Note: Whole shards].
    """

    _shard: FlatShard
    _geometry: _Geometry

    @staticmethod
    def __new__(cls: type[FlatRegion], shard: FlatShard, geometry: _Geometry) -> FlatRegion:
        """Select elements of `shard`; communicates nothing and copies nothing."""
        self: FlatRegion = make_wrapper(
            cls, geometry.shape, geometry.stride, dtype=shard.dtype, device=shard.device
        )
        self._shard = shard
        self._geometry = geometry
        return self

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stub lacks `func`
        cls,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Narrow further, or write; anything else raises, unless the shard is whole."""
        try:
            return _run_on_region(func, args, kwargs or {})
        except NeedsWhole as error:
            run = OP_RULES.on_whole(func, args, kwargs or {})
            if run is None:
                raise error.refusal() from None
        return run()

    def _whole(self) -> Tensor:
        """Return the elements of a whole shard as a plain strided view of its slice."""
        local, geometry = self._shard._local, self._geometry
        start = local.storage_offset() + geometry.start
        return local.as_strided(geometry.shape, geometry.stride, start)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # the stub returns Any
        """Name the parameter; no communication."""
        return f"FlatRegion of '{self._shard._shard_spec.label.fqn}' {tuple(self.shape)}"


def _run_on_region(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    region = args[0] if args else None
    if isinstance(region, FlatRegion):
        if func in _VIEWS or schema_of(func).name == "aten::alias":
            return _view_region(func, region, args[1:], kwargs)
        if func in _INDEX_WRITES:
            return _INDEX_WRITES[func](func, args, kwargs)
        if func is aten.copy_.default:
            return _copy_region(func, region, args[1])
        if _is_in_place(func):
            return _write_region(func, region, args[1:], kwargs)
    raise _region_read(func, args)


def _is_in_place(func: OpOverload) -> bool:
    written = [argument.is_write for argument in schema_of(func).arguments]
    return written[:1] == [True] and not any(written[1:])


def _region_read(func: OpOverload, args: tuple[Any, ...]) -> RuntimeError:
    regions = (arg._shard for arg in args if isinstance(arg, FlatRegion))
    shard = next(regions, None)
    fqn = "?" if shard is None else shard._shard_spec.label.fqn
    specs = () if shard is None else (shard._shard_spec,)
    return owner_error(func, specs) or NeedsWhole(
        f"{func.overloadpacket} reads elements of the sharded parameter '{fqn}' "
        f"{tuple(shard.shape) if shard is not None else ''} that were selected by index, and "
        "other ranks hold some of them. Use p.full_tensor(), or unshard_params(module)."
    )


def _geometry_of(shard: FlatShard) -> _Geometry:
    return _Geometry(shard.shape, shard._shard_spec.stride, 0)


def _view(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    shard: FlatShard = args[0]
    spec = shard._shard_spec
    before = _geometry_of(shard)
    after = before.apply(func, shard.numel(), args[1:], kwargs)
    if spec.tensor_parallel is not None:
        if after != before:
            raise unsupported(func, args)
        return type(shard)(shard._local, spec, guard=shard._guard)
    if after.is_one_run:
        return _run_of(shard, after)
    # With autograd on, torch refuses to write to a view of a leaf: this can only be a read.
    if shard.requires_grad and torch.is_grad_enabled() and not spec.is_whole:
        raise unsupported(func, args)
    return FlatRegion(shard, after)


def view_of(shard: FlatShard, view: Tensor) -> Tensor:
    """Return a view of a whole shard's memory, of its dtype, as a shard, or as a region of one."""
    start = int(view.storage_offset() - shard._local.storage_offset())
    geometry = _Geometry(view.shape, view.stride(), start)
    return _run_of(shard, geometry) if geometry.is_one_run else FlatRegion(shard, geometry)


def _run_of(shard: FlatShard, geometry: _Geometry) -> FlatShard:
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


def _view_region(
    func: OpOverload, region: FlatRegion, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    geometry = region._geometry.apply(func, region._shard.numel(), args, kwargs)
    if geometry.is_one_run:
        return _run_of(region._shard, geometry)
    return FlatRegion(region._shard, geometry)


def _own_part(shard: FlatShard, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return which of the positions this rank holds, and where in its slice they are."""
    start, end = shard._shard_spec.local_range
    is_own = (positions >= start) & (positions < end)
    return is_own, positions[is_own] - start


def _put(shard: FlatShard, positions: Tensor, values: Tensor, accumulate: bool = False) -> None:
    """Write values, which broadcast to the positions' shape, to the elements at `positions`."""
    note_write(shard)
    if shard._local.is_meta:
        return
    is_own, places = _own_part(shard, positions)
    own_values = values.expand(positions.shape).to(positions.device, shard.dtype)[is_own]
    shard._local.index_put_((places,), own_values, accumulate)


def _copy_region(func: OpOverload, region: FlatRegion, source: Tensor) -> FlatRegion:
    if isinstance(source, FlatRegion):
        # `weight[:, 3] *= 2` ends with copying the region, already written, to itself.
        is_same = source._geometry == region._geometry
        if not is_same or source._shard._local is not region._shard._local:
            raise _region_read(func, (source,))
        return region
    if isinstance(source, FlatShard):
        raise unsupported(func, (region._shard, source))
    _put(region._shard, region._geometry.positions(region.device), source)
    return region


def _write_region(
    func: OpOverload, region: FlatRegion, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> FlatRegion:
    """Run an in-place elementwise op whose other operands are scalars."""
    shard = region._shard
    is_fill = schema_of(func).name in ("aten::fill_", "aten::zero_")  # without the tag
    is_pointwise = is_fill or torch.Tag.pointwise in func.tags
    if not is_pointwise or any(isinstance(arg, Tensor) and arg.dim() for arg in args):
        raise _region_read(func, (region,))
    note_write(shard)
    if not shard._local.is_meta:
        _, places = _own_part(shard, region._geometry.positions(region.device))
        elements = shard._local[places]
        func(elements, *args, **kwargs)
        shard._local[places] = elements
    return region


def _index_put(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Write elements selected by plain indices, the same on every rank; or by a sharded mask."""
    masked = fill_mask(func, args, kwargs)
    if masked is not None:
        return masked  # type: ignore[no-any-return] # rules return Any
    target, indices, values, *others = args
    if isinstance(target, FlatRegion):
        shard, geometry = target._shard, target._geometry
    elif isinstance(target, FlatShard) and target._shard_spec.tensor_parallel is None:
        shard, geometry = target, _geometry_of(target)
    else:
        raise unsupported(func, args)
    if any(isinstance(value, FlatShard | FlatRegion) for value in (values, *indices)):
        raise unsupported(func, (shard, *indices, values))
    positions = aten.index.Tensor(geometry.positions(target.device), indices)
    _put(shard, positions, values, *others)
    return target  # type: ignore[no-any-return] # an element of args


def _index_fill(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Write one value to the places of a dim that are listed in a plain index."""
    target, dim, index, value = args
    if not isinstance(target, FlatShard | FlatRegion):
        raise unsupported(func, args)
    if not isinstance(value, Tensor):
        value = torch.scalar_tensor(value, dtype=target.dtype, device=target.device)
    leading = [None] * (dim % max(1, target.dim()))
    return _index_put(func, (target, [*leading, index], value), {})


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


_VIEWS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten._reshape_alias.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.select.int,
        aten.slice.Tensor,
    }
)

_INDEX_WRITES: dict[OpOverload, Rule] = {
    aten.index_put_.default: _index_put,
    aten.index_fill_.int_Scalar: _index_fill,
    aten.index_fill_.int_Tensor: _index_fill,
}

RULES: dict[OpOverload, Rule] = {
    **_INDEX_WRITES,
    **dict.fromkeys(_VIEWS, _view),
    aten.view_as_real.default: _view_as_real,
    aten.view_as_complex.default: _view_as_complex,
    aten._conj.default: _conjugate,
}


def on_whole(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Return what runs an op on whole tensors, None where this rank does not hold all of them."""
    operands = (args, tuple(kwargs.values()))
    if not all(shard._shard_spec.is_whole for shard in _shards(operands)):
        return None
    if torch.is_grad_enabled() and torch.Tag.pointwise not in func.tags:
        _check_alone(func, operands)
    return partial(_run, func, args, kwargs)


def _check_alone(func: OpOverload, operands: tuple[Any, ...]) -> None:
    """Check that no parameter is multiplied with this rank's data outside the forward of its unit.

    Nothing would reduce its gradient. A function of parameters alone has the same on all ranks.
    """
    if not any(type(each) in (Tensor, nn.Parameter) and each.dim() for each in _leaves(operands)):
        return
    for shard in _shards(operands):
        owner = None if shard._guard is None else shard._guard.owner
        handle: Any = None if owner is None else owner()  # a FlatParamHandle
        if handle is not None and handle.requires_grad and handle.shard_group.num_ranks > 1:
            raise RuntimeError(
                f"{func.overloadpacket} would give parameter '{shard._shard_spec.label.fqn}' the "
                f"gradient of this rank alone, and nothing would average it. {advise()}"
            )


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, Tensor):
        yield value


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
        whole = value._whole() if isinstance(value, FlatRegion) else whole_of(value)
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
    specs = [shard._shard_spec for shard in shards]
    if is_elementwise and result.shape == specs[0].shape and all(s == specs[0] for s in specs):
        return wrap(specs[0].flatten(result), specs[0])
    return result


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
