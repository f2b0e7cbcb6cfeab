"""Sums of what ranks sent, taken by this library itself."""

from __future__ import annotations

import torch
from torch import Tensor

from composable_shard._exchange import Waitable, abandon
from composable_shard._trace import INSIDE

__all__ = ["PendingReduction", "add_up"]

_CHUNK_NUMEL = 1 << 16


def add_up(output: Tensor, terms: Tensor) -> None:
    """Write the sum of terms; in the output's precision, where that is another one.

    Args:
        output: Shape `(numel,)`.
        terms: Shape `(num_terms, numel)`, added in order.
    """
    if output.dtype == terms.dtype:
        torch.sum(terms, 0, out=output)
        return
    output.copy_(terms[0])
    for term in terms[1:]:
        _add_term(output, term)


def _add_term(output: Tensor, term: Tensor) -> None:
    """Add a term of another dtype, in the output's precision."""
    # On CPU torch makes a copy of the term in the output's dtype: of a little at a time.
    pieces = term.split(_CHUNK_NUMEL)
    for own, piece in zip(output.split(_CHUNK_NUMEL), pieces, strict=True):
        own.add_(piece)


class PendingReduction:
    """A reduction in flight; `finish` must be called before its output is read."""

    __slots__ = ("_input", "_scale", "_terms", "_work", "output")

    def __init__(
        self,
        work: Waitable | None,
        output: Tensor,
        input: Tensor,
        terms: Tensor | None,
        scale: float,
    ) -> None:
        self._work = work
        self._input = input  # kept: the backend reads it until the work is done
        self._terms = terms  # our slice's terms, still to be added up; or the one that is
        self._scale = scale
        self.output = output

    def finish(self) -> Tensor:
        """Wait for the reduction and return its output, shape `(shard_numel,)`."""
        if self._work is not None:
            self._work.wait()
        if self._terms is None and self._scale == 1.0:
            return self.output
        with INSIDE:
            terms = self._terms
            if terms is not None and terms.dim() == 2:
                add_up(self.output, terms)
            elif terms is not None and terms.dtype == self.output.dtype:
                self.output.add_(terms)
            elif terms is not None:
                _add_term(self.output, terms)
            if self._scale != 1.0:
                self.output.mul_(self._scale)
        return self.output

    def abandon(self) -> None:
        """Wait until the buffers are free for other use; errors of the collective are ignored."""
        if self._work is not None:
            abandon(self._work)
