"""Sums of what ranks sent, taken by this library itself."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_term", "add_up"]

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
        add_term(output, term)


def add_term(output: Tensor, term: Tensor) -> None:
    """Add a term of another dtype, in the output's precision."""
    # On CPU torch makes a copy of the term in the output's dtype: of a little at a time.
    pieces = term.split(_CHUNK_NUMEL)
    for own, piece in zip(output.split(_CHUNK_NUMEL), pieces, strict=True):
        own.add_(piece)
