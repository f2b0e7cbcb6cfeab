"""Flat ranges as boxes, against every element counted."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch

from composable_shard.layout.regions import Box, Region, memory_order, whole_box


def boxes_of_range(shape: Sequence[int], stride: Sequence[int], start: int, end: int) -> list[Box]:
    """Return the boxes of elements `[start, end)` of a dense tensor."""
    return Region(whole_box(shape), memory_order(shape, stride), start, end).boxes()


pytestmark = pytest.mark.fast


@pytest.mark.parametrize("seed", range(20))
def test_boxes_cover_exactly_the_range_in_order(seed: int) -> None:
    """Each box is its elements' consecutive numbers, for any shape, order of dims and range."""
    choose = random.Random(seed)
    for _ in range(50):
        num_dims = choose.randrange(5)
        shape = [choose.randrange(1, 5) for _ in range(num_dims)]
        order = choose.sample(range(num_dims), num_dims)
        laid_out = torch.empty([shape[dim] for dim in order])
        stride = [laid_out.stride(order.index(dim)) for dim in range(num_dims)]
        numel = laid_out.numel()
        start, end = sorted((choose.randrange(numel + 1), choose.randrange(numel + 1)))
        numbers = torch.arange(numel).as_strided(shape, stride)
        boxes = boxes_of_range(shape, stride, start, end)
        assert len(boxes) <= max(1, 2 * num_dims - 1)
        found: list[int] = []
        for box in boxes:
            block = numbers
            for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                assert size > 0
                block = block.narrow(dim, offset, size)
            inside = block.flatten().sort().values.tolist()
            assert inside == list(range(box.start, box.start + len(inside)))
            assert block.stride() == tuple(stride)
            found += inside
        assert found == list(range(start, end))


def test_example_of_the_documentation() -> None:
    """A partial row, whole rows, a partial row."""
    assert boxes_of_range((4, 3), (3, 1), 2, 11) == [
        Box((0, 2), (1, 1), 2),
        Box((1, 0), (2, 3), 3),
        Box((3, 0), (1, 2), 9),
    ]


def test_empty_ranges_and_scalars() -> None:
    """No box for nothing, one box without dims for the element of a 0-d tensor."""
    assert boxes_of_range((4, 3), (3, 1), 5, 5) == []
    assert boxes_of_range((0, 3), (3, 1), 0, 0) == []
    assert boxes_of_range((), (), 0, 0) == []
    assert boxes_of_range((), (), 0, 1) == [Box((), (), 0)]


@pytest.mark.parametrize("shape", [(4, 3), (1, 4, 3), (2, 5, 3), (12,), ()])
@pytest.mark.parametrize("step", [1, -1])
def test_whole_rows_of_all_ranges_are_the_tensor(shape: tuple[int, ...], step: int) -> None:
    """One box at most for each range, and together each element once, for any two cuts."""
    numel = math.prod(shape)
    order = tuple(range(len(shape)))[::step]
    for first, second in itertools.combinations_with_replacement(range(numel + 1), 2):
        count = torch.zeros(shape)
        for start, end in ((0, first), (first, second), (second, numel)):
            boxes = Region(whole_box(shape), order, start, end).whole_rows().boxes()
            assert len(boxes) <= 1
            for box in boxes:
                places = zip(box.offsets, box.sizes, strict=True)
                count[tuple(slice(offset, offset + size) for offset, size in places)] += 1
        assert bool((count == 1).all())


@pytest.mark.parametrize("bounds", [(0, 24), (0, 1), (23, 24), (5, 6), (3, 9), (8, 16), (7, 8)])
def test_covering_rows_hold_the_range_and_not_a_row_more(bounds: tuple[int, int]) -> None:
    """Against the elements themselves: rows of one dim, single ones of those outside it."""
    start, end = bounds
    values = torch.arange(24).view(3, 4, 2)
    rows, skipped = Region(whole_box((3, 4, 2)), (0, 1, 2), start, end).covering_rows()
    covered = values[rows].flatten().tolist()
    assert covered[start - skipped : end - skipped] == list(range(start, end))
    assert len(covered) - (end - start) < 2 * values[rows][..., 0:1, :].shape[-1] + 14
    lengths = [part.stop - part.start for part in rows]
    several = next((dim for dim, length in enumerate(lengths) if length > 1), 2)
    assert lengths[several + 1 :] == [3, 4, 2][several + 1 :]
