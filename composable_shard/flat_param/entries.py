"""The record of each parameter: its objects, the places where modules show it, its spec."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn

from composable_shard.flat_param.slots import ModuleItems, Slot
from composable_shard.flat_param.swapping import swap_keeping_hooks
from composable_shard.layout import FlatLayout
from composable_shard.tensor import (
    FlatShard,
    FlatShardOfDTensor,
    ParamLabel,
    ShardSpec,
    WriteGuard,
    rebind,
)


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the stride a tensor gets in a flat parameter.

    The tensor's own stride if its elements fill a contiguous range in any order of dims (row-major,
    channels-last, transposed), row-major otherwise (expanded, strided slices).
    """
    if tensor.is_contiguous() and not {0, 1}.intersection(tensor.shape):
        return tensor.stride()  # of most
    expected = 1
    for size, stride in sorted(
        zip(tensor.shape, tensor.stride(), strict=True), key=lambda dim: (dim[1], dim[0])
    ):
        if size == 1:
            continue
        if stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    if any(size == 1 for size in tensor.shape):
        # Strides of dims of size 1 are arbitrary; canonical ones compare equal on all ranks.
        return torch.empty_like(
            torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
        ).stride()
    return tensor.stride()


def zero_gaps(shard: Tensor, layout: FlatLayout, rank: int) -> None:
    """Set the gaps between parameters in a rank's shard to zero, because they count in norms."""
    sizes = layout.piece_numels(rank)
    for end, numel in zip([*accumulate(sizes)][::2], sizes[::2], strict=True):
        if numel:  # most gaps are empty
            shard[end - numel : end].zero_()


def zero_padding(full: Tensor, layout: FlatLayout) -> None:
    """Set the padding of a buffer of shape `(layout.padded_numel,)` to zero."""
    for start, end in layout.padding_ranges():
        full[start:end].zero_()


@dataclass
class ParamEntry:
    """One managed parameter: the object users hold, and the one modules compute with."""

    sharded: FlatShard  # the original Parameter object; spec.shape
    spec: ShardSpec
    slots: tuple[Slot, ...] = ()  # every place that shows it; several if tied
    # spec.shape, a view of the unsharded buffer; printing it without storage would crash
    unsharded: nn.Parameter | None = field(default=None, repr=False)
    shard_view: Tensor | None = None  # (spec's local numel,) view of the local shard
    runs_hooks: bool = False  # `unsharded` runs the hooks that users registered on `sharded`

    @property
    def label(self) -> ParamLabel:
        """The name for messages."""
        return self.spec.label

    def slice_of(self, shard: Tensor) -> Tensor:
        """Return the parameter's part of a tensor of shape `(own_numel,)`, a view."""
        spec = self.spec
        if spec.index is None:
            start, end = spec.local_range
            return shard[: end - start]
        start, end = spec.layout.local_range(spec.index, spec.rank)
        return shard[start:end]

    def hidden_at(self, place: ModuleItems | None) -> FlatShard | None:
        """Return a slot's value while the parameter is hidden: None if the slot registers it."""
        return self.sharded if place is None else None

    def fill(self, full: Tensor) -> None:
        """Write this rank's part of the parameter's full values, before anything reads the shard.

        Args:
            full: Of the dense shape, on any device.
        """
        assert self.shard_view is not None
        self.shard_view.copy_(self.spec.slice(full))

    def set_slots(self, slots: tuple[Slot, ...]) -> None:
        """Let the parameter be shown in these places alone."""
        self.slots = slots

    def add_slots(self, slots: tuple[Slot, ...]) -> None:
        """Let the parameter be shown in further places."""
        self.slots = self.slots + slots

    def replace(self, original: nn.Parameter) -> None:
        """Turn the original Parameter object into the sharded parameter; attributes carry over.

        `.grad`, which must be None, stays the caller's.
        """
        swap_keeping_hooks(original, self.sharded)
        self.sharded = original  # type: ignore[assignment]
        if self.shard_view is None or original.dtype != self.shard_view.dtype:
            raise RuntimeError(
                f"parameter '{self.label}' has {original.dtype} after it was sharded, not that of "
                "its shard; please report this"
            )

    def view_in(self, shard: Tensor, guard: WriteGuard) -> None:
        """Make the sharded parameter a view of its part of a new shard."""
        self.shard_view = self.slice_of(shard).data
        param, view = self.sharded, self.shard_view
        if (
            param.dtype != view.dtype
            or param.device != view.device
            or param.shape != self.spec.shape
        ):
            self.remake(guard)
        rebind(param, view, self.spec, guard)

    def remake(self, guard: WriteGuard) -> None:
        """Give the sharded parameter the dtype, device and shape that the entry has now."""
        param = self.sharded
        shown_class = FlatShardOfDTensor if isinstance(param, FlatShardOfDTensor) else FlatShard
        old_class, flag = type(param), param.requires_grad
        shard = shown_class(cast(Tensor, self.shard_view), self.spec, guard=guard)
        swap_keeping_hooks(cast(nn.Parameter, param), nn.Parameter(shard, flag))
        param.__class__ = old_class
