"""Reads and writes of a flat parameter apart from its gathers: scopes, writebacks, replicas."""

from __future__ import annotations

import torch
from torch import Tensor

from composable_shard.comm import HOST, Waitable, as_received, collectives
from composable_shard.flat_param.flat_storage import FlatStorage

__all__ = ["ShardAccess"]


class ShardAccess(FlatStorage):
    """What brings full values to other buffers, and into the shards."""

    def new_full(self) -> Tensor:
        """Return memory for the full values in the main dtype, shape `(layout.padded_numel,)`."""
        numel, dtype = self.layout.padded_numel, self.local_shard.dtype
        return torch.empty(numel, dtype=dtype, device=self.device)

    def gather_into(
        self, output: Tensor | None, shard: Tensor, *, to_first: bool
    ) -> Waitable | None:
        """Start gathering shards into a buffer that is not the handle's.

        One all-gather, or with `to_first` one gather, of `layout.padded_numel` elements.

        Args:
            output: Shape `(layout.padded_numel,)`; None on a rank that does not receive.
            shard: Shape `(layout.shard_numel,)`, this rank's.
            to_first: Only the first of all data-parallel ranks receives; where there are copies of
                the shards, the first of them are sent.
        """
        group = self.shard_group.group
        if to_first and not self.shard_group.is_first_replica:
            return None
        if not self.is_sharded:
            if output is not None:
                output.copy_(shard)
            return None
        shard = self.to_device(shard)
        if to_first:
            return collectives.gather(output, shard, group, self.layout.uneven_numels)
        assert output is not None
        return collectives.all_gather(output, shard, group, self.layout.uneven_numels)

    def copy_unsharded(self, output: Tensor | None) -> None:
        """Copy the full values, where `is_current` holds, into another buffer."""
        self.wait_unshard()
        if output is not None:
            output.copy_(self._buffers.unsharded)

    def write_unsharded(self) -> None:
        """Write this rank's slice of the unsharded buffer into the shard.

        Where the buffer holds rounded values, elements that are what the shard was rounded to were
        not edited, and keep their full precision.
        """
        self._zero_padding(self._buffers.gather_output)
        shard, values = self._buffers.local_shard, self._to_host(self._buffers.own_part)
        self.guard.wait_for_reads()
        if self.is_cast:
            received = as_received(self._buffers.wire_dtype, shard, values.dtype)
            is_same = (values == received) | (values.isnan() & received.isnan())
            values = torch.where(is_same, shard, values.to(shard.dtype))
        shard.copy_(values)

    def write_slice(self, shard: Tensor, full: Tensor | None, *, from_first: bool) -> None:
        """Write this rank's slice of full values, or gradients, into a shard.

        Args:
            shard: Shape `(layout.shard_numel,)`.
            full: Shape `(layout.padded_numel,)`; its padding is set to zero. None on a rank that
                has none.
            from_first: The first of all data-parallel ranks gives every rank its slice: one
                scatter in its shard group, and one broadcast to each group of copies.
        """
        if full is not None:
            self._zero_padding(full)
        self.guard.wait_for_reads()
        if from_first:
            self._send_slices(shard, full)
        elif full is not None:
            start, end = self.layout.shard_range(self.shard_group.rank)
            shard.copy_(full[start:end])

    def _zero_padding(self, full: Tensor) -> None:
        for start, end in self.layout.padding_ranges():
            full[start:end].zero_()

    def _send_slices(self, shard: Tensor, full: Tensor | None) -> None:
        group = self.shard_group
        target = self._new_shard(shard)
        if self.is_sharded and group.is_first_replica:
            collectives.scatter(target, full, group.group, self.layout.uneven_numels).wait()
        elif full is not None:
            target.copy_(full)
        for copies in group.replicate_groups:
            collectives.broadcast(target, 0, copies).wait()
        if target is not shard:
            shard.copy_(target)

    def copy_to_replicas(self) -> None:
        """Give all ranks that hold copies of the shard the first one's: a broadcast for each."""
        if not self.shard_group.replicate_groups:
            return
        shard = self.local_shard
        sent = self.to_device(shard)
        for group in self.shard_group.replicate_groups:
            collectives.broadcast(sent, 0, group).wait()
        if sent is not shard:
            self.guard.wait_for_reads()
            shard.copy_(sent)

    def _new_shard(self, shard: Tensor) -> Tensor:
        """Return memory of a shard's shape on the device: its own where it is there."""
        is_offloaded = self._buffers.is_offloaded
        return torch.empty_like(shard, device=self.device) if is_offloaded else shard

    def _to_host(self, values: Tensor) -> Tensor:
        """Return values in the memory of the local shard's kind, complete."""
        if not self._buffers.is_offloaded:
            return values
        copies = self._buffers.copies
        host = torch.empty_like(values, device=HOST)
        copies.wait_on_host(copies.copy_to_host(host, values))
        return host
