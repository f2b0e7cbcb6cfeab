"""Checks of the operands of rules, and values that users give for a shard.

The elements of such a value that a rank holds form a region, [Note: Regions].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from composable_shard.dtensors import distribute, is_dtensor
from composable_shard.layout import Region, whole
from composable_shard.options import OWNED, OWNED_IN_GRAPH, OWNED_IN_STEP
from composable_shard.tensor.flat_shard import FlatShard, is_distributed
from composable_shard.tensor.late_reads import LATE_READS
from composable_shard.tensor.rule_table import NeedsWhole
from composable_shard.tensor.shard_spec import ShardSpec, local_box
from composable_shard.torch_private import (
    OpOverload,
    TensorBase,
    VariableFunctions,
    is_in_step,
    is_pending_result,
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


def note_write_to_local(shard: FlatShard) -> None:
    """Tell that the slice of a shard is about to be written, not by an op on the shard."""
    note_write(shard)
    if LATE_READS.are_there:
        LATE_READS.make(shard._local)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among an op's arguments, those in lists too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def written_in(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an op writes."""
    for position, argument in enumerate(schema_arguments(func)):
        if argument.is_write:
            value = kwargs.get(argument.name)
            yield from tensors_in(args[position] if position < len(args) else value)


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
    return owner_error(func, [each._shard_spec for each in shards_in(args)]) or NeedsWhole(
        f"{func.overloadpacket} needs whole tensors, of which each rank holds a part: got "
        f"{describe_operands(args)}."
    )


def owner_error(func: OpOverload, specs: Iterable[ShardSpec]) -> NeedsWhole | None:
    """Return the error for an op that needs values that one rank owns; None for other ops."""
    for spec in specs:
        if spec.owner is not None and spec.world_size > 1:
            remedies = OWNED, OWNED_IN_GRAPH
            if is_in_step():
                remedies = OWNED_IN_STEP, OWNED_IN_STEP
            return NeedsWhole(
                f"{func.overloadpacket} needs the values of parameter '{spec.label.fqn}' "
                f'{tuple(spec.shape)} (granularity="param"), which rank {spec.owner} of its shard '
                "group holds whole, and the others not at all.",
                *remedies,
            )
    return None


def check_same_spec(func: OpOverload, first: ShardSpec, other: ShardSpec) -> None:
    """Raise if two operands are shards of different ranges; compares by identity first."""
    if other is first or other == first or first.is_owned_as(other):
        return
    if first.owner is not None and first.label is other.label:
        raise NeedsWhole(
            f"{func.overloadpacket} combines '{first.label.fqn}' {tuple(first.shape)} with what "
            "was made of it before it was given to another rank.",
            "Build an optimizer that makes its state at once (Adagrad) after the outermost "
            "fully_shard.",
        )
    raise owner_error(func, (first, other)) or NeedsWhole(
        f"{func.overloadpacket} combines '{first.label.fqn}' {tuple(first.shape)} and "
        f"'{other.label.fqn}' {tuple(other.shape)}, which are cut differently."
    )


def plain_operand(func: OpOverload, tensor: Tensor, spec: ShardSpec, numel: int) -> Tensor:
    """Return this rank's `numel` elements of a plain operand, as it broadcasts to the shape.

    A plain tensor is a whole value, the same on all ranks. A DTensor that lies otherwise than the
    parameter is gathered.
    """
    if is_pending_result(tensor):
        tensor = tensor.wait()  # what DTensor's reductions return
    shape = tensor.shape
    if is_dtensor(tensor):
        if shape == spec.shape:
            return slice_given(tensor, spec)
        tensor = tensor.full_tensor()
    if not is_traceable_wrapper_subclass(tensor):
        if not shape:
            # A slice is 1-dim where the parameter is 0-dim: without this, type promotion would
            # rank the two differently.
            return tensor if spec.shape else tensor.expand(numel)
        if _broadcasts(shape, spec.shape):
            if not any(tensor.stride()):
                return tensor.as_strided((numel,), (0,))
            return _slice_expanded(tensor, spec)
    raise owner_error(func, (spec,)) or NeedsWhole(
        f"{func.overloadpacket} combines the sharded parameter '{spec.label.fqn}' "
        f"{tuple(spec.shape)} with a {type(tensor).__name__} of shape {tuple(tensor.shape)}."
    )


def _slice_expanded(tensor: Tensor, spec: ShardSpec) -> Tensor:
    """Return this rank's part of a plain tensor that broadcasts to the spec's shape."""
    expanded = tensor.expand(spec.shape)
    is_row_major = spec.tensor_parallel is None and spec.wrapper[1] is None
    if not is_row_major or len(spec.shape) == 1 or expanded.is_contiguous():
        return slice_given(expanded, spec)
    # A range of an expanded tensor would copy all of it: only the rows that this rank holds.
    start, end = spec.local_range
    if start == end:
        return tensor.new_empty(0)
    row = spec.shape[1:].numel()
    first, last = start // row, -(-end // row)
    return expanded[first:last].reshape(-1)[start - first * row : end - first * row]


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
        f"{func.overloadpacket} writes the sharded parameter {describe_operands(shards[:1])} into "
        f"a {type(tensor).__name__} of shape {shape}."
    )


def has_fitting_shape(value: Tensor, spec: ShardSpec) -> bool:
    """Return whether a value has the parameter's shape.

    For a parameter of a tensor-parallel mesh a plain tensor may be its dense local part too; and a
    0-d parameter takes a tensor of one element, as torch's own `load_state_dict` does.
    """
    if value.shape == spec.shape or (not spec.shape and value.numel() == 1):
        return True
    is_plain = not is_distributed(value)
    return is_plain and spec.tensor_parallel is not None and value.shape == spec.dense_shape


def needs_gather(value: Tensor, spec: ShardSpec) -> bool:
    """Return whether `slice_given` communicates, because the value is distributed differently."""
    if isinstance(value, FlatShard):
        return value._shard_spec != spec
    if not is_dtensor(value):
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
    if is_dtensor(value):
        return spec.slice(value.to_local())
    if value.shape != spec.dense_shape or spec.shape == spec.dense_shape:
        value = value.reshape(spec.shape)
        if spec.tensor_parallel is not None:
            mesh, placements = spec.tensor_parallel
            value = distribute(value, mesh, placements).to_local()
    return spec.slice(value)


def region_of(tensor: Tensor) -> Region:
    """Return which of the logical tensor's elements this rank holds."""
    if isinstance(tensor, FlatShard):
        return tensor._shard_spec.region
    if is_dtensor(tensor):
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
    local = tensor.to_local() if is_dtensor(tensor) else tensor
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
