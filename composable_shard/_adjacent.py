"""Slices that follow one another in memory, as one: fewer tensors for what treats them alike."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["join_adjacent"]


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
