"""The parts of a flat gradient: packed one by one, or cut from a reduced shard.

[Note: Packing in place]
When autograd has accumulated the whole gradient of a parameter, every node that used the
parameter has run, so the gradient may take the place of the value: the unsharded buffer has
just the right layout, and the backward of a unit then needs no second buffer. Where a later use
is possible (create_graph, a backward nested in a backward, a forward that still runs or that no
hooks have seen, a detached alias, a graph recorded while the parameter was frozen), the gradients
are packed into a buffer of their own. `FlatGradients.pack` decides that for a round, of four facts:
what the unit and the backward allow (`_pack` of runtime/backward.py), the dtypes and the layout
(`Packing.fits_values`), the state of the full values, and who else may read them (`Readers`).

The write changes the parameter's version counter, so a late read that this rule misses raises in
autograd; the next gather restores the counters.

[Note: Persistent gradients]
Under `SHARD_OPTIM`, and where each rank holds the whole parameter, the buffer stays from the
first backward on. Gradients of microbatches that are not reduced add up in it, it is reduced in
place, and the published `.grad`s are views of the result: a step allocates nothing. A round
that begins while they are still set moves them out first.

A user may hold gradients of an earlier step, to compare them for example. Then tensors of the user
share the buffer's storage; it is left to them, and a new buffer is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, strided

from composable_shard.comm import ShardGroup
from composable_shard.dtensors import from_local
from composable_shard.flat_param.entries import ParamEntry
from composable_shard.layout import FlatLayout
from composable_shard.tensor import (
    LATE_READS,
    FlatShard,
    ShardSpec,
    rebind,
)
from composable_shard.torch_private import (
    DisableTorchFunctionSubclass,
    make_wrapper,
    storage_of,
    storage_uses_of,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class GradPieces:
    """Splits a gradient shard into the parameters' gradients, each a view.

    Args:
        layout: Layout of the flat parameter.
        rank: The rank that the shard belongs to.
    """

    def __init__(self, layout: FlatLayout, rank: int) -> None:
        sizes = layout.piece_numels(rank)
        # Most gaps are empty, and each view costs a microsecond.
        kept = [index for index, size in enumerate(sizes) if index % 2 or size]
        self._sizes = [sizes[index] for index in kept]
        self._indices = [place for place, index in enumerate(kept) if index % 2]
        self._has_gaps = len(self._indices) < len(kept)

    def split(self, shard: Tensor) -> Sequence[Tensor]:
        """Return the parameters' parts of a shard of shape `(own_numel,)`."""
        # Views that keep the shard's memory, and not the tensor.
        parts = shard.unsafe_split_with_sizes(self._sizes)
        return [parts[index] for index in self._indices] if self._has_gaps else parts


def add_gradients(
    entries: Sequence[ParamEntry], pieces: Sequence[Tensor], used: Sequence[bool]
) -> None:
    """Set, or add to, the gradients of the sharded parameters that were used.

    Args:
        entries: The parameters.
        pieces: The gradients of their elements on this rank, of one dtype and device.
        used: Which of the parameters got a gradient on any rank; one of another owner gets none.

    Raises:
        RuntimeError: If a parameter's `.grad` is not a shard like the parameter.
    """
    dtype, device = pieces[0].dtype, pieces[0].device
    are_owned = bool(entries[0].spec.layout.owners)  # asked once: an attribute of a spec is slow
    with DisableTorchFunctionSubclass():  # [Note: Many getters]
        for entry, piece, is_used in zip(entries, pieces, used, strict=True):
            param, spec = entry.sharded, entry.spec
            if not is_used or (are_owned and spec.is_owned_by_other_rank):
                continue
            grad = param.own_grad
            if grad is None:
                # As `wrap` does, which would take a call for each.
                shape, stride = spec.wrapper
                shard = make_wrapper(FlatShard, shape, stride, None, None, dtype, strided, device)
                shard.__dict__ = {"_local": piece, "_shard_spec": spec, "_guard": None}
                param.own_grad = shard
                continue
            if not isinstance(grad, FlatShard) or grad._local.shape != piece.shape:
                grad = checked_gradient(param, grad)
            if LATE_READS.are_there:  # a save in the background may read it, [Note: Late reads]
                LATE_READS.make(grad._local)
            grad._local.add_(piece)


