"""The memory of one flat parameter: a shard that stays, full values that come and go.

[Note: Storage and autograd]
The unsharded buffer and the reduce buffer are allocated once and keep their identity; only their
storages are resized, to nothing and back. Views of them therefore stay valid: the unsharded
parameters that modules compute with, what autograd saved of them in forward, and the views that
gradients are packed into. Each unsharded parameter is built on its own `.data` alias, and
collectives write through another: an alias has its own version counter, so refilling the buffer
for backward does not look like an in-place change of what forward saved.

[Note: Kept buffers]
Where the strategy keeps parameters unsharded, and where one rank holds them all, the unsharded
buffer is never freed, and this rank's part of it is the local shard. The optimizer writes into it,
and the next forward that finds `guard.num_writes` changed gathers the other ranks' parts in place.

[Note: Small group]
Between forward and backward a rank may keep more than its shard and less than everything: the ranks
of the shard group are divided into groups of consecutive ones, each of which holds all values once.
The backward gathers over such a small group, of ranks that are near each other.

[Note: Main and compute dtype]
A unit may compute in another dtype than that of its shards, the main dtype. A gather then casts the
shard straight into this rank's part of the unsharded buffer and goes on in place; a kept buffer has
a local shard beside it. Where shards travel in a third dtype, or quantised, they do so through
memory that is freed as soon as it has been cast into the unsharded buffer: the owner too computes
with what the others receive. No value ever goes the other way.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from composable_shard.comm import (
    HOST,
    QUANTISED,
    AllGather,
    HostCopies,
    ShardGroup,
    SmallGroup,
    StreamPoint,
    Streams,
    Waitable,
    alloc_host,
    collectives,
    copies_for,
    gather_in,
    trace,
)
from composable_shard.flat_param.entries import Precision
from composable_shard.flat_param.gradient import FlatGradient
from composable_shard.flat_param.host_gradient import HostGradient
from composable_shard.flat_param.registration import Registration
from composable_shard.flat_param.storage import alloc_storage, free_storage, restore_versions
from composable_shard.layout import FlatLayout
from composable_shard.options import OffloadPolicy
from composable_shard.tensor import WriteGuard

__all__ = ["Buffers", "FlatStorage"]


@dataclass
class Buffers:
    """Everything that depends on dtype and device: made anew when `.to()` changes either."""

    local_shard: Tensor  # (shard_numel,), on the host where it is offloaded
    unsharded: Tensor  # (padded_numel,), storage size 0 unless unsharded or kept
    gather_output: Tensor  # alias of `unsharded` with a version counter of its own
    own_part: Tensor  # (shard_numel,), this rank's part of `gather_output`
    wire_dtype: torch.dtype  # in which shards are gathered
    is_cast: bool  # the unsharded buffer is not the shards as they are
    is_offloaded: bool  # the local shard is on the host, see [Note: Offloaded shard]
    copies: HostCopies
    device_shard: Tensor | None  # (shard_numel,), a copy of the local shard in the wire dtype
    device_writes: int = -1  # guard.num_writes when it was filled, -1: it is not
    all_gather: AllGather | None = None  # into `gather_output`, made ready by the first one


class FlatStorage(Registration):
    """The buffers of a handle: gathers into them, and frees them."""

    name: str
    layout: FlatLayout
    shard_group: ShardGroup
    is_sharded: bool  # False only where each rank holds everything: then nothing is gathered
    is_kept: bool  # the unsharded buffer is never freed, see [Note: Kept buffers]
    precision: Precision
    offload: OffloadPolicy
    guard: WriteGuard
    grad: FlatGradient
    host_grad: HostGradient | None  # where gradients are offloaded
    gathered_writes: int  # guard.num_writes when the unsharded buffer was filled, -1: it is not
    is_outdated: bool  # owners may have written since, [Note: Writes by owners]
    small_group: SmallGroup | None  # what `reshard_to_small_group` keeps a part for
    _small_part: Tensor | None  # (padded_numel / small_group.size,), see [Note: Small group]
    _small_writes: int  # guard.num_writes when the part was kept
    _buffers: Buffers
    _gather: Waitable | None
    _watched: list[Tensor]  # the unsharded parameters, or plain aliases of the same version
    _versions: list[int]  # theirs, while they hold values
    _has_new_versions: bool  # gradients were packed in place since the last gather

    def _make_buffers(self, dtype: torch.dtype, device: torch.device) -> Buffers:
        """Make buffers for a local shard of this dtype; on the mesh's device where offloaded."""
        is_offloaded = self.offload.is_active and device.type != "meta"
        if is_offloaded:
            device = self.shard_group.device
        param_dtype = self.precision.computes_in(dtype)
        wire_dtype = self.precision.travels_in(dtype) if self.is_sharded else param_dtype
        is_cast = param_dtype != dtype or wire_dtype != dtype
        start, end = self.layout.shard_range(self.shard_group.rank)
        unsharded = torch.empty(self.layout.padded_numel, dtype=param_dtype, device=device)
        output = unsharded.data
        own_part, device_shard = output[start:end], None
        if not self.is_kept:
            # At once: what is needed only later must not add to a peak.
            free_storage(unsharded)
        if is_offloaded:
            shard = alloc_host(end - start, dtype, is_pinned=self.is_pinned)
            if not (self.is_kept or self.offload.params):
                # Scales are those of main values.
                held_dtype = dtype if wire_dtype in QUANTISED else wire_dtype
                device_shard = own_part.new_empty(end - start, dtype=held_dtype)
        elif self.is_kept and not is_cast:
            # [Note: Kept buffers]: nothing is stored twice.
            shard = unsharded.zero_()[start:end]
        else:
            shard = torch.empty(end - start, dtype=dtype, device=device)
            self.zero_gaps(shard)  # values follow: all of it would be written twice
        copies = copies_for(device)
        self.host_grad = None
        if is_offloaded:
            self.host_grad = HostGradient(end - start, dtype, copies, is_pinned=self.is_pinned)
        return Buffers(
            shard,
            unsharded,
            output,
            own_part,
            wire_dtype,
            is_cast,
            is_offloaded,
            copies,
            device_shard,
        )

    def zero_gaps(self, shard: Tensor) -> None:
        """Set what lies between the parameters in a local shard to zero: it counts in norms."""
        sizes = self.layout.piece_numels(self.shard_group.rank)
        for gap in shard.split_with_sizes(sizes)[::2]:
            gap.zero_()

    @property
    def device(self) -> torch.device:
        """Where the unsharded buffer is."""
        return self._buffers.gather_output.device

    @property
    def is_pinned(self) -> bool:
        """Whether host memory is to be pinned."""
        return self.offload.pin_memory and self.shard_group.device.type != HOST.type

    @property
    def is_apart(self) -> bool:
        """Whether the local shard is never part of the unsharded buffer."""
        return self._buffers.is_cast or self._buffers.is_offloaded

    @property
    def is_whole(self) -> bool:
        """Whether the local shard is the unsharded buffer, so that nothing needs to be filled."""
        return not (self.is_sharded or self.is_apart)

    @property
    def is_cast(self) -> bool:
        """Whether the full values are not the shards as they are, [Note: Main and compute dtype]"""
        return self._buffers.is_cast

    @property
    def local_shard(self) -> Tensor:
        """This rank's shard, shape `(layout.shard_numel,)`."""
        return self._buffers.local_shard

    @property
    def unsharded(self) -> Tensor:
        """The full flat parameter, shape `(layout.padded_numel,)`; no storage while freed."""
        return self._buffers.unsharded

    @property
    def is_unsharded(self) -> bool:
        """Whether the unsharded buffer holds full values, or is being filled with them."""
        return self.gathered_writes >= 0 or self.is_whole

    @property
    def unsharded_extent(self) -> tuple[int, int] | None:
        """Addresses `[start, end)` of the unsharded buffer, None where it outlives every view."""
        if self.is_kept or self.gathered_writes < 0:
            return None
        start = self._buffers.gather_output.data_ptr()
        return start, start + self._buffers.gather_output.nbytes

    @property
    def is_current(self) -> bool:
        """Whether the unsharded buffer holds what the shards hold now."""
        return self.gathered_writes == self.guard.num_writes and not self.is_outdated

    def check_materialized(self) -> None:
        """Check that the shard is on a real device.

        Raises:
            RuntimeError: Naming the parameters that are still on the meta device.
        """
        if self._buffers.local_shard.is_meta:
            names = [str(entry.label) for entry in self.entries]
            device = "'cpu'" if self.offload.is_active else "..."
            raise RuntimeError(
                f"parameters {names} are on the meta device. Call model.to_empty(device={device}) "
                "and initialise them (reset_parameters()) or load them before the first forward."
            )

    def unshard(self, streams: Streams | None = None) -> None:
        """Start gathering the full values; no-op while they are there and no shard was written.

        One all-gather of `layout.padded_numel` elements, in the dtype in which shards travel, on
        the unshard stream where there are streams. `wait_unshard` must follow before the parameters
        are used. If the allocation or the collective fails, the handle is as before.
        """
        if self.gathered_writes == self.guard.num_writes and not self.is_outdated:
            return  # as `is_current` says, for most calls
        if self.is_in_scope or self.is_whole:
            return
        if self._gather is not None:
            self.wait_unshard()
        if self.grad.uses_shared:
            # Wanted again while its storage serves a reduction, by another use in this backward.
            self.finish_reduction()
            self.grad.move_out()
        if trace.logs:
            trace.record("issue_gather", self.name)
        self.gathered_writes = -1
        try:
            self._gather = self._issue_gather(streams)
        except BaseException:
            self._free_unsharded()
            self._small_part = None
            raise
        self.gathered_writes = self.guard.num_writes
        self.is_outdated = False
        if self._has_new_versions:
            # [Note: Packing in place]: what an earlier forward saved is valid again.
            self._has_new_versions = False
            restore_versions(self._watched, self._versions)

    def _issue_gather(self, streams: Streams | None) -> Waitable | None:
        buffers = self._buffers
        if not self.is_sharded:
            self._fill(buffers.own_part)
            return None
        if streams is None:
            return self._start_gather()
        stream = streams.unshard_stream
        # The shard may just have been written by the optimizer, and the memory that the gather
        # gets may still be read by the last unit's compute: both are on the current stream.
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            self._start_gather().wait()
            return StreamPoint(stream)

    def _start_gather(self) -> Waitable:
        buffers, group = self._buffers, self.shard_group.group
        numels, output = self.layout.uneven_numels, buffers.gather_output
        has_valid_part = self._small_writes == self.guard.num_writes
        alloc_storage(buffers.unsharded)
        if self.small_group is not None and self._small_part is not None and has_valid_part:
            return collectives.all_gather(output, self._small_part, self.small_group.group)
        # [Note: Main and compute dtype]
        if buffers.wire_dtype != output.dtype:
            return gather_in(buffers.wire_dtype, output, self._on_device(), group, numels)
        shard = self._fill(buffers.own_part) if self.is_apart else buffers.local_shard
        if buffers.all_gather is None:
            buffers.all_gather = AllGather(output, shard, group, numels)
        return buffers.all_gather.start()

    def _fill(self, target: Tensor) -> Tensor:
        """Copy the local shard to `target` on the device, cast, and return that."""
        buffers = self._buffers
        if buffers.is_offloaded and buffers.device_shard is None:
            return self.to_device(buffers.local_shard, target)
        return target.copy_(self._on_device())

    def _on_device(self) -> Tensor:
        """Return the local shard's values on the device."""
        buffers, writes = self._buffers, self.guard.num_writes
        if buffers.device_shard is None:
            return self.to_device(buffers.local_shard)
        if buffers.device_writes != writes:
            self.to_device(buffers.local_shard, buffers.device_shard)
            buffers.device_writes = writes
        return buffers.device_shard

    def to_device(self, shard: Tensor, target: Tensor | None = None) -> Tensor:
        """Copy a shard from the host, in the order of the current stream; else return it.

        Args:
            shard: Shape `(layout.shard_numel,)`.
            target: Where to; of any dtype. Default: memory of its own.
        """
        if not self._buffers.is_offloaded:
            return shard
        copies = self._buffers.copies
        is_same = target is not None and target.dtype == shard.dtype
        staged = target if is_same else torch.empty_like(shard, device=self.device)
        assert staged is not None
        event = copies.copy_to_device(staged, shard)
        self.guard.note_read(partial(copies.wait_on_host, event))
        copies.wait_on_device(event)
        return staged if is_same or target is None else target.copy_(staged)

    def wait_unshard(self) -> None:
        """Make the current stream (on CPU: the caller) wait for a gather that `unshard` started."""
        gather = self._gather
        if gather is None:
            return
        self._gather = None
        try:
            gather.wait()
        except BaseException:
            self.gathered_writes = -1
            self._free_unsharded()
            raise
        finally:
            self._small_part = None
        if trace.logs:
            trace.record("wait_gather", self.name)

    def reshard(self) -> None:
        """Free the full values, after waiting for a gather still in flight. Registers nothing.

        A kept buffer stays, with its values.
        """
        self._small_part = None
        if not self.is_sharded or self.gathered_writes < 0:
            return
        if self._gather is not None:
            # The backend still writes into the storage. An error is not ours to raise here: nobody
            # wants the values, and an earlier error may be why.
            with suppress(RuntimeError):
                self.wait_unshard()
        if self.is_kept:
            return
        self.gathered_writes = -1
        self._free_unsharded()
        if trace.logs:
            trace.record("free", self.name)

    @property
    def is_small(self) -> bool:
        """Whether this rank keeps its part of the values for a small group."""
        return self._small_part is not None

    def reshard_to_small_group(self) -> None:
        """Free the full values but for this rank's part in the small group, if there is one."""
        part = None
        if self.small_group is not None and self.is_current:
            self.wait_unshard()
            numel = self.layout.padded_numel // self.small_group.size
            start = self.small_group.rank * numel
            part = self._buffers.gather_output[start : start + numel].clone()
        self.reshard()
        self._small_part, self._small_writes = part, self.guard.num_writes

    def _free_unsharded(self) -> None:
        if not self.is_kept:
            free_storage(self._buffers.unsharded)

    def advance_reduction(self) -> None:
        """Wait until the reduction in flight, if any, needs its buffers no more; free them."""
        if self.grad.is_in_flight:
            self.grad.advance()
            if self.host_grad is not None:
                self._offload_gradient(self.host_grad)
            self._free_unused()

    def finish_reduction(self) -> None:
        """Wait for the reduction in flight, if any, and free its buffers."""
        if self.grad.is_in_flight:
            self.grad.finish()
            if self.host_grad is not None:
                self._offload_gradient(self.host_grad)
            self._free_unused()

    def _offload_gradient(self, host: HostGradient) -> None:
        """Send what has been reduced to the host, beside the rest of the backward."""
        if self.grad.reduced is not None:
            host.receive(self.grad.reduced, [p.sharded for p in self.shown_at_rest])
            self.grad.reduced = None

    def _free_unused(self) -> None:
        if not self.is_kept and self.gathered_writes < 0 and not self.grad.uses_shared:
            free_storage(self._buffers.unsharded)
            if trace.logs:
                trace.record("free", self.name)
