"""Rules that run on the local slices: elementwise ops of one tensor."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composable_shard.dtensors import is_dtensor
from composable_shard.tensor.checkpointable import user_attributes
from composable_shard.tensor.flat_shard import FlatShard, kind_of, wrap
from composable_shard.tensor.gathering import (
    base_of,
    gather_bases,
    may_gather,
    view_of_whole,
)
from composable_shard.tensor.operands import (
    binding,
    check_same_spec,
    note_write,
    plain_operand,
    schema_arguments,
    shards_in,
    slice_given,
    tensors_in,
    unsupported,
    write_to_plain,
)
from composable_shard.tensor.rule_table import Rule
from composable_shard.tensor.shard_spec import ShardSpec
from composable_shard.tensor.strided_view import StridedView
from composable_shard.torch_private import (
    OpOverload,
    overload_name_of,
    schema_of,
)

aten = torch.ops.aten


def pointwise_family(func: OpOverload) -> Rule | None:
    """Return a rule if the op is elementwise; which arguments it writes is worked out once."""
    if not _is_pointwise(func):
        return None
    written = [argument for argument in schema_arguments(func) if argument.is_write]
    if not written:
        return partial(_run, binding(func))
    if written[0].kwarg_only:
        return _run_out if len(written) == 1 else None
    return partial(_run_in_place, binding(func))


def _is_pointwise(func: OpOverload) -> bool:
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False  # what is drawn for a slice is not what is drawn for the whole
    if torch.Tag.pointwise in func.tags:
        return func is not aten.equal.default  # tagged, and its result is no tensor
    # Some in-place variants lack the tag that their functional form has.
    name = schema_of(func).name.removeprefix("aten::")
    if not name.endswith("_") or name.endswith("__"):
        return False
    functional = getattr(getattr(aten, name[:-1], None), overload_name_of(func), None)
    return functional is not None and torch.Tag.pointwise in functional.tags


def local_operands(func: OpOverload, args: tuple[Any, ...]) -> tuple[list[Any], ShardSpec]:
    """Return the arguments with slices in place of shards, and the spec of the result.

    Shards of another range are gathered, and cut as the result is.
    """
    spec: ShardSpec | None = None
    operands: list[Any] = []
    plain: list[int] = []
    numel = 0
    for arg in args:
        kind = type(arg)
        if isinstance(arg, FlatShard):
            other = arg._shard_spec
            if spec is None:
                spec = other
                numel = arg._local.numel()
            elif other is not spec and other != spec and not spec.is_owned_as(other):
                return _mixed_operands(func, args)
            operands.append(arg._local)
        else:
            if kind is not float and kind is not int and isinstance(arg, Tensor):
                plain.append(len(operands))
            operands.append(arg)
    if spec is None:
        raise unsupported(func, args)
    # Only now: plain tensors are cut as the shard is, and the first shard may come after them.
    for position in plain:
        operand = operands[position]
        if len(operand.shape) > len(spec.shape):
            return _mixed_operands(func, args)
        operands[position] = plain_operand(func, operand, spec, numel)
    return operands, spec


def _mixed_operands(func: OpOverload, args: tuple[Any, ...]) -> tuple[list[Any], ShardSpec]:
    """Return local operands for shards of several ranges, of which one has the result's shape."""
    shards = shards_in(args)
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors_in(args)))
    fitting = (x for x in shards if x.shape == shape and not isinstance(x, StridedView))
    like = next(fitting, None)
    if like is None:
        raise unsupported(func, args)
    spec = like._shard_spec
    others = [shard for shard in shards if shard._shard_spec != spec]
    # All refusals before `gather_bases`, which communicates: in a step the owner of a whole
    # parameter runs this alone.
    for other in others:
        if spec.owner is not None or other._shard_spec.owner is not None:
            check_same_spec(func, spec, other._shard_spec)
    if not may_gather(func, args, {}):
        raise unsupported(func, args)
    wholes = gather_bases(func, others)
    operands = []
    for arg in args:
        if isinstance(arg, FlatShard) and arg._shard_spec != spec:
            arg = view_of_whole(arg, wholes[id(base_of(arg))])
        if isinstance(arg, FlatShard):
            operands.append(arg._local)
        elif isinstance(arg, Tensor):
            operands.append(plain_operand(func, arg, spec, like._local.numel()))
        else:
            operands.append(arg)
    return operands, spec