def checked_gradient(param: FlatShard, grad: Tensor) -> FlatShard:
    """Return the gradient of a sharded parameter.

    Raises:
        RuntimeError: If it is no shard like the parameter.
    """
    if isinstance(grad, FlatShard) and grad._shard_spec == param._shard_spec:
        return grad
    raise RuntimeError(
        f"expected .grad of parameter '{param._shard_spec.label}' to be None or a FlatShard, got "
        f"{type(grad).__name__}. Let backward() set it, or assign a FlatShard."
    )


def copy_arrived(
    target: Sequence[Tensor], source: Sequence[Tensor], arrived: Sequence[bool], scale: float
) -> None:
    """Copy the gradients that have arrived, times a scale."""
    for to, view, has_arrived in zip(target, source, arrived, strict=True):
        if has_arrived:
            to.copy_(view)
            if scale != 1.0:
                to.mul_(scale)


def move_shard(shard: Tensor, old: FlatLayout, new: FlatLayout, rank: int) -> Tensor:
    """Return a shard of gradients in another layout, zero where parameters had no elements."""
    if old == new:
        return shard
    start, end = new.shard_range(rank)
    moved = shard.new_zeros(end - start)
    for index, numel in enumerate(old.numels):
        start, end = new.local_range(index, rank)
        if numel:
            moved[start:end] = shard[slice(*old.local_range(index, rank))]
    return moved


class Packing(NamedTuple):
    """How gradients are packed; known once they have buffers.

    Attributes:
        value_places: Places of the values, in dense shapes, under the parameters' version counters:
            views of the memory that `full.buffer` and `full.unversioned` share.
        is_plain: Gradients are packed as they come: none is a DTensor, nothing is frozen.
        fits_values: A gradient has room in the place of its value, by layout and dtype.
        is_cast: The reduce dtype differs from the values'. A buffer of their own has the reduce
            dtype; what is packed in place is cast when its reduction is issued.
        scale: Factor by which gradients are multiplied when they are packed.
        factor: `scale` as a 0-d tensor; None if scale is 1.
    """

    value_places: list[Tensor]
    is_plain: bool
    fits_values: bool
    is_cast: bool
    scale: float
    factor: Tensor | None


class GradientMemory:
    """Memory for gradients that are not packed in place, and for persistent results.

    Attributes:
        buffer: Shape `(padded_numel,)`; storage size 0 unless a round needs it.
        places: Of the parameters' gradients, in their dense shapes, views of `buffer`; one without
            elements for a parameter that has no place. Made when first needed: never, if all
            gradients are packed in place.
        part: Shape `(own_numel,)`: this rank's part, where a reduction ends in place; else None.
        result: Shape `(own_numel,)`: persistent memory of the main dtype, where it is needed.
    """

    def __init__(self) -> None:
        self.buffer = self.result = torch.empty(0)
        self.places: list[Tensor] = []
        self.part: Tensor | None = None
        self._num_uses = 0  # uses of the buffer's storage by this object

    def replace(self, buffer: Tensor, part: tuple[int, int] | None) -> None:
        """Replace the buffer.

        Args:
            buffer: With memory, of shape `(layout.padded_numel,)`.
            part: This rank's part, where a reduction ends in place.
        """
        self.buffer, self.places = buffer, []
        self.part = None if part is None else buffer[slice(*part)]
        self._num_uses = storage_uses_of(buffer)

    def make_places(self, entries: Sequence[ParamEntry], layout: FlatLayout) -> list[Tensor]:
        """Make `places`, once the buffer has memory."""
        buffer, specs = self.buffer, [each.spec for each in entries]
        self.places = [
            buffer.as_strided(spec.dense_shape, spec.dense_stride, offset)
            if numel == spec.numel
            else buffer[:0]
            for spec, offset, numel in zip(specs, layout.offsets, layout.numels, strict=True)
        ]
        self._num_uses = storage_uses_of(buffer)
        return self.places

    def is_lost(self, params: Sequence[FlatShard]) -> bool:
        """Move results out of persistent memory; return whether a user still holds the buffer.

        If so, the caller must replace the buffer. `result` is replaced here.
        """
        is_cast = self.result.numel() > 0
        memory = self.result if is_cast else self.buffer
        move_out_gradients(params, memory)
        if storage_uses_of(memory) <= (1 if is_cast else self._num_uses):
            return False
        if is_cast:
            self.result = torch.empty_like(self.result)
        return not is_cast

    def result_of(self, numel: int) -> Tensor:
        """Return `result`; allocate it at the first use."""
        if not self.result.numel():
            self.result = self.result.new_empty(numel)
        return self.result


