"""The last step of a backward: gradients become `.grad` of the parameters shown at rest."""

from __future__ import annotations

import torch
from torch import Tensor

from composable_shard._grad_pieces import local_gradient
from composable_shard._host_gradient import HostGradient
from composable_shard._param_views import ParamViews
from composable_shard._registration import ParamEntry

__all__ = ["PublishedGradients"]


class PublishedGradients(ParamViews):
    """What a handle does with gradients that are reduced, or that no other rank adds to."""

    _held: dict[int, Tensor]  # gradients where no other rank has any

    def publish_gradients(self, used: list[bool]) -> None:
        """Set or add to `.grad` of the parameters shown at rest that any rank used."""
        flat = self.flat if self.shows_flat else None
        own = pieces = None
        if self.grad.is_alone:
            own = pieces = [self._take_gradient(*item) for item in enumerate(self.entries)]
        if flat is not None:
            if flat.sharded.grad is None:
                flat.used = [False] * len(used)
            flat.used = [before or now for before, now in zip(flat.used, used, strict=True)]
            used = [any(used)]
        if self.host_grad is not None and not self.grad.is_partial:
            pieces = self._collect_on_host(self.host_grad, own)
        elif flat is not None:
            whole = self.grad.reduced if own is None else self._join(own)
            if whole is not None:
                self.zero_gaps(whole)  # nothing was packed there
            pieces = [None if whole is None else self.slice_of(flat, whole)]
        shown = self.shown_at_rest
        self.is_outdated = bool(self.layout.owners) and self.is_sharded
        self.grad.publish([e.sharded for e in shown], [e.spec for e in shown], used, pieces)

    def _collect_on_host(
        self, host: HostGradient, own: list[Tensor | None] | None
    ) -> list[Tensor | None] | None:
        """Return the gradients of what is shown, complete, in host memory; None if none came.

        Args:
            host: Where they are, or come to.
            own: Autograd's own, which were not reduced.
        """
        shown = self.shown_at_rest
        if own is not None:
            target = host.begin([each.sharded for each in shown])
            if self.shows_flat:
                target.zero_()
            for entry, gradient in zip(self.entries, own, strict=True):
                if gradient is not None:
                    host.copy(self.slice_of(entry, target), gradient)
        whole = host.collect()
        if whole is None:
            return None
        if self.shows_flat:
            self.zero_gaps(whole)
        pieces: list[Tensor | None] = []
        for index, each in enumerate(shown):
            piece = self.slice_of(each, whole)
            if whole is not host.memory and each.sharded.grad is None:
                piece = self.slice_of(each, host.memory).copy_(piece)
            is_there = own is None or own[index] is not None or self.shows_flat
            pieces.append(piece if is_there else None)
        return pieces

    def _join(self, pieces: list[Tensor | None]) -> Tensor:
        """Return gradients of whole parameters as one shard, zero where there is none."""
        shard = torch.zeros_like(self.local_shard)
        for entry, piece in zip(self.entries, pieces, strict=True):
            if piece is not None:
                self.slice_of(entry, shard).copy_(piece)
        return shard

    def _take_gradient(self, index: int, entry: ParamEntry) -> Tensor | None:
        """Take autograd's own gradient, shape `(spec.numel,)`, where no other rank has one."""
        dense = self._held.pop(index, None)
        gradient = entry.unsharded.grad  # type: ignore[union-attr]
        if dense is None:
            if gradient is None:
                return None
            entry.unsharded.grad = None  # type: ignore[union-attr]
            gradient = gradient.to_dense() if gradient.is_sparse else gradient.detach()
            dense = local_gradient(gradient, entry.spec)
        flat = entry.spec.flatten(dense)
        flat = flat.to(self.local_shard.dtype)
        factor = self.grad.reduction.divide_factor
        return flat if factor is None else flat.div_(factor)
