"""Gradients that a rank keeps as autograd made them, or on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from composable_shard.comm import (
    HostCopies,
    alloc_host,
)
from composable_shard.flat_param.entries import ParamEntry, zero_gaps
from composable_shard.flat_param.grad_pieces import local_gradient
from composable_shard.tensor import (
    FlatShard,
)
from composable_shard.torch_private import (
    storage_uses_of,
)


class LocalGradients:
    """Gradients that no other rank adds to, copied out of autograd's hands.

    Autograd would add up microbatches in the parameter's dtype, [Note: Reduce dtype], and in memory
    that gradients of several parameters may share.
    """

    def __init__(self) -> None:
        self._held: dict[int, Tensor] = {}  # by parameter, each in its dense shape

    def hold(self, index: int, entry: ParamEntry, gradient: Tensor, dtype: torch.dtype) -> None:
        """Take the gradient of parameter `index`, cast, or add it to the one that is held."""
        held = self._held.get(index)
        entry.unsharded.grad = None  # type: ignore[union-attr]
        gradient = gradient.to_dense() if gradient.is_sparse else gradient.detach()
        dense = local_gradient(gradient, entry.spec)
        # Autograd's own tensor may be that of another parameter too, of a hook or of the caller.
        self._held[index] = dense.to(dtype, copy=True) if held is None else held.add_(dense)

    def take(
        self, index: int, entry: ParamEntry, dtype: torch.dtype, factor: float | None
    ) -> Tensor | None:
        """Return the gradient of parameter `index`, and forget it.

        Args:
            index: Position of the parameter.
            entry: The parameter.
            dtype: Of the result, shape `(spec.numel,)`.
            factor: What it is divided by.
        """
        dense = self._held.pop(index, None)
        if dense is None:
            return None
        flat = entry.spec.flatten(dense).to(dtype)
        return flat if factor is None else flat.div_(factor)

    def get(self, index: int) -> Tensor | None:
        """Return the gradient of parameter `index`, in its dense shape, if there is one."""
        return self._held.get(index)

    def convert(self, device: torch.device, dtype: torch.dtype) -> None:
        """Bring all to a device and a dtype."""
        self._held = {index: held.to(device, dtype) for index, held in self._held.items()}

    def drop_one(self, index: int, *, keeps_zeros: bool) -> None:
        """Forget the gradient of parameter `index`, or make it zeros."""
        if not keeps_zeros:
            self._held.pop(index, None)
        elif index in self._held:
            self._held[index].zero_()

    def drop(self) -> None:
        """Forget all."""
        self._held.clear()


def write_gradient(view: Tensor, gradient: Tensor, factor: Tensor | None) -> None:
    """Copy a gradient, times a tensor of 0 dimensions, into a view: one kernel, one pass."""
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    if factor is None:
        view.copy_(gradient)
    else:
        torch.mul(gradient, factor, out=view)


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
