"""This rank's part of a flat parameter and of its gradient, on the device or on the host.

Copies to and from the host, and who waits for them: [Note: Copies and waits].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composable_shard.comm import (
    HOST,
    HostCopies,
    ShardGroup,
    Waitable,
    alloc_host,
    as_received,
    collectives,
)
from composable_shard.flat_param.entries import ParamEntry, zero_gaps, zero_padding
from composable_shard.layout import FlatLayout
from composable_shard.tensor import FlatShard, ParamLabel, WriteGuard
from composable_shard.torch_private import storage_uses_of


class LocalShard:
    """The shard that optimizers step and gathers send; made anew for another dtype or device.

    Args:
        values: Shape `(layout.shard_numel,)`, on the host where the shard is offloaded.
        layout: The flat parameter's.
        shard_group: The ranks that share it.
        guard: Counts the writes to the shard.
        device: Where full values are.
        copies: Between host and device; None where the shard is on the device.
    """

    def __init__(
        self,
        values: Tensor,
        layout: FlatLayout,
        shard_group: ShardGroup,
        guard: WriteGuard,
        *,
        device: torch.device,
        copies: HostCopies | None,
    ) -> None:
        self.values = values
        self.layout = layout
        self.shard_group = shard_group
        self.guard = guard
        self.device = device
        self.copies = copies
        self.is_offloaded = copies is not None
        self.device_copy: Tensor | None = None  # (layout.shard_numel,), a copy that stays
        self._device_writes = -1  # guard.num_writes when `device_copy` was filled, -1: it is not

    def keep_on_device(self, dtype: torch.dtype) -> None:
        """Keep a copy of the shard on the device, refreshed after writes."""
        self.device_copy = torch.empty_like(self.values, dtype=dtype, device=self.device)

    # To the device

    def fill(self, target: Tensor) -> Tensor:
        """Copy the shard to `target` on the device, cast, and return that."""
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
        """Copy a shard from the host, in the order of the current stream; else return it.

        Args:
            shard: Shape `(layout.shard_numel,)`.
            target: Where to; of any dtype. Default: memory of its own.
        """
        copies = self.copies
        if copies is None:
            return shard
        is_same = target is not None and target.dtype == shard.dtype
        staged = target if is_same else torch.empty_like(shard, device=self.device)
        assert staged is not None
        event = copies.copy_to_device(staged, shard)
        self.guard.note_read(partial(copies.wait_on_host, event))
        copies.wait_on_device(event)
        return staged if is_same or target is None else target.copy_(staged)

    # To and from full values that are not the handle's

    def new_full(self) -> Tensor:
        """Return memory for the full values in the main dtype, shape `(layout.padded_numel,)`."""
        return torch.empty(self.layout.padded_numel, dtype=self.values.dtype, device=self.device)

    def gather_into(
        self, output: Tensor | None, shard: Tensor, *, to_first: bool
    ) -> Waitable | None:
        """Start gathering shards, these or others of their shape, into another buffer.

        One all-gather, or with `to_first` one gather, of `layout.padded_numel` elements.

        Args:
            output: Shape `(layout.padded_numel,)`; None on a rank that does not receive.
            shard: Shape `(layout.shard_numel,)`, this rank's.
            to_first: Only the first of all data-parallel ranks receives; where there are copies of
                the shards, the first of them are sent.
        """
        group, numels = self.shard_group.group, self.layout.uneven_numels
        if to_first and not self.shard_group.is_first_replica:
            return None
        if self.shard_group.size == 1:
            if output is not None:
                output.copy_(shard)
            return None
        shard = self.to_device(shard)
        if to_first:
            return collectives.gather(output, shard, group, numels)
        assert output is not None
        return collectives.all_gather(output, shard, group, numels)

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
            zero_padding(full, self.layout)
        self.guard.wait_for_reads()
        if from_first:
            self._send_slices(shard, full)
        elif full is not None:
            start, end = self.layout.shard_range(self.shard_group.rank)
            shard.copy_(full[start:end])

    def _send_slices(self, shard: Tensor, full: Tensor | None) -> None:
        group = self.shard_group
        target = torch.empty_like(shard, device=self.device) if self.is_offloaded else shard
        if group.size > 1 and group.is_first_replica:
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
        sent = self.to_device(self.values)
        for group in self.shard_group.replicate_groups:
            collectives.broadcast(sent, 0, group).wait()
        if sent is not self.values:
            self.guard.wait_for_reads()
            self.values.copy_(sent)

    def write_edited(self, own_part: Tensor, wire_dtype: torch.dtype | None) -> None:
        """Write this rank's part of full values that were edited into the shard.

        Args:
            own_part: Shape `(layout.shard_numel,)`, on the device.
            wire_dtype: What the shard was rounded to when it was gathered, None for nothing.
                Elements that are still that were not edited, and keep their full precision.
        """
        values = self._to_host(own_part)
        self.guard.wait_for_reads()
        if wire_dtype is not None:
            received = as_received(wire_dtype, self.values, values.dtype)
            is_same = (values == received) | (values.isnan() & received.isnan())
            values = torch.where(is_same, self.values, values.to(self.values.dtype))
        self.values.copy_(values)

    def _to_host(self, values: Tensor) -> Tensor:
        """Return values in the memory of the shard's kind, complete."""
        if self.copies is None:
            return values
        host = torch.empty_like(values, device=HOST)
        self.copies.wait_on_host(self.copies.copy_to_host(host, values))
        return host


