"""Checks of the operands of rules, and values that users give for a shard.

The elements of such a value that a rank holds form a region, [Note: Regions].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from composable_shard.layout import Region, whole
from composable_shard.options import FULL_SIZE, GRADIENTS, INTO_PLAIN, WHOLE_NEEDED
from composable_shard.tensor.flat_shard import FlatShard, is_trainable
from composable_shard.tensor.rule_table import NeedsWhole
from composable_shard.tensor.shard_spec import ShardSpec, local_box
from composable_shard.torch_private import (
    AsyncCollectiveTensor,
    OpOverload,
    TensorBase,
    VariableFunctions,
    is_traceable_wrapper_subclass,
    schema_of,
)


class SchemaArgument(Protocol):
    """The part of an op's schema argument that the rules read."""

    name: str
    type: Any
    kwarg_only: bool
    is_write: bool


def schema_arguments(func: OpOverload) -> list[SchemaArgument]:
    """Return the op's arguments in order."""
    return cast("list[SchemaArgument]", schema_of(func).arguments)


def binding(func: OpOverload) -> Callable[..., Any]:
    """Return the C function of `torch` behind an op, or the op itself if there is none.

    It takes the same arguments, for two thirds of the host time of a call through `torch.ops`.
    """
    name = schema_of(func).name.removeprefix("aten::")
    is_method = name.endswith("_") and not name.startswith("_")
    found: Callable[..., Any] = getattr(TensorBase if is_method else VariableFunctions, name, func)
    return found


def note_write(shard: FlatShard) -> None:
    """Tell the shard's guard, if it has one, that the shard is about to be written."""
    if shard._guard is not None:
        shard._guard.note_write(shard._shard_spec.label.fqn)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among an op's arguments, those in lists too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def shards_in(value: Any) -> list[FlatShard]:
    """Return the shards among an op's arguments."""
    return [each for each in tensors_in(value) if isinstance(each, FlatShard)]


def _describe(tensor: Tensor) -> str:
    if isinstance(tensor, FlatShard):
        return f"'{tensor._shard_spec.label.fqn}' {tuple(tensor.shape)}"
    return f"{type(tensor).__name__} {tuple(tensor.shape)}"


def describe_operands(args: Iterable[Any]) -> str:
    """Return names and shapes of the tensors among an op's arguments, the first few of them.

    Leaves out all that differs between ranks, because every rank must raise the same error.
    """
    tensors = list(tensors_in(list(args)))
    return ", ".join(map(_describe, tensors[:4])) + (", ..." if len(tensors) > 4 else "")


def unsupported(func: OpOverload, args: Iterable[Any]) -> RuntimeError:
    """Return the error for an op that has no meaning on one rank's slice."""
    args = list(args)
    shards = shards_in(args)
    has_param = any(item._guard is not None or is_trainable(item) for item in shards)
    what, remedy = ("parameter", WHOLE_NEEDED) if has_param else ("tensor", GRADIENTS)
    return owner_error(func, [each._shard_spec for each in shards]) or NeedsWhole(
        f"{func.overloadpacket} can't run on a sharded {what}, of which each rank holds only a "
        f"flat range: got {describe_operands(args)}.",
        remedy,
    )


def owner_error(func: OpOverload, specs: Iterable[ShardSpec]) -> NeedsWhole | None:
    """Return the error for an op that needs values that one rank owns; None for other ops."""
    for spec in specs:
        if spec.owner is not None and spec.world_size > 1:
            return NeedsWhole(
                f"{func.overloadpacket} needs the values of parameter '{spec.label.fqn}' "
                f'{tuple(spec.shape)} (granularity="param"), which rank {spec.owner} of its shard '
                "group holds whole, and the others not at all.",
                "Run it on that rank alone, or call p.full_tensor() on all ranks.",
            )
    return None


def check_same_spec(func: OpOverload, first: ShardSpec, other: ShardSpec) -> None:
    """Raise if two operands are shards of different ranges; compares by identity first."""
    if other is not first and other != first:
        is_moved = first.owner is not None and first.label.fqn == other.label.fqn
        remedy = "Use p.full_tensor() to combine different parameters."
        if is_moved:
            remedy = (
                "The parameter was given to another rank after the other was made from it: build "
                "an optimizer that makes its state at once (Adagrad) after the outermost "
                "fully_shard."
            )
        raise (None if is_moved else owner_error(func, (first, other))) or NeedsWhole(
            f"{func.overloadpacket} needs shards of one and the same range, got "
            f"{_describe_spec(first)} and {_describe_spec(other)}.",
            remedy,
        )


def _describe_spec(spec: ShardSpec) -> str:
    numels = ", ".join(map(str, spec.numels[:8])) + (", ..." if spec.world_size > 8 else "")
    return (
        f"'{spec.label.fqn}' {tuple(spec.shape)}, elements per rank {numels}, group "
        f"'{spec.group_name}'"
    )


