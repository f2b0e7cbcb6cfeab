"""Slices that follow one another in memory are joined, and nothing else is."""

from __future__ import annotations

import torch

from composable_shard._adjacent import join_adjacent
from tests.helpers import assert_equal


def test_slices_without_a_gap_become_one_tensor() -> None:
    """Over the same memory; empty slices are left out."""
    flat = torch.arange(12.0)
    joined = join_adjacent([flat[1:3], flat[3:3], flat[3:7], flat[8:9], flat[9:12]])
    assert_equal([*joined], [flat[1:7], flat[8:12]], "joined")
    joined[0].zero_()
    assert_equal(flat[:8], torch.tensor([0.0] * 7 + [7.0]), "the slices' memory")


def test_order_dtype_and_layout_divide_runs() -> None:
    """A run goes on in memory as in the list, with one dtype and no step between elements."""
    flat = torch.arange(8.0)
    pieces = [flat[4:8], flat[0:4]]
    assert [len(piece) for piece in join_adjacent(pieces)] == [4, 4]
    mixed = [flat[:4], flat[4:].view(torch.int32)]
    assert [piece.dtype for piece in join_adjacent(mixed)] == [torch.float32, torch.int32]
    strided = [flat[0:4:2], flat[2:8]]
    assert_equal(join_adjacent(strided), strided, "strided")
    numbers = torch.ones(4, dtype=torch.complex64)
    lazy = [numbers[:2].conj(), numbers[2:]]
    assert len(join_adjacent(lazy)) == 2


def test_neighbours_of_other_storages_stay_apart() -> None:
    """Where two allocations touch, their addresses look like one run's."""
    memory = bytearray(32)
    pieces = [torch.frombuffer(memory, dtype=torch.float32, count=4, offset=n) for n in (0, 16)]
    assert pieces[0].data_ptr() + 16 == pieces[1].data_ptr()
    joined = join_adjacent(pieces)
    assert [piece.untyped_storage().nbytes() for piece in joined] == [16, 16]
