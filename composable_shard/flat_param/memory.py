"""`MemoryPlan`: which buffers a flat parameter gets, in which dtypes and on which devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from composable_shard.comm import HOST, QUANTISED, ShardGroup, alloc_host, copies_for
from composable_shard.flat_param.entries import ParamEntry, zero_gaps
from composable_shard.flat_param.extended_gathers import Codec, ExtendedValues
from composable_shard.flat_param.full_values import FullValues
from composable_shard.flat_param.gradients import FlatGradients
from composable_shard.flat_param.host_gradient import OffloadedGradients
from composable_shard.flat_param.local_shard import LocalShard
from composable_shard.flat_param.precision import Precision
from composable_shard.flat_param.shown import ShownParams
from composable_shard.flat_param.storage import free_storage
from composable_shard.flat_param.two_stages import make_reduction
from composable_shard.layout import FlatLayout
from composable_shard.options import OffloadPolicy
from composable_shard.tensor import WriteGuard

_ALIGNMENT_NBYTES = 16
_OWNED_ALIGNMENT_NBYTES = 64  # torch's own, on which the rounding of matrix products depends


def plan_layout(
    params: Sequence[Tensor],
    world_size: int,
    precision: Precision | None = None,
    *,
    blocks: Sequence[int] = (),
    owners: Sequence[int] = (),
) -> FlatLayout:
    """Lay out the dense tensors of one flat parameter; reads only their sizes and dtypes."""
    precision = precision or Precision()
    itemsize = precision.itemsize(precision.main_dtype or params[0].dtype)
    nbytes = _OWNED_ALIGNMENT_NBYTES if owners else _ALIGNMENT_NBYTES
    alignment = max(1, nbytes // itemsize)
    numels = [param.numel() for param in params]
    return FlatLayout.plan(numels, world_size, alignment, blocks=blocks, owners=owners)


class MemoryPlan(NamedTuple):
    """The facts that decide which memory a flat parameter gets."""

    shard_group: ShardGroup  # the ranks that share it
    precision: Precision  # the dtypes that differ from the local shard's
    offload: OffloadPolicy  # what lives on the host
    is_kept: bool  # the unsharded buffer is never freed, see [Note: Kept buffers]

    @property
    def is_pinned(self) -> bool:
        """Whether host memory is pinned. Only what is offloaded has host memory."""
        is_pinned = self.offload.is_active and self.offload.pin_memory
        return is_pinned and self.shard_group.device.type != HOST.type

    def make_gradients(
        self, layout: FlatLayout, shown: ShownParams, *, is_persistent: bool
    ) -> FlatGradients:
        """Return a handle's gradients, which go to the host where they are offloaded."""
        kind = OffloadedGradients if self.offload.is_active else FlatGradients
        reduction = make_reduction(self.shard_group, layout)
        return kind(layout, reduction, shown, is_persistent=is_persistent)

    def check(self, shown: Sequence[ParamEntry], name: str) -> None:
        """Check that a shard can have the dtype and be on the device of its parameters."""
        kinds = [(each.sharded._local.dtype, each.sharded._local.device) for each in shown]
        dtype, device = kinds[0]
        if len(set(kinds)) > 1:
            pairs = zip(shown, kinds, strict=True)
            raise RuntimeError(
                "expected the parameters of one unit that were sharded together to change dtype "
                "and device together, got "
                + ", ".join(f"'{each.label}': {kind[0]} on {kind[1]}" for each, kind in pairs)
                + ". Convert the whole unit."
            )
        if self.offload.is_active and device.type not in (HOST.type, "meta"):
            raise RuntimeError(
                f"expected parameter '{shown[0].label}' of unit '{name}' on the CPU, where its "
                f"OffloadPolicy keeps it, got {device}, as after model.to(device). Call "
                "model.cpu(), or model.to_empty(device='cpu') for a model from the meta device; "
                "the unit computes on its mesh's device all the same."
            )
        main_dtype = self.precision.main_dtype
        if main_dtype is not None and dtype != main_dtype:
            raise RuntimeError(
                f"the parameters of unit '{name}' were converted to {dtype}, and its "
                f"MixedPrecisionPolicy says main_dtype={main_dtype}. Convert them back, or shard "
                "with another policy; to compute in another dtype, use param_dtype."
            )

    def check_pinned(self, shard: Tensor, name: str) -> None:
        """Check that a shard is in the memory that it was given."""
        if self.is_pinned and not shard.is_meta and not shard.is_pinned():
            raise RuntimeError(
                f"expected the shard of parameter '{name}' in pinned memory, and it is not, "
                "as after share_memory(). Pass OffloadPolicy(pin_memory=False) to leave it so."
            )

    def allocate(
        self, layout: FlatLayout, guard: WriteGuard, dtype: torch.dtype, device: torch.device
    ) -> tuple[LocalShard, FullValues]:
        """Allocate a local shard of this dtype (on the host if offloaded), and its full values."""
        group = self.shard_group
        is_offloaded = self.offload.is_active and device.type != "meta"
        if is_offloaded:
            device = group.device
        param_dtype = self.precision.computes_in(dtype)
        wire_dtype = self.precision.travels_in(dtype) if group.size > 1 else param_dtype
        start, end = layout.shard_range(group.rank)
        extension, full_numel = self.precision.extension, layout.padded_numel
        if extension is not None:
            full_numel, wire_dtype = 0, dtype  # its class encodes main values
        buffer = torch.empty(full_numel, dtype=param_dtype, device=device)
        unversioned = buffer.data  # [Note: Storage and autograd]
        own_part = unversioned[start:end]
        if not self.is_kept:
            # Free it at once, so that it does not add to peak memory.
            free_storage(buffer)
        if is_offloaded:
            values = alloc_host(end - start, dtype, is_pinned=self.is_pinned)
        elif self.is_kept and extension is None and param_dtype == wire_dtype == dtype:
            # [Note: Kept buffers]: nothing is stored twice.
            values = buffer.zero_()[start:end]
        else:
            values = torch.empty(end - start, dtype=dtype, device=device)
            zero_gaps(values, layout, group.rank)  # gaps only: the values are written next
        copies = copies_for(device) if is_offloaded else None
        shard = LocalShard(
            values, layout, group, guard, wire_dtype=wire_dtype, device=device, copies=copies
        )
        if is_offloaded and not (self.is_kept or self.offload.params):
            # Scales are computed from main values.
            shard.keep_on_device(dtype if wire_dtype in QUANTISED else wire_dtype)
        is_kept = self.is_kept
        if extension is not None:
            return shard, ExtendedValues(Codec(shard, extension, param_dtype), is_kept=is_kept)
        return shard, FullValues(shard, buffer, unversioned, own_part, is_kept=is_kept)