def check_has_place(layout: FlatLayout, index: int, entry: ParamEntry) -> None:
    """Check that there is a place for the gradient of parameter `index`.

    Raises:
        RuntimeError: If it was frozen.
    """
    if layout.numels[index] != entry.spec.numel:
        raise RuntimeError(
            f"parameter '{entry.label}' got a gradient, and was frozen when the backward began. "
            "Call requires_grad_(True) on it before the forward."
        )


def packing_scale(
    group: ShardGroup, reduce_dtype: torch.dtype, *, is_cast: bool
) -> tuple[float, Tensor]:
    """Return the factor for packing gradients: 1 / ranks, or 1 to divide later.

    Gradients are divided once. They are when they are packed:

    - in fp16, as a sum may overflow where a mean does not;
    - if each rank holds the whole parameter: a later division would be a pass over all of it;
    - on the CPU if the division is exact, for 2, 4, 8 ... ranks: one pass less over the shard.

    The last two only where packing does not cast. Else the sum is divided, where the reduction
    ends: `PendingReduction.finish` does it for this rank's part, or NCCL as it adds up (AVG, in
    `SumAlgorithm`); `FlatReduction.finish` if each rank holds the whole parameter. With two stages
    it is divided between them, by the number of all ranks. So is a divide factor that the user has
    set, less what packing has divided already.

    Args:
        group: The ranks whose gradients are averaged.
        reduce_dtype: Dtype in which gradients are packed.
        is_cast: Whether gradients arrive in another dtype.

    Returns:
        The scale as a number and as a 0-d CPU tensor, in the reduce dtype if that is exact: kernels
        take it fastest without a conversion.
    """
    is_exact = group.device.type == "cpu" and group.num_ranks & (group.num_ranks - 1) == 0
    is_cheap = not is_cast and (group.size == 1 or is_exact)
    scale = 1.0 / group.num_ranks if is_cheap or reduce_dtype is torch.float16 else 1.0
    factor = torch.tensor(scale, dtype=torch.float64, device="cpu")
    if reduce_dtype.is_floating_point and factor.to(reduce_dtype).item() == scale:
        factor = factor.to(reduce_dtype)
    return scale, factor


def write_gradient(view: Tensor, gradient: Tensor, factor: Tensor | None) -> None:
    """Copy a gradient, times a tensor of 0 dimensions, into a view: one kernel, one pass."""
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    if factor is None:
        view.copy_(gradient)
    else:
        torch.mul(gradient, factor, out=view)


def move_out_gradients(params: Sequence[FlatShard], memory: Tensor) -> None:
    """Copy gradients of sharded parameters that are views of `memory` into new memory."""
    storage = storage_of(memory)
    for param in params:
        grad = param.grad
        if isinstance(grad, FlatShard) and storage_of(grad._local) == storage:
            rebind(grad, grad._local.clone(), grad._shard_spec, grad._guard)


def local_gradient(gradient: Tensor, spec: ShardSpec) -> Tensor:
    """Return the dense gradient that belongs to a parameter's local part.

    It is brought to its parameter's placements first: layers with sequence parallelism produce
    partial sums.
    """
    if spec.tensor_parallel is None or spec.plain_gradients == spec.tensor_parallel[1]:
        return gradient
    mesh, placements = spec.tensor_parallel
    if spec.plain_gradients is not None:
        gradient = from_local(gradient, mesh, spec.plain_gradients)
    return cast("DTensor", gradient).redistribute(mesh, placements).to_local()
