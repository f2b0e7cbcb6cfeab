"""Where the elements of a peer's tensors are in its files; nothing is read here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from composable_shard.layout import Bounds, Region, memory_order, whole, whole_box
from composable_shard.state_dict import json_tree

_MAX_SPANS = 100_000  # of one tensor that is no dense block of memory


class Span(NamedTuple):
    """Elements of a tensor that are consecutive in a file."""

    file: str
    # Of the first byte. If `item_nbytes` is set, of a file of torch.save inside the file, which
    # has that length and this one tensor.
    offset: int
    region: Region
    item_nbytes: int = 0


@dataclass(frozen=True)
class PeerTensor(json_tree.Elsewhere):
    """One tensor of a peer's files."""

    shape: torch.Size
    dtype: torch.dtype
    spans: tuple[Span, ...]

    def __setstate__(self, state: Any) -> None:
        """Refuse attributes from a pickle, which could name another file."""
        raise ValueError("attributes of a tensor")

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.shape.numel() * self.dtype.itemsize


def strided(  # noqa: PLR0913 -- a view of a storage
    file: str,
    start: int,
    nbytes: int,
    dtype: torch.dtype,
    offset: int,
    shape: Sequence[int],
    stride: Sequence[int],
) -> PeerTensor:
    """Return a view of a storage.

    Args:
        file: The file that has the storage.
        start: Offset of the storage's first byte.
        nbytes: Bytes of the storage.
        offset: Of the view's first element in the storage, in elements.

    Raises:
        ValueError: If the view is larger than the storage.
    """
    counts = (offset, *shape, *stride)
    if any(not isinstance(each, int) or each < 0 for each in counts) or len(shape) != len(stride):
        raise ValueError(f"a tensor of shape {tuple(shape)} and stride {tuple(stride)}")
    numel = math.prod(shape)
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if numel and (last + 1) * dtype.itemsize > nbytes:
        raise ValueError(
            f"a tensor of shape {tuple(shape)} and stride {tuple(stride)} from element {offset} "
            f"on, in a storage of {nbytes} bytes"
        )
    spans: list[Span] = []
    for box, place in _dense_boxes(whole_box(shape), stride, offset) if numel else ():
        if len(spans) == _MAX_SPANS:
            raise ValueError(f"a tensor of shape {tuple(shape)} and stride {tuple(stride)}")
        sizes = [high - low for low, high in box]
        region = Region(box, memory_order(sizes, stride), 0, math.prod(sizes))
        spans.append(Span(file, start + place * dtype.itemsize, _simplest(region, shape)))
    return PeerTensor(torch.Size(shape), dtype, tuple(spans))


def _dense_boxes(box: Bounds, stride: Sequence[int], offset: int) -> Iterator[tuple[Bounds, int]]:
    """Yield the parts of a view that are dense in memory, with the places where they begin."""
    sizes = [high - low for low, high in box]
    expected = 1
    for dim in reversed(memory_order(sizes, stride)):
        if sizes[dim] > 1 and stride[dim] != expected:
            break
        expected *= sizes[dim]
    else:
        yield box, offset
        return
    outer = next(dim for dim in memory_order(sizes, stride) if sizes[dim] > 1)
    low, high = box[outer]
    for number in range(low, high):
        part = (*box[:outer], (number, number + 1), *box[outer + 1 :])
        yield from _dense_boxes(part, stride, offset + (number - low) * stride[outer])


def boxed(
    file: str, offset: int, shape: Sequence[int], box: Bounds, *, item_nbytes: int = 0
) -> Span:
    """Return a span of a whole box of a tensor, row by row."""
    numel = math.prod(high - low for low, high in box)
    region = Region(box, tuple(range(len(shape))), 0, numel)
    return Span(file, offset, _simplest(region, shape), item_nbytes)


def _simplest(region: Region, shape: Sequence[int]) -> Region:
    """Return a whole box as a range of the whole tensor, if it is one.

    Ranks ask for ranges of whole tensors, and two ranges of one box are compared at once.
    """
    if region.order != tuple(range(len(shape))):
        return region
    partial = [
        dim
        for dim, (bounds, size) in enumerate(zip(region.box, shape, strict=True))
        if bounds != (0, size)
    ]
    if partial and any(high - low != 1 for low, high in region.box[: partial[-1]]):
        return region
    start = 0
    for (low, _), size in zip(region.box, shape, strict=True):
        start = start * size + low
    return Region(whole_box(shape), region.order, start, start + region.numel)


def flat_range(shape: Sequence[int], start: int, end: int) -> Region:
    """Return a range of a tensor's elements, counted row by row."""
    region = whole(shape)
    return Region(region.box, region.order, start, end)