class InitialValues:
    """Checksums of full values, so that the ranks can be compared without the values.

    Args:
        guard: Counts the writes to the shard, after which nothing is left to compare.
    """

    def __init__(self, guard: WriteGuard) -> None:
        self._guard = guard
        self._num_writes = -1
        self._labels: Sequence[ParamLabel] = ()
        self._sums: Tensor | None = None  # (len(self._labels),)

    @property
    def are_known(self) -> bool:
        """Whether there are checksums that have not been compared."""
        return self._sums is not None

    def note(self, params: Sequence[Tensor], labels: Sequence[ParamLabel]) -> None:
        """Take checksums of dense tensors; their parameters' names may still change."""
        self._sums = torch.stack([_checksum(param.detach()) for param in params])
        self._labels, self._num_writes = labels, self._guard.num_writes

    def forget(self) -> None:
        """Drop the checksums: the parameters have other values."""
        self._sums, self._labels = None, ()

    def take(self) -> list[tuple[str, int | None]]:
        """Return and drop names and checksums, None of what may have been written since."""
        is_valid = self._sums is not None and self._guard.num_writes == self._num_writes
        sums = self._sums.tolist() if is_valid else [None] * len(self._labels)  # type: ignore[union-attr] # not None
        found = [(label.fqn, each) for label, each in zip(self._labels, sums, strict=True)]
        self.forget()
        return found


