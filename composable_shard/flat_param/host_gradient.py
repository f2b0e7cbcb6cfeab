"""`OffloadedGradients`: gradients of a flat parameter whose `.grad`s are on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from composable_shard.comm import (
    HostCopies,
    alloc_host,
)
from composable_shard.flat_param.entries import ParamEntry
from composable_shard.flat_param.form import Cutter
from composable_shard.flat_param.full_values import FullValues
from composable_shard.flat_param.gradients import FlatGradients
from composable_shard.tensor import FlatShard
from composable_shard.torch_private import storage_of, storage_uses_of


class HostGradient:
    """Host memory for the gradient shard of one flat parameter.

    The published `.grad`s are views of `memory`, which is allocated once. If they are still set
    when the next backward's gradients come, these go into a second buffer, also allocated once, and
    are added on the host.

    [Note: Complete gradients]
    Copies run beside the backward, unit by unit. `collect`, at its end, waits for them on the host:
    before that the gradients are hidden, and after it they are complete. Sources are kept until
    their copy is done; [Note: Persistent gradients] of a later round wait for it on the device.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, copies: HostCopies, *, is_pinned: bool
    ) -> None:
        self._numel, self._dtype, self._is_pinned = numel, dtype, is_pinned
        self._copies = copies
        self._memory: list[Tensor] = []  # each (numel,); `.grad`s are views of the first
        self._incoming: Tensor | None = None  # gets this backward's gradients
        self._further: list[Tensor] = []  # of further rounds of this backward, (numel,) each
        self._in_flight: list[tuple[Any, Tensor]] = []  # events and sources

    @property
    def memory(self) -> Tensor:
        """Shape `(numel,)`: the memory of the `.grad`s."""
        return self._buffer(0)

    def _buffer(self, index: int) -> Tensor:
        while len(self._memory) <= index:
            self._memory.append(alloc_host(self._numel, self._dtype, is_pinned=self._is_pinned))
        return self._memory[index]

    def begin(self, shown: Iterable[FlatShard]) -> Tensor:
        """Return a buffer that no current `.grad` aliases.

        Args:
            shown: The sharded parameters that have the `.grad`s.
        """
        storage = storage_of(self.memory)
        is_taken = any(
            isinstance(p.grad, FlatShard) and storage_of(p.grad._local) == storage for p in shown
        )
        if not is_taken and storage_uses_of(self.memory) > 1:
            self._memory.pop(0)  # a user keeps gradients of an earlier step
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
        """Make the current stream wait until the sources of copies in flight were read."""
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
        cut: Callable[[Tensor], Sequence[Tensor]],
    ) -> list[Tensor] | None:
        """Return the complete gradients of the parameters at rest; None if none came.

        Args:
            at_rest: The parameters.
            cut: How their gradients are cut from the memory.
        """
        whole = self.collect()
        if whole is None:
            return None
        pieces: list[Tensor] = []
        found, places = cut(whole), cut(self.memory)
        for each, piece, place in zip(at_rest, found, places, strict=True):
            if whole is not self.memory and each.sharded.grad is None:
                piece = place.copy_(piece)
            pieces.append(piece)
        return pieces

    def drop(self) -> None:
        """Forget this backward's gradients after an error, once no copy writes to the memory."""
        self._incoming, self._further = None, []
        self.wait()


class OffloadedGradients(FlatGradients):
    """Gradients that are packed and reduced on the device, and go to the host as they are reduced.

    Attributes:
        host: Host memory for them; None before `bind`.
    """

    host: HostGradient | None = None

    def bind(
        self,
        full: FullValues,
        reduce_dtype: torch.dtype,
        *,
        is_pinned: bool,
        before: FlatGradients,
    ) -> None:
        """Replace the gradients' memory, and that on the host; see `FlatGradients`."""
        shard = full.shard
        assert shard.copies is not None
        numel, dtype = self.reduction.own_numel, shard.values.dtype
        self.host = HostGradient(numel, dtype, shard.copies, is_pinned=is_pinned)
        super().bind(full, reduce_dtype, is_pinned=is_pinned, before=before)

    def _end_earlier_uses(self) -> None:
        super()._end_earlier_uses()
        if self.is_persistent and self.host is not None:
            self.host.reuse_sources()

    def add_result(self) -> None:
        """Wait for the reduction in flight, if any; start copying its result to the host."""
        super().add_result()
        if self.reduced is not None and self.host is not None:
            self.host.receive(self.reduced, [each.sharded for each in self._shown.at_rest])
            self.reduced = None

    def _cut(self, cutter: Cutter) -> Sequence[Tensor] | None:
        assert self.host is not None
        return self.host.pieces_of(self._shown.at_rest, cutter.split)

    def drop(self) -> None:
        """Forget all unpublished gradients, also those in flight or copied, after an error."""
        super().drop()
        if self.host is not None:
            self.host.drop()
