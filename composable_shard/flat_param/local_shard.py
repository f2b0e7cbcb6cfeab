"""`LocalShard`: this rank's part of the full values, on the device or on the host.

Copies to and from the host, and who waits for them: [Note: Copies and waits].
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from composable_shard.comm import HOST, HostCopies, ShardGroup, as_received, collectives
from composable_shard.flat_param.entries import zero_padding
from composable_shard.layout import FlatLayout
from composable_shard.tensor import WriteGuard


class LocalShard:
    """The shard that optimizers step and gathers send; replaced for another dtype or device.

    Args:
        values: Shape `(own_numel,)`, on the host where the shard is offloaded.
        layout: Layout of the flat parameter.
        shard_group: The ranks that share the flat parameter.
        guard: Counts the writes to the shard.
        wire_dtype: Dtype in which the shard travels.
        device: Device of the full values.
        copies: Copies between host and device; None if the shard is on the device.
    """

    def __init__(  # noqa: PLR0913 -- all that defines a shard, half of it by name
        self,
        values: Tensor,
        layout: FlatLayout,
        shard_group: ShardGroup,
        guard: WriteGuard,
        *,
        wire_dtype: torch.dtype,
        device: torch.device,
        copies: HostCopies | None,
    ) -> None:
        self.values = values
        self.layout = layout
        self.shard_group = shard_group
        self.guard = guard
        self.wire_dtype = wire_dtype
        self.device = device
        self.copies = copies
        self.is_offloaded = copies is not None
        self.device_copy: Tensor | None = None  # (own_numel,), a copy that stays
        self._device_writes = -1  # guard.num_writes when `device_copy` was filled, -1: it is not

    def keep_on_device(self, dtype: torch.dtype) -> None:
        """Keep a copy of the shard on the device, refreshed after writes."""
        self.device_copy = torch.empty_like(self.values, dtype=dtype, device=self.device)

    # To the device

    def fill(self, target: Tensor) -> Tensor:
        """Copy the shard to `target` on the device, cast, and return `target`."""
        if self.is_offloaded and self.device_copy is None:
            return self.to_device(self.values, target)
        return target.copy_(self.on_device())

    def on_device(self) -> Tensor:
        """Return the shard's values on the device."""
        if self.device_copy is None:
            return self.to_device(self.values)
        if self._device_writes != self.guard.num_writes:
            self.to_device(self.values, self.device_copy)
            self._device_writes = self.guard.num_writes
        return self.device_copy

    def to_device(self, shard: Tensor, target: Tensor | None = None) -> Tensor:
        """Copy a shard from the host on the current stream; return a shard on the device as it is.

        The copy goes into `target`, of any dtype, or into new memory.
        """
        copies = self.copies
        if copies is None:
            return shard
        is_same = target is not None and target.dtype == shard.dtype
        staged = target if is_same else torch.empty_like(shard, device=self.device)
        assert staged is not None
        event = copies.copy_to_device(staged, shard)
        self.guard.add_read(partial(copies.wait_on_host, event))
        return staged if is_same or target is None else target.copy_(staged)

    # To and from full values that are not the handle's

    def new_full(self) -> Tensor:
        """Return memory for the full values in the main dtype, shape `(layout.padded_numel,)`."""
        return torch.empty(self.layout.padded_numel, dtype=self.values.dtype, device=self.device)

    def gather_into(self, output: Tensor, shard: Tensor) -> None:
        """Gather shards, of the values or of the same shape, into another buffer.

        Issues one all-gather of `layout.padded_numel` elements.

        Args:
            output: Shape `(layout.padded_numel,)`.
            shard: Shape `(own_numel,)`, this rank's shard.
        """
        if self.shard_group.size == 1:
            output.copy_(shard)
        else:
            group, shard = self.shard_group.group, self.to_device(shard)
            collectives.all_gather(output, shard, group, self.layout.uneven_numels).wait()

    def write_slice(self, shard: Tensor, full: Tensor | None, *, from_first: bool) -> None:
        """Write this rank's slice of full values, or gradients, into a shard.

        Args:
            shard: Shape `(own_numel,)`.
            full: Shape `(layout.padded_numel,)`; its padding is set to zero. None on a rank without
                values.
            from_first: The first of all data-parallel ranks sends the full values to the others,
                by one broadcast for each group.
        """
        if from_first:
            if full is None:
                full = torch.empty(self.layout.padded_numel, dtype=shard.dtype, device=self.device)
            full = self.shard_group.ranks.copy_from_first(full)
        self.guard.wait_for_reads()
        if full is not None:
            zero_padding(full, self.layout)
            start, end = self.layout.shard_range(self.shard_group.rank)
            shard.copy_(full[start:end])

    def copy_to_replicas(self) -> None:
        """Give all copies of the shard the values of the first: one broadcast for each group."""
        if self.shard_group.num_replicas == 1:
            return
        sent = self.to_device(self.values)
        self.shard_group.copy_to_replicas(sent)
        if sent is not self.values:
            self.guard.wait_for_reads()
            self.values.copy_(sent)

    def write_edited(self, own_part: Tensor, *, is_cast: bool) -> None:
        """Write this rank's part of full values that were edited into the shard.

        Args:
            own_part: Shape `(own_numel,)`, on the device.
            is_cast: Whether the gather rounded the shard. Elements equal to the rounded values were
                not edited, and keep their full precision.
        """
        values = own_part.to(HOST) if self.is_offloaded else own_part
        if is_cast:
            received = as_received(self.wire_dtype, self.values, values.dtype)
            is_same = (values == received) | (values.isnan() & received.isnan())
            values = torch.where(is_same, self.values, values.to(self.values.dtype))
        self.guard.wait_for_reads()
        self.values.copy_(values)
