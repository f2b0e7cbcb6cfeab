"""The memory of one flat parameter: a shard that stays, full values that come and go.

[Note: Storage and autograd]
The unsharded buffer and the reduce buffer are allocated once and keep their identity; only their
storages are resized, to nothing and back. Views of them therefore stay valid: the unsharded
parameters that modules compute with, what autograd saved of them in forward, and the views that
gradients are packed into. Each unsharded parameter is built on its own `.data` alias, and
collectives write through another: an alias has its own version counter, so refilling the buffer
for backward does not look like an in-place change of what forward saved.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from composable_shard import _collectives, _trace
from composable_shard._collectives import Waitable
from composable_shard._flat_grad import FlatGradient, Streams
from composable_shard._layout import FlatLayout
from composable_shard._mesh import ShardGroup
from composable_shard._registration import Registration
from composable_shard._shard_spec import WriteGuard
from composable_shard._storage import alloc_storage, free_storage, restore_versions

__all__ = ["FlatStorage"]


@dataclass
class _Buffers:
    """Everything that depends on dtype and device: made anew when `.to()` changes either."""

    local_shard: Tensor  # (shard_numel,)
    unsharded: Tensor  # (padded_numel,), storage size 0 unless unsharded
    gather_output: Tensor  # alias of `unsharded` with a version counter of its own


class FlatStorage(Registration):
    """The buffers of a handle: gathers into them, and frees them."""

    name: str
    layout: FlatLayout
    shard_group: ShardGroup
    guard: WriteGuard
    grad: FlatGradient
    gathered_writes: int  # guard.num_writes when the unsharded buffer was filled, -1: it is not
    _buffers: _Buffers
    _gather: Waitable | torch.Event | None
    _versions: list[int]  # of the unsharded parameters, while they hold values
    _has_new_versions: bool  # gradients were packed in place since the last gather

    def _make_buffers(self, dtype: torch.dtype, device: torch.device) -> _Buffers:
        unsharded = torch.empty(self.layout.padded_numel, dtype=dtype, device=device)
        # At once: what is needed only later must not add to a peak.
        free_storage(unsharded)
        shard = torch.zeros(self.layout.shard_numel, dtype=dtype, device=device)
        if not self.is_sharded:
            # Nothing is gathered, so nothing is stored twice.
            unsharded = shard
        return _Buffers(shard, unsharded, unsharded.data)

    @property
    def is_sharded(self) -> bool:
        """False only where one rank holds everything: then nothing is gathered or reduced."""
        return self.shard_group.size > 1

    @property
    def local_shard(self) -> Tensor:
        """This rank's shard, shape `(layout.shard_numel,)`."""
        return self._buffers.local_shard

    @property
    def unsharded(self) -> Tensor:
        """The full flat parameter, shape `(layout.padded_numel,)`; no storage unless unsharded."""
        return self._buffers.unsharded

    @property
    def is_unsharded(self) -> bool:
        """Whether the unsharded buffer holds, or is being filled with, the full values."""
        return not self.is_sharded or self.gathered_writes >= 0

    @property
    def unsharded_extent(self) -> tuple[int, int] | None:
        """Addresses `[start, end)` of the unsharded buffer, None where it outlives every view."""
        if not self.is_sharded or self.gathered_writes < 0:
            return None
        start = self._buffers.gather_output.data_ptr()
        return start, start + self._buffers.gather_output.nbytes

    def check_materialized(self) -> None:
        """Check that the shard is on a real device.

        Raises:
            RuntimeError: Naming the parameters that are still on the meta device.
        """
        if self._buffers.local_shard.is_meta:
            names = [str(entry.label) for entry in self.entries]
            raise RuntimeError(
                f"parameters {names} are on the meta device. Call model.to_empty(device=...) and "
                "initialise them (reset_parameters()) or load them before the first forward."
            )

    def unshard(self, streams: Streams | None = None) -> None:
        """Start gathering the full values; no-op while they are there and no shard was written.

        One all-gather of `layout.padded_numel` elements, on the unshard stream where there are
        streams. `wait_unshard` must follow before the parameters are used. If the allocation or
        the collective fails, the handle is as before.
        """
        if not self.is_sharded or self.gathered_writes == self.guard.num_writes:
            return
        if self._gather is not None:
            self.wait_unshard()
        if self.grad.uses_shared:
            # Wanted again while its storage serves a reduction, by another use in this backward.
            self.finish_reduction()
            self.grad.move_out()
        if _trace.is_traced():
            _trace.record("issue_gather", self.name)
        self.gathered_writes = -1
        try:
            self._gather = self._issue_gather(streams)
        except BaseException:
            free_storage(self._buffers.unsharded)
            raise
        self.gathered_writes = self.guard.num_writes
        if self._has_new_versions:
            # [Note: Packing in place]: what an earlier forward saved is valid again.
            self._has_new_versions = False
            restore_versions(self.unsharded_params, self._versions)

    def _issue_gather(self, streams: Streams | None) -> Waitable | torch.Event:
        buffers, group = self._buffers, self.shard_group.group
        if streams is None:
            alloc_storage(buffers.unsharded)
            return _collectives.all_gather(buffers.gather_output, buffers.local_shard, group)
        stream = streams.unshard_stream
        # The shard may just have been written by the optimizer, and the memory that the gather
        # gets may still be read by the last unit's compute: both are on the current stream.
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            alloc_storage(buffers.unsharded)
            _collectives.all_gather(buffers.gather_output, buffers.local_shard, group).wait()
            return stream.record_event()

    def wait_unshard(self) -> None:
        """Make the current stream (on CPU: the caller) wait for a gather that `unshard` started."""
        gather = self._gather
        if gather is None:
            return
        self._gather = None
        try:
            if isinstance(gather, torch.Event):
                torch.accelerator.current_stream().wait_event(gather)
            else:
                gather.wait()
        except BaseException:
            self.gathered_writes = -1
            free_storage(self._buffers.unsharded)
            raise
        if _trace.is_traced():
            _trace.record("wait_gather", self.name)

    def reshard(self) -> None:
        """Free the full values, after waiting for a gather still in flight. Registers nothing."""
        if not self.is_sharded or self.gathered_writes < 0:
            return
        if self._gather is not None:
            # The backend still writes into the storage. An error is not ours to raise here: nobody
            # wants the values, and an earlier error may be why.
            with suppress(RuntimeError):
                self.wait_unshard()
        self.gathered_writes = -1
        free_storage(self._buffers.unsharded)
        if _trace.is_traced():
            _trace.record("free", self.name)

    def finish_reduction(self) -> None:
        """Wait for the reduction in flight, if any, and free its buffers."""
        if self.grad.is_in_flight:
            self.grad.finish()
            self._free_unused()

    def _free_unused(self) -> None:
        if self.is_sharded and self.gathered_writes < 0 and not self.grad.uses_shared:
            free_storage(self._buffers.unsharded)
            if _trace.is_traced():
                _trace.record("free", self.name)