def _checksum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits as whole numbers of 64 bits, 0-d on its device."""
    # The only integers that torch sums at the speed of memory; a copy where they don't fit.
    data = tensor.contiguous().view(-1)
    if data.storage_offset() * data.itemsize % 8:
        data = data.clone()
    data = data.view(torch.uint8)
    num_whole = data.numel() // 8 * 8
    return data[:num_whole].view(torch.int64).sum() + data[num_whole:].sum()


class HostGradient:
    """Host memory for the gradient shard of one flat parameter.

    The published `.grad`s are views of `memory`, which is allocated once. Where they are still
    there when the next backward's gradients come, these go into a second buffer, allocated once
    too, and are added on the host.

    [Note: Complete gradients]
    Copies run beside the backward, unit by unit. `collect`, at its end, waits for them on the host:
    before that nobody can see the gradients, and after it they are complete. Sources are kept until
    their copy is done; [Note: Persistent gradients] of a later round wait for it on the device.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, copies: HostCopies, *, is_pinned: bool
    ) -> None:
        self._numel, self._dtype, self._is_pinned = numel, dtype, is_pinned
        self._copies = copies
        self._memory: list[Tensor] = []  # each (numel,); `.grad`s are views of the first
        self._incoming: Tensor | None = None  # the one that gets this backward's gradients
        self._further: list[Tensor] = []  # what further rounds of this backward add, (numel,) each
        self._in_flight: list[tuple[Any, Tensor]] = []  # events and sources

    @property
    def memory(self) -> Tensor:
        """Shape `(numel,)`: where the `.grad`s are."""
        return self._buffer(0)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return sum(buffer.nbytes for buffer in self._memory)

    def _buffer(self, index: int) -> Tensor:
        while len(self._memory) <= index:
            self._memory.append(alloc_host(self._numel, self._dtype, is_pinned=self._is_pinned))
        return self._memory[index]

    def begin(self, shown: Iterable[FlatShard]) -> Tensor:
        """Return the memory for gradients that come: one that no `.grad` is a view of.

        Args:
            shown: The sharded parameters that have the `.grad`s.
        """
        start = self.memory.untyped_storage().data_ptr()
        locals_ = [p.grad._local for p in shown if isinstance(p.grad, FlatShard)]
        is_taken = any(local.untyped_storage().data_ptr() == start for local in locals_)
        if not is_taken and storage_uses_of(self.memory) > 1:
            self._memory.pop(0)  # somebody keeps gradients of an earlier step
        self._incoming = self._buffer(int(is_taken))
        return self._incoming

    def receive(self, shard: Tensor, shown: Iterable[FlatShard]) -> None:
        """Start copying a reduced shard, shape `(numel,)`; a further one is added to it later."""
        if self._incoming is None:
            self.copy(self.begin(shown), shard)
        else:
            self._further.append(alloc_host(self._numel, self._dtype, is_pinned=self._is_pinned))
            self.copy(self._further[-1], shard)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Start copying into a part of the memory."""
        self._in_flight = [item for item in self._in_flight if not self._copies.is_done(item[0])]
        self._in_flight.append((self._copies.copy_to_host(target, source), source))

    def reuse_sources(self) -> None:
        """Let the current stream write into what is being copied once that is done."""
        for event, _ in self._in_flight:
            self._copies.wait_on_device(event)

    def wait(self) -> None:
        """Wait on the host until all copies are done, and let go of their sources."""
        in_flight, self._in_flight = self._in_flight, []
        for event, _ in in_flight:
            self._copies.wait_on_host(event)

    def collect(self) -> Tensor | None:
        """Return this backward's gradients, complete, shape `(numel,)`; None if none came."""
        self.wait()
        incoming, self._incoming = self._incoming, None
        further, self._further = self._further, []
        for shard in further:
            assert incoming is not None
            incoming.add_(shard)
        return incoming

    def pieces_of(
        self,
        at_rest: Sequence[ParamEntry],
        entries: Sequence[ParamEntry],
        own: Sequence[Tensor | None] | None,
        cut: Callable[[Tensor], Sequence[Tensor]] | None,
    ) -> list[Tensor | None] | None:
        """Return the gradients of what is shown at rest, complete; None if none came.

        Args:
            at_rest: The entries, or the flat parameter.
            entries: The original parameters.
            own: Their gradients, where none came from a reduction.
            cut: How the originals' gradients are cut from the memory; None for a flat parameter.
        """
        is_flat = at_rest is not entries
        if own is not None:
            target = self.begin([each.sharded for each in at_rest])
            if is_flat:
                target.zero_()
            for entry, gradient in zip(entries, own, strict=True):
                if gradient is not None:
                    self.copy(entry.slice_of(target), gradient)
        whole = self.collect()
        if whole is None:
            return None
        if is_flat:
            spec = entries[0].spec
            zero_gaps(whole, spec.layout, spec.rank)
        pieces: list[Tensor | None] = []
        cut = cut or (lambda memory: [at_rest[0].slice_of(memory)])
        found, places = cut(whole), cut(self.memory)
        for index, (each, piece, place) in enumerate(zip(at_rest, found, places, strict=True)):
            if whole is not self.memory and each.sharded.grad is None:
                piece = place.copy_(piece)
            is_there = own is None or is_flat or own[index] is not None
            pieces.append(piece if is_there else None)
        return pieces

    def drop(self) -> None:
        """Forget what came, after an error, once nothing writes to the memory any more."""
        self._incoming, self._further = None, []
        self.wait()
