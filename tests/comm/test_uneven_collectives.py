"""Collectives of shards of different sizes: the same results in every way, empty parts included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard import FlatLayout
from composable_shard.comm import algorithms, collectives, devices
from composable_shard.comm.groups import ShardGroup
from composable_shard.comm.trace import count_collectives
from composable_shard.flat_param.gradient_reduction import FlatReduction
from tests.common.free_group import FreeGroup
from tests.harness.assertions import assert_equal
from tests.harness.pairs import pairwise
from tests.harness.ranks import distributed

CPU = torch.device("cpu")
WAYS = {"exchange": (8, 64), "all-to-all": (0, 64), "backend": (0, 0)}
NUMELS = {
    "rows": [6, 8, 4],
    "empty part": [7, 0, 9],
    "one owner": [0, 16, 0],
    "last owner": [0, 0, 5],
    "nothing": [0, 0, 0],
}
DTYPES = [torch.float32, torch.bfloat16, torch.complex64]


@contextmanager
def ways(name: str) -> Iterator[None]:
    """Choose how a group of this size sends: as small, as larger, and as very large ones do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "MAX_EXCHANGE_SIZE", WAYS[name][0])
        patch.setattr(algorithms, "_MAX_ALL_TO_ALL_SIZE", WAYS[name][1])
        yield


def whole_numbers(total: int, dtype: torch.dtype, rank: int) -> Tensor:
    """Return whole numbers, which sums of any order keep exact."""
    values = torch.arange(total, dtype=torch.float32) % 13 + rank
    return values.to(dtype) * (1 + 1j if dtype.is_complex else 1)


@pytest.mark.parametrize(*pairwise(dtype=DTYPES, way=WAYS, world_size=(2, 3)))
@distributed()
def test_shards_of_any_size_arrive(way: str, dtype: torch.dtype) -> None:
    """In place and not."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    for given in (None, *(each[:size] for each in NUMELS.values())):
        numels = [4] * size if given is None else given
        total = sum(numels)
        expected = whole_numbers(total, dtype, 0)
        own = expected.split(numels)[rank].clone()
        with ways(way), count_collectives() as log:
            # Behind uneven shards there may be more.
            output = torch.zeros(total + 3 * (given is not None), dtype=dtype)
            collectives.all_gather(output, own, group, given).wait()
            in_place = torch.zeros(total, dtype=dtype)
            part = in_place.split(numels)[rank].copy_(own)
            collectives.all_gather(in_place, part, group, given).wait()
        assert_equal(output[:total], expected)
        assert bool((output[total:] == 0).all())
        assert_equal(in_place, expected)
        nbytes = total * dtype.itemsize
        assert [event.nbytes for event in log.events] == [nbytes] * 2


@pytest.mark.parametrize(*pairwise(dtype=DTYPES, way=WAYS, world_size=(2, 3)))
@distributed()
def test_sums_of_any_size_arrive(way: str, dtype: torch.dtype) -> None:
    """Into memory of their own, into a wider dtype, and in place; scaled."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    wide = {torch.float32: torch.float64, torch.bfloat16: torch.float32}.get(dtype, dtype)
    for numels in (each[:size] for each in NUMELS.values()):
        total = sum(numels)
        exact = sum(whole_numbers(total, dtype, each) for each in range(size)) * 0.5
        expected = exact.split(numels)[rank]
        for kind in ("own memory", "wider", "in place"):
            input = whole_numbers(total, dtype, rank)
            part = input.split(numels)[rank]
            is_wide = kind == "wider"
            output = part if kind == "in place" else torch.zeros_like(part, dtype=wide)
            output = torch.zeros_like(part) if kind == "own memory" else output
            with ways(way):
                shares = kind == "in place" or (is_wide and wide != dtype)
                reduction = algorithms.ReduceScatter(group, dtype, input.device, numels)
                num_parts = reduction.scratch_parts(in_place=shares)
                scratch = input.new_empty(num_parts * numels[rank]) if num_parts else None
                pending = reduction.start(output, input, scratch, 0.5)
                assert_equal(pending.finish(), expected.to(output.dtype), f"{kind} {numels}")


class _TwoBackends(FreeGroup):
    """As `init_process_group("cpu:gloo,cuda:nccl")` makes them."""

    def _get_backend(self, device: torch.device) -> Any:
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        name = "gloo" if device.type == "cpu" else "nccl"
        return SimpleNamespace(name=lambda: name)


@pytest.mark.fast
def test_algorithm_is_that_of_the_buffers_device() -> None:
    """Not of the mesh's, which a model has left with `model.cpu()`; there need not be any."""
    dtype = torch.float32
    group = ShardGroup(_TwoBackends(0, 2), 0, 2, torch.device("cuda"))
    reduction = FlatReduction(group, FlatLayout.plan([8], 2, 4))
    for device, num_parts in (("cuda", 0), ("cpu", 1), ("xpu", 0)):
        reduction.bind(dtype, dtype, torch.device(device), is_in_place=True)
        assert reduction.num_terms == num_parts