def plain_scalar(func: OpOverload, tensor: Tensor, spec: ShardSpec, numel: int) -> Tensor:
    """Return a plain operand in a form that fits a slice of `numel` elements.

    Only tensors that are the same everywhere fit: 0-dim ones, and expanded ones (all strides
    zero), as the gradient of a sum is.
    """
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()  # what DTensor's reductions return
    if not is_traceable_wrapper_subclass(tensor):
        shape = tensor.shape
        if not shape:
            # A slice is 1-dim where the parameter is 0-dim: without this, type promotion would
            # rank the two differently.
            return tensor if spec.shape else tensor.expand(numel)
        if not any(tensor.stride()) and _broadcasts(shape, spec.shape):
            return tensor.as_strided((numel,), (0,))
    raise owner_error(func, (spec,)) or NeedsWhole(
        f"{func.overloadpacket} combines the sharded parameter '{spec.label.fqn}' "
        f"{tuple(spec.shape)} with a {type(tensor).__name__} of shape {tuple(tensor.shape)}, of "
        "which each rank would need its own part.",
        FULL_SIZE,
    )


def _broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    if len(shape) > len(target):
        return False
    trailing = target[len(target) - len(shape) :]
    return all(size in (1, wanted) for size, wanted in zip(shape, trailing, strict=True))


def write_to_plain(func: OpOverload, tensor: Any, args: Iterable[Any]) -> RuntimeError:
    """Return the error for an op that would write a slice's result into a plain tensor."""
    shards = shards_in(list(args))
    shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else None
    return owner_error(func, [each._shard_spec for each in shards]) or NeedsWhole(
        f"{func.overloadpacket} would write a slice of the sharded parameter "
        f"{describe_operands(shards[:1])} into a {type(tensor).__name__} of shape {shape}.",
        INTO_PLAIN,
    )


def has_fitting_shape(value: Tensor, spec: ShardSpec) -> bool:
    """Return whether a value has the parameter's shape.

    For a parameter of a tensor-parallel mesh a plain tensor may be its dense local part too; and a
    0-d parameter takes a tensor of one element, as torch's own `load_state_dict` does.
    """
    if value.shape == spec.shape or (not spec.shape and value.numel() == 1):
        return True
    is_plain = not isinstance(value, FlatShard | DTensor)
    return is_plain and spec.tensor_parallel is not None and value.shape == spec.dense_shape


def needs_gather(value: Tensor, spec: ShardSpec) -> bool:
    """Return whether `slice_given` communicates, because the value is distributed differently."""
    if isinstance(value, FlatShard):
        return value._shard_spec != spec
    if not isinstance(value, DTensor):
        return False
    return spec.tensor_parallel != (value.device_mesh, tuple(value.placements))


def slice_given(value: Tensor, spec: ShardSpec) -> Tensor:
    """Return this rank's part of a value, shape `(end - start,)`; it may share memory.

    The value is a plain tensor, the same on all ranks, a DTensor, or a FlatShard of any layout.
    Issues one all-gather over the value's ranks if `needs_gather`.
    """
    if isinstance(value, FlatShard) and value._shard_spec == spec:
        return value._local
    if needs_gather(value, spec):
        value = value.full_tensor()  # type: ignore[attr-defined] # of both classes
    value = value.detach()
    if isinstance(value, DTensor):
        return spec.slice(value.to_local())
    if value.shape != spec.dense_shape or spec.shape == spec.dense_shape:
        value = value.reshape(spec.shape)
        if spec.tensor_parallel is not None:
            mesh, placements = spec.tensor_parallel
            # src_data_rank=None: cut locally, as every rank has the same values.
            distributed = distribute_tensor(value, mesh, placements, src_data_rank=None)
            value = distributed.to_local()
    return spec.slice(value)


def region_of(tensor: Tensor) -> Region:
    """Return which of the logical tensor's elements this rank holds."""
    if isinstance(tensor, FlatShard):
        return tensor._shard_spec.region
    if isinstance(tensor, DTensor):
        if any(placement.is_partial() for placement in tensor.placements):
            raise ValueError(
                "expected a DTensor of shards or replicas, got placements "
                f"{tuple(tensor.placements)}: redistribute it first"
            )
        box = local_box(tensor.shape, tensor.device_mesh, tensor.placements)
        return Region(box, tuple(range(tensor.ndim)), 0, tensor.to_local().numel())
    return whole(tensor.shape)


def local_part(tensor: Tensor) -> Tensor:
    """Return the elements of `region_of(tensor)`, 1-D and dense, without copying if it can."""
    if isinstance(tensor, FlatShard):
        return tensor._local.detach()  # 1-D also where this rank holds all of it
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # Conjugated or negated views are marks on memory that has other values.
    return local.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def find_places(target: Region, source: Region, start: int, end: int) -> tuple[Tensor, Tensor]:
    """Find the elements `[start, end)` of one region in another of the same tensor.

    Return the places of those that are in `source`, counted from the target's first element, and
    their places there, counted from the source's first; both int64, 1-D.
    """
    rest = torch.arange(target.start + start, target.start + end, device="cpu")
    indices: dict[int, Tensor] = {}
    for dim in reversed(target.order):
        low, high = target.box[dim]
        indices[dim] = rest % (high - low) + low
        rest = rest // (high - low)
    place = torch.zeros_like(rest)
    is_there = torch.ones_like(rest, dtype=torch.bool)
    for dim in source.order:
        low, high = source.box[dim]
        is_there &= (indices[dim] >= low) & (indices[dim] < high)
        place = place * (high - low) + (indices[dim] - low)
    is_there &= (place >= source.start) & (place < source.end)
    found = is_there.nonzero().view(-1)
    return found + start, place[found] - source.start
