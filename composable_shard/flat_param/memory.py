"""How much memory a flat parameter takes, in which dtypes, and where.

[Note: Reduce dtype]
The buffer of gradients may have another dtype than the parameters: packing casts. Gradients of
microbatches that are not reduced then add up in it too, under every strategy. The result is cast
once, to the main dtype. Where that takes memory of its own, persistent gradients have it
persistently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from composable_shard.comm import HOST, QUANTISED, ShardGroup, alloc_host, copies_for
from composable_shard.flat_param.entries import ParamEntry, zero_gaps
from composable_shard.flat_param.extensions import Codec, ExtendedValues, Extension
from composable_shard.flat_param.full_values import (
    FullValues,
    free_storage,
)
from composable_shard.flat_param.shard import LocalShard
from composable_shard.layout import FlatLayout
from composable_shard.options import PRECISIONS, MixedPrecisionPolicy, OffloadPolicy
from composable_shard.tensor import WriteGuard


@dataclass(frozen=True)
class Precision:
    """Dtypes that differ, or may come to differ, from that of the local shard.

    None follows another dtype, also through `module.to(dtype)`.

    Attributes:
        main_dtype: What the local shard must have; None: whatever it has.
        param_dtype: Of the unsharded buffer; None: that of the local shard.
        gather_dtype: In which shards travel; None: that of the unsharded buffer.
        reduce_dtype: In which gradients travel; None: that of the unsharded buffer.
        extension: The form in which the class of the only parameter is gathered, if it has one.
    """

    main_dtype: torch.dtype | None = None
    param_dtype: torch.dtype | None = None
    gather_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    extension: Extension | None = None

    @classmethod
    def of(cls, policy: MixedPrecisionPolicy, dtype: torch.dtype, *, is_kept: bool) -> Precision:
        """Return the dtypes of a flat parameter.

        Args:
            policy: Of its unit.
            dtype: Of its original parameters.
            is_kept: Whether they are in a module that computes in their main dtype.
        """
        if dtype not in PRECISIONS:
            return cls()
        if is_kept:
            return cls(policy.main_dtype)
        param_dtype = policy.param_dtype
        if param_dtype is None and policy.main_dtype is not None:
            param_dtype = dtype  # the model computes as it did
        return cls(policy.main_dtype, param_dtype, policy.gather_dtype, policy.reduce_dtype)

    def computes_in(self, main: torch.dtype) -> torch.dtype:
        """Return the dtype of the unsharded buffer, where the local shard's is `main`."""
        return self.param_dtype or main

    def reduces_in(self, main: torch.dtype) -> torch.dtype:
        """Return the dtype of the reduce buffer."""
        return self.reduce_dtype or self.computes_in(main)

    def travels_in(self, main: torch.dtype) -> torch.dtype:
        """Return the dtype in which shards are gathered."""
        return self.gather_dtype or self.computes_in(main)

    def itemsize(self, main: torch.dtype) -> int:
        """Return the smallest size of an element in any of the buffers, which alignment is for."""
        used = (main, self.computes_in(main), self.reduces_in(main), self.travels_in(main))
        return min(dtype.itemsize for dtype in used)


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
    """Lay out the dense tensors of one flat parameter; reads only their sizes and dtypes.

    Args:
        params: The tensors.
        world_size: The ranks that share the flat parameter.
        precision: The dtypes that differ from theirs.
        blocks: As in `FlatLayout.plan`.
        owners: As in `FlatLayout.plan`.
    """
    precision = precision or Precision()
    itemsize = precision.itemsize(precision.main_dtype or params[0].dtype)
    nbytes = _OWNED_ALIGNMENT_NBYTES if owners else _ALIGNMENT_NBYTES
    alignment = max(1, nbytes // itemsize)
    numels = [param.numel() for param in params]
    return FlatLayout.plan(numels, world_size, alignment, blocks=blocks, owners=owners)


@dataclass(frozen=True)
class MemoryPlan:
    """What decides which memory a flat parameter gets.

    Attributes:
        shard_group: The ranks that share it.
        precision: The dtypes that differ from the local shard's.
        offload: What lives on the host.
        is_kept: The unsharded buffer is never freed, see [Note: Kept buffers].
    """

    shard_group: ShardGroup
    precision: Precision
    offload: OffloadPolicy
    is_kept: bool

    @property
    def is_pinned(self) -> bool:
        """Whether host memory is to be pinned."""
        return self.offload.pin_memory and self.shard_group.device.type != HOST.type

    def check(self, shown: Sequence[ParamEntry], name: str) -> None:
        """Check that a shard can have the dtype and be on the device of its parameters.

        Args:
            shown: The parameters, which `.to()` may have given other data.
            name: Their unit's.

        Raises:
            RuntimeError: If they differ, an offloaded one is elsewhere, or the dtype is not the
                main one.
        """
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
        """Check that a shard is in the memory that it was given, see `check_pinned` of handles."""
        if self.is_pinned and not shard.is_meta and not shard.is_pinned():
            raise RuntimeError(
                f"expected the shard of parameter '{name}' in pinned memory, and it is not, "
                "as after share_memory(). Pass OffloadPolicy(pin_memory=False) to leave it so."
            )

    def allocate(
        self, layout: FlatLayout, guard: WriteGuard, dtype: torch.dtype, device: torch.device
    ) -> tuple[LocalShard, FullValues]:
        """Make memory for a local shard of this dtype; on the mesh's device where offloaded."""
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
        output = buffer.data  # [Note: Storage and autograd]
        own_part = output[start:end]
        if not self.is_kept:
            # At once: what is needed only later must not add to a peak.
            free_storage(buffer)
        if is_offloaded:
            values = alloc_host(end - start, dtype, is_pinned=self.is_pinned)
        elif self.is_kept and extension is None and param_dtype == wire_dtype == dtype:
            # [Note: Kept buffers]: nothing is stored twice.
            values = buffer.zero_()[start:end]
        else:
            values = torch.empty(end - start, dtype=dtype, device=device)
            zero_gaps(values, layout, group.rank)  # values follow: all of it would be written twice
        copies = copies_for(device) if is_offloaded else None
        shard = LocalShard(values, layout, group, guard, device=device, copies=copies)
        if is_offloaded and not (self.is_kept or self.offload.params):
            # Scales are those of main values.
            shard.keep_on_device(dtype if wire_dtype in QUANTISED else wire_dtype)
        is_kept = self.is_kept
        if extension is not None:
            return shard, ExtendedValues(Codec(shard, extension, param_dtype), is_kept=is_kept)
        return shard, FullValues(shard, buffer, output, own_part, wire_dtype, is_kept=is_kept)
