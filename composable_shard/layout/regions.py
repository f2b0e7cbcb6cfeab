"""Ranges and boxes of the elements of a tensor, and where two of them overlap.

[Note: Regions]
A region is a range of the elements of a box of the logical tensor, counted in memory order. A
FlatShard is a range of the whole tensor; a FlatShard of a tensor-parallel DTensor is a range of
this rank's box; a DTensor is a whole box; a plain tensor is the whole tensor. Two regions of the
same box and order overlap in one range; otherwise each element's place is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import NamedTuple, TypeAlias

_Ints = tuple[int, ...]
# A box as a half-open range of indices for each dim of the logical tensor.
Bounds: TypeAlias = tuple[tuple[int, int], ...]


def intersect(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    """Return the overlap of two half-open ranges; an empty one is `(start, start)`.

    Example: `intersect((0, 10), (4, 20))` is `(4, 10)`.
    """
    start = max(first[0], second[0])
    return start, max(start, min(first[1], second[1]))


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> _Ints:
    """Return the dims by descending stride.

    Dims whose order makes no difference ascend, so that equal regions compare equal.
    """
    dims = [dim for dim, size in enumerate(shape) if size > 1]
    by_stride = sorted(dims, key=lambda dim: -stride[dim])
    if by_stride == dims or 0 in shape:
        return tuple(range(len(shape)))
    return (*by_stride, *(dim for dim, size in enumerate(shape) if size == 1))


class Box(NamedTuple):
    """A part of a tensor whose elements are consecutive in a region's order."""

    offsets: _Ints  # where it begins, in each dim of the logical tensor
    sizes: _Ints  # how long it is, in each dim
    start: int  # number of its first element, counted as the region's `start`


class Region(NamedTuple):
    """Elements `[start, end)` of a box of a tensor, in memory order. [Note: Regions]"""

    box: Bounds  # a half-open range of indices for each dim of the logical tensor
    order: _Ints  # the dims, that with the largest stride first
    start: int  # counted in the box
    end: int  # likewise

    @property
    def numel(self) -> int:
        """Elements of the range."""
        return self.end - self.start

    @property
    def _row_major_sizes(self) -> _Ints:
        return tuple(self.box[dim][1] - self.box[dim][0] for dim in self.order)

    def boxes(self) -> list[Box]:
        """Return the boxes that make up the region, in its order.

        At most `2 * dims - 1` boxes, one for a 0-d tensor, none for an empty range.

        Example: elements `[2, 11)` of a row-major `(4, 3)` are the box `(0, 2)` of sizes `(1, 1)`,
        the box `(1, 0)` of sizes `(2, 3)`, and the box `(3, 0)` of sizes `(1, 2)`.
        """
        place = {dim: position for position, dim in enumerate(self.order)}
        return [
            Box(
                tuple(low + box.offsets[place[dim]] for dim, (low, _) in enumerate(self.box)),
                tuple(box.sizes[place[dim]] for dim in range(len(self.box))),
                box.start,
            )
            for box in _row_major(self._row_major_sizes, (), self.start, self.end)
        ]

    def whole_rows(self) -> Region:
        """Return the region of the rows that begin in this one; it has at most one box.

        A row is an index of the first dim, in memory order, that is longer than one.

        Example: elements `[2, 11)` of a row-major `(4, 3)` give `[3, 12)`.
        """
        lengths = [size for size in self._row_major_sizes if size > 1]
        numel = math.prod(lengths[1:])
        start, end = (-(-bound // numel) * numel for bound in (self.start, self.end))
        return self._replace(start=start, end=end)

    def covering_rows(self) -> tuple[tuple[slice, ...], int]:
        """Return the fewest leading rows that hold a region that is not empty.

        Returns:
            An index of the logical tensor: for leading dims in memory order, all but the last of
            length one. And the number of the first element there, counted as `start`.

        Example: the range `(4, 6)` of shape `(3, 2, 2)` gives rows `[1:2, 0:1, 0:2]` and 4.
        """
        rows = [slice(*bounds) for bounds in self.box]
        sizes = self._row_major_sizes
        skipped, numel = 0, math.prod(sizes)
        for dim, size in zip(self.order, sizes, strict=True):
            numel //= size
            first, last = (self.start - skipped) // numel, -(-(self.end - skipped) // numel)
            low = self.box[dim][0]
            rows[dim] = slice(low + first, low + last)
            skipped += first * numel
            if last - first > 1:
                break
        return tuple(rows), skipped


def whole(shape: Sequence[int]) -> Region:
    """Return the region of all elements, row by row."""
    return Region(whole_box(shape), tuple(range(len(shape))), 0, math.prod(shape))


def whole_box(shape: Sequence[int]) -> Bounds:
    """Return the box of all elements."""
    return tuple(zip(repeat(0), shape, strict=False))


class Overlap(NamedTuple):
    """The elements that two regions share, if they are one range in both."""

    target_start: int  # counted from the target's first element
    source_start: int  # likewise
    numel: int


def overlap(target: Region, source: Region) -> Overlap | None:
    """Return the elements that two regions share, or None if they may not be one range."""
    if target.box != source.box or target.order != source.order:
        return None
    start, end = intersect((target.start, target.end), (source.start, source.end))
    return Overlap(start - target.start, start - source.start, end - start)


def _row_major(sizes: _Ints, prefix: _Ints, start: int, end: int) -> Iterator[Box]:
    """Yield the boxes of elements `[start, end)` of a row-major block, counted from the same start.

    `prefix` is the block's index in the dims around it.
    """
    if start >= end:
        return
    if not sizes:
        yield Box(prefix, (1,) * len(prefix), start)
        return
    inner = math.prod(sizes[1:])
    # Rows [first, last) are whole.
    first, last = -(-start // inner), end // inner
    if first > last:
        yield from _in_row(sizes, prefix, last, (start, end))
        return
    yield from _in_row(sizes, prefix, first - 1, (start, first * inner))
    if first < last:
        offsets = (*prefix, first, *(0,) * (len(sizes) - 1))
        lengths = (*(1,) * len(prefix), last - first, *sizes[1:])
        yield Box(offsets, lengths, first * inner)
    yield from _in_row(sizes, prefix, last, (last * inner, end))


def _in_row(sizes: _Ints, prefix: _Ints, row: int, numbers: tuple[int, int]) -> Iterator[Box]:
    base = row * math.prod(sizes[1:])
    start, end = numbers
    for box in _row_major(sizes[1:], (*prefix, row), start - base, end - base):
        yield box._replace(start=box.start + base)
