"""Slices that follow one another in memory are joined, and nothing else is."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks.free_group import free_world
from composable_shard import FlatShard, ShardingStrategy, fully_shard
from composable_shard.tensor.flat_shard import join_adjacent, runs_of
from composable_shard.tensor.gradient_rules import join_shards
from tests.helpers import assert_equal
from tests.models import Net, shard_blocks


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


def test_ranges_without_a_gap_become_one() -> None:
    """As the slices that they cut."""
    assert runs_of([(0, 0), (1, 3), (3, 3), (3, 7), (8, 8), (8, 9)]) == [(1, 7), (8, 9)]
    assert runs_of([]) == []


# Gradients as they were published


def _set_to_none(param: FlatShard) -> None:
    param.grad = None


def _replace(param: FlatShard) -> None:
    param.grad = torch.ones_like(param)


def _replace_data(param: FlatShard) -> None:
    assert param.grad is not None
    param.grad.data = torch.ones_like(param)


def _add(param: FlatShard) -> None:
    assert param.grad is not None
    param.grad.add_(1.0)


def _find(
    model: nn.Module, *, one_by_one: bool
) -> tuple[list[tuple[int, int]], dict[str, int], set[torch.dtype]]:
    """Return the addresses and sizes of what is found, and how many shards stay for themselves."""
    grads = [param.grad for param in model.parameters()]
    shards = [grad for grad in grads if isinstance(grad, FlatShard)]
    if one_by_one:
        shards = [FlatShard(each._local, each._shard_spec) for each in shards]
    found = join_shards(shards)
    tensors = [tensor for slices in found.slices.values() for tensor in slices]
    units = [".".join(each._shard_spec.label.fqn.split(".")[:2]) for each in found.others]
    places = [(each.data_ptr(), each.numel()) for each in tensors]
    return places, {unit: units.count(unit) for unit in units}, found.dtypes


CHANGES: dict[str, tuple[Callable[[FlatShard], None], int]] = {  # and the shards left in the unit
    "nothing": (lambda param: None, 0),
    "in_place": (_add, 0),
    "none": (_set_to_none, 3),
    "replaced": (_replace, 4),
    "other_data": (_replace_data, 4),
}


@pytest.mark.parametrize("name", ["up.weight", "down.bias"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_OPTIM])
def test_gradients_of_a_unit_are_one_tensor(
    strategy: ShardingStrategy, change: str, name: str
) -> None:
    """Found without looking at each one; and what is found is what looking finds."""
    do, num_left = CHANGES[change]
    with free_world(2):
        model = Net()
        shard_blocks(model, strategy=strategy)
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(2, 5)).sum().backward()
        do(model.blocks[1].get_parameter(name))
        places, others, dtypes = _find(model, one_by_one=False)
        expected, every, all_dtypes = _find(model, one_by_one=True)
        assert (places, dtypes) == (expected, all_dtypes)
        assert others.pop("blocks.1", 0) == num_left
        assert others == {unit: n for unit, n in every.items() if unit.startswith(("inp", "out"))}


def test_copy_of_a_gradient_is_no_part_of_the_original() -> None:
    """Neither a deep copy nor an alias of the first gradient stands for the others."""
    with free_world(2):
        model = Net()
        fully_shard(model)
        model(torch.ones(2, 5)).sum().backward()
        first, *others = [param.grad for param in model.parameters()]
        for twin in (copy.deepcopy(first), first.clone(), first.detach()):
            assert len(join_shards([twin, *others]).others) == len(others) + 1
