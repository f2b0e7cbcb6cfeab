"""Memory that nobody may read is filled with NaN, on request."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from composable_shard import ShardingStrategy, get_handles, reshard, unshard
from composable_shard.flat_param import gradients
from tests.harness.assertions import assert_equal
from tests.harness.poison import SWITCH, poisoned
from tests.harness.ranks import distributed, run_processes
from tests.programs.models import rank_input, shard_root, square_mean


@distributed(2)
def test_values_in_flight_are_poisoned_until_they_are_waited_for() -> None:
    """An unwaited read gives NaN each time, a right one the values."""
    model = nn.Linear(6, 6)
    shard_root(model)
    square_mean(model(rank_input(2, 6))).backward()
    (handle,) = get_handles(model)
    reshard(model)
    with poisoned():
        handle.unshard()
        others = handle.full.unversioned.chunk(2)[1 - dist.get_rank()]
        assert others.isnan().all()  # this rank's own part may be its shard
        handle.full.wait()
        assert not handle.full.unversioned.isnan().any()
        reshard(model)
    assert handle.full.buffer.untyped_storage().nbytes() == 0


@distributed(2)
def test_unpoisoned_values_are_written_at_once() -> None:
    """Without it a kept buffer has numbers at all times."""
    model = nn.Linear(6, 6)
    shard_root(model, strategy=ShardingStrategy.SHARD_GRAD_OP)
    unshard(model)
    (handle,) = get_handles(model)
    assert not handle.full.unversioned.isnan().any()


@distributed(2)
def test_poison_leaves_this_ranks_part_of_a_kept_buffer() -> None:
    """It is the shard: an error that ends a gather must not cost it."""
    model = nn.Linear(6, 6)
    shard_root(model, strategy=ShardingStrategy.SHARD_GRAD_OP)
    (handle,) = get_handles(model)
    expected = handle.local_shard.clone()
    with poisoned():
        handle.unshard()
        assert_equal(handle.local_shard, expected)
        handle.full.wait()


def _memory_is_nan() -> bool:
    tensor = torch.zeros(3)
    tensor.untyped_storage().resize_(0)
    gradients.alloc_storage(tensor)
    return bool(tensor.isnan().all())


def test_the_switch_poisons_what_workers_do() -> None:
    """`make test-poison` sets it."""
    assert run_processes([{SWITCH: "1"}, {SWITCH: "0"}], _memory_is_nan) == [True, False]