def _fill_value(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `fill_` with a 0-dim tensor, whose dtype is ignored."""
    target, value = args
    if not isinstance(target, FlatShard):
        raise write_to_plain(func, target, args)
    if isinstance(value, FlatShard) or value.dim():
        raise unsupported(func, args)
    note_write(target)
    func(target._local, value)
    return target


def _put_where(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShard:
    """Run `x[mask] = number`, of one range, as Rprop does."""
    target, (mask, *further), value, *others = args
    if not isinstance(target, FlatShard) or further or value.dim():
        raise unsupported(func, args)
    if isinstance(mask, FlatShard):
        if mask.dtype != torch.bool or mask.shape != target.shape:  # indices, or a mask of rows
            raise unsupported(func, args)
        (local, mask), _ = local_operands(func, (target, mask))
    elif target.numel() == 1:  # torch has asked a mask without dims for its value
        local, mask = target._local, mask[: target._local.numel()]
    else:
        raise unsupported(func, args)
    note_write(target)
    func(local, [mask], value, *others)
    return target


def _run(
    call: Callable[..., Any], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    operands, spec = local_operands(func, args)
    result = call(*operands, **kwargs)
    if isinstance(result, tuple):
        return tuple(wrap(item, spec) for item in result)
    return wrap(result, spec)


def _run_in_place(
    call: Callable[..., Any], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    target = args[0]
    if not isinstance(target, FlatShard):
        raise write_to_plain(func, target, args)
    operands, spec = local_operands(func, args)
    if operands[0] is not target._local:  # of another range than the result's
        raise unsupported(func, args)
    guard = target._guard
    if guard is not None:
        guard.note_write(spec.label.fqn)
    call(*operands, **kwargs)
    return target


def _run_out(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = kwargs["out"]
    if not isinstance(target, FlatShard):
        raise write_to_plain(func, target, args)
    # The target takes part in the check of equal specs, and comes last to be taken off again.
    operands, _ = local_operands(func, (*args, target))
    if operands[-1] is not target._local:
        raise unsupported(func, args)
    note_write(target)
    func(*operands[:-1], **{**kwargs, "out": operands[-1]})
    return target


def _keep_layout(func: OpOverload, shard: FlatShard, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments for the slice; raise if the memory order would change."""
    requested = kwargs.get("memory_format", torch.preserve_format)
    if requested is torch.preserve_format:
        return kwargs
    if not torch.empty_strided(shard.shape, shard.stride(), device="meta").is_contiguous(
        memory_format=requested
    ):
        if func is aten._to_copy.default and shard._guard is not None:
            raise RuntimeError(
                f"to() can't change the memory format of the sharded parameter "
                f"'{shard._shard_spec.label.fqn}' {tuple(shard.shape)} to {requested}: its "
                "elements lie on the ranks in their present order. Convert the module before "
                "sharding it."
            )
        raise unsupported(func, (shard,))
    return {name: value for name, value in kwargs.items() if name != "memory_format"}


def _like(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShard:
    """Run an op that makes a tensor like its first argument: same spec, own memory."""
    shard = args[0]
    if not isinstance(shard, FlatShard):
        raise unsupported(func, args)
    local = func(shard._local, *args[1:], **_keep_layout(func, shard, kwargs))
    # Of the same class, as `Module.to` and `to_empty` swap a parameter with what this returns.
    like: FlatShard = kind_of(shard)(local, shard._shard_spec)
    return like


def _convert(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShard:
    """Run `to` or `empty_like`; the parameter keeps its attributes when it is swapped."""
    return _carry_attributes(args[0], _like(func, args, kwargs))


def _alias(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatShard:
    shard: FlatShard = args[0]
    if isinstance(shard, StridedView):
        return StridedView(shard.base, shard.geometry)
    # detach() sets a version counter. Handles know a parameter by the identity of its slice.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        result = type(shard)(shard._local, shard._shard_spec, guard=shard._guard)
    return _carry_attributes(shard, result)


def _carry_attributes(source: FlatShard, result: FlatShard) -> FlatShard:
    attributes = user_attributes(source)
    attributes.pop("_is_param", None)
    result.__dict__.update(attributes)
    return result


def copy(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy from a shard, of another range after a gather, or from a whole plain tensor."""
    target, source, *others = args
    if not isinstance(target, FlatShard):
        raise write_to_plain(func, target, args)
    spec, own = target._shard_spec, target._local
    if isinstance(source, FlatShard):
        (first, local), _ = local_operands(func, (target, source))
        if first is not own:
            raise unsupported(func, args)
    else:
        if not is_dtensor(source) and source.shape != spec.dense_shape:
            source = source.expand(spec.shape)
        local = slice_given(source, spec)
    note_write(target)
    own.copy_(local, *others)
    return target


def _new_filled(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a shard if the size is the shard's own, else a plain tensor."""
    shard, size, *others = args
    local, spec = shard._local, shard._shard_spec
    if tuple(size) != tuple(spec.shape):
        return func(local, size, *others, **kwargs)
    return wrap(func(local, [local.numel()], *others, **kwargs), spec)


def _new_empty(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shard, size = args[:2]
    local, spec = shard._local, shard._shard_spec
    if kwargs.get("device") is not None and tuple(size) == tuple(spec.shape):
        # The copy on a device that dcp.async_save makes; it sets the attributes itself.
        return wrap(func(local, [local.numel()], **kwargs), spec)
    # Plain even for the own size: nn.init.orthogonal_ factorises such a tensor as a whole.
    return func(local, *args[1:], **kwargs)


def _new_empty_strided(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make memory for a gradient, as autograd asks for it."""
    shard, size, stride = args
    local, spec = shard._local, shard._shard_spec
    if tuple(size) != tuple(spec.shape) or tuple(stride) != tuple(spec.stride):
        return func(local, size, stride, **kwargs)
    return wrap(func(local, [local.numel()], [1], **kwargs), spec)


def _is_same_size(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(args[0].shape == args[1].shape)


def _can_take_data_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True to `Module.to`: `.data` can be replaced for any device and dtype."""
    shard, other = args
    return isinstance(shard, FlatShard) and isinstance(other, FlatShard)


def _on_local(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(args[0]._local, *args[1:], **kwargs)


RULES: dict[OpOverload, Rule] = {
    aten.alias.default: _alias,
    aten.detach.default: _alias,
    aten.lift_fresh.default: _alias,
    aten.clone.default: _like,
    aten.zeros_like.default: _like,
    aten.ones_like.default: _like,
    aten.full_like.default: _like,
    aten._pin_memory.default: _like,
    aten.empty_like.default: _convert,
    aten._to_copy.default: _convert,
    aten.copy_.default: copy,
    aten.zero_.default: partial(_run_in_place, Tensor.zero_),
    aten.fill_.Scalar: partial(_run_in_place, Tensor.fill_),
    aten.fill_.Tensor: _fill_value,
    aten.index_put_.default: _put_where,
    aten.new_zeros.default: _new_filled,
    aten.new_ones.default: _new_filled,
    aten.new_full.default: _new_filled,
    aten.new_empty.default: _new_empty,
    aten.new_empty_strided.default: _new_empty_strided,
    aten.is_same_size.default: _is_same_size,
    # Composite on CPU and CUDA, where it comes here under modes alone; other backends have kernels.
    aten._has_compatible_shallow_copy_type.default: _can_take_data_of,
    aten.is_pinned.default: _on_local,
    aten.record_stream.default: _on_local,
}
