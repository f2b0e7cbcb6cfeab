"""A flat range of an n-d tensor as axis-aligned boxes: arithmetic on integers alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["Box", "boxes_of_range", "intersect"]


def intersect(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    """Return the overlap of two half-open ranges; an empty one is `(start, start)`.

    Example: `intersect((0, 10), (4, 20))` is `(4, 10)`.
    """
    start = max(first[0], second[0])
    return start, max(start, min(first[1], second[1]))


_Ints = tuple[int, ...]


class Box(NamedTuple):
    """A block of a tensor whose elements are consecutive in the tensor's memory order.

    Attributes:
        offsets: Where it begins, in each dim.
        sizes: How long it is, in each dim.
        start: Number of its first element, in memory order.
    """

    offsets: _Ints
    sizes: _Ints
    start: int


def boxes_of_range(shape: Sequence[int], stride: Sequence[int], start: int, end: int) -> list[Box]:
    """Return the boxes that make up the elements `[start, end)` of a tensor, in that order.

    At most `2 * len(shape) - 1` boxes, one for a 0-d tensor, none for an empty range.

    Args:
        shape: Of the tensor.
        stride: Of the tensor, which is dense: its dims are nested in memory, in any order.
        start: First element, in memory order.
        end: Past the last element.

    Example: elements `[2, 11)` of a row-major `(4, 3)` are the box `(0, 2)` of sizes `(1, 1)`, the
    box `(1, 0)` of sizes `(2, 3)`, and the box `(3, 0)` of sizes `(1, 2)`.
    """
    # From the outermost dim in memory to the innermost.
    order = sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim))
    place = {dim: position for position, dim in enumerate(order)}
    return [
        Box(
            tuple(box.offsets[place[dim]] for dim in range(len(shape))),
            tuple(box.sizes[place[dim]] for dim in range(len(shape))),
            box.start,
        )
        for box in _row_major(tuple(shape[dim] for dim in order), (), start, end)
    ]


def _row_major(sizes: _Ints, prefix: _Ints, start: int, end: int) -> Iterator[Box]:
    """Yield the boxes of elements `[start, end)` of a row-major block; they count as those do.

    Args:
        sizes: Of the block.
        prefix: The block's index in the dims around it.
        start: First element, counted from the block's.
        end: Past the last element.
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
