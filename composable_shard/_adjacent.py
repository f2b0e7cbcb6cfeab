"""Slices that follow one another in memory, as one: fewer tensors for what treats them alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

__all__ = ["CutTensor", "join_adjacent", "runs_of"]


class CutTensor(NamedTuple):
    """A tensor of real numbers that was cut, for who finds its slices to take it in their place.

    Attributes:
        whole: 1-dim and contiguous.
        slices: All of them, in order.
        runs: Half-open ranges of `whole` that the slices fill, without gaps: as `runs_of` says.
    """

    whole: Tensor
    slices: Sequence[Tensor]
    runs: Sequence[tuple[int, int]]

    def joined(self) -> list[Tensor]:
        """Return what `join_adjacent` returns for the slices."""
        if len(self.runs) == 1 and self.runs[0] == (0, self.whole.numel()):
            return [self.whole]  # the usual case: a view costs a microsecond
        return [self.whole[start:end] for start, end in self.runs]


def runs_of(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return half-open ranges with those that follow one another joined; leaves empty ones out."""
    runs: list[tuple[int, int]] = []
    for start, end in ranges:
        if start == end:
            continue
        if runs and runs[-1][1] == start:
            start = runs.pop()[0]
        runs.append((start, end))
    return runs


def join_adjacent(slices: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of shape `(numel,)` over the same elements: one for each run of slices.

    A run are consecutive slices of one storage and dtype without a gap between them, as those of
    one flat parameter's gradient are. Empty slices are left out. No element is copied.

    Args:
        slices: 1-dim tensors; those that are complex or not contiguous stay as they are.
    """
    runs: list[list[Tensor]] = []
    end, dtype = -1, None  # an address, and what lies before it; None where nothing may follow
    for piece in slices:
        numel = piece.numel()
        if not numel:
            continue
        address = piece.data_ptr()
        if address == end and piece.dtype is dtype and piece.is_contiguous():
            runs[-1].append(piece)
        else:
            runs.append([piece])
            # A lazy conjugate has another value than its memory.
            is_joinable = piece.is_contiguous() and not piece.is_complex()
            dtype = piece.dtype if is_joinable else None
        end = address + numel * piece.element_size()
    return [tensor for run in runs for tensor in _join(run)]


def _join(run: list[Tensor]) -> list[Tensor]:
    """Return one tensor over the run, or its slices where they are in different storages."""
    first = run[0]
    if len(run) == 1:
        return run
    numel = sum(piece.numel() for piece in run)
    storage_numel = first.untyped_storage().nbytes() // first.element_size()
    # What a storage's allocation holds is its own: no other storage's memory begins within it.
    if first.storage_offset() + numel > storage_numel:
        return run
    return [first.as_strided((numel,), (1,))]
