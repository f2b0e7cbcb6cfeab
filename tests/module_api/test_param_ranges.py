"""Who holds which elements: the owner map of OSS, the range map of Megatron."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_shard import (
    ShardingStrategy,
    fully_shard,
    get_handles,
    get_param_ranges,
    lazy_init,
)
from tests.helpers import distributed
from tests.models import Tied, every_granularity, replica_mesh, seeded, shard_blocks


@pytest.mark.parametrize("strategy", ShardingStrategy)
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(2)
def test_ranges_are_what_the_ranks_hold(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """S2.2, S3.1: they cover each parameter once, and have its values on their rank."""
    model = seeded(Tied)
    whole = {name: param.detach().clone() for name, param in model.named_parameters()}
    options = {"strategy": strategy, "use_orig_params": use_orig_params}
    shard_blocks(model, granularity=every_granularity, **options)
    lazy_init(model)
    ranges = get_param_ranges(model)
    assert list(ranges) == list(whole)
    shards = {
        str(entry.label): handle.local_shard
        for handle in get_handles(model)
        for entry in handle.entries
    }
    for name, found in ranges.items():
        assert [each.start for each in found] == [0, *(each.end for each in found[:-1])], name
        assert found[-1].end == whole[name].numel(), name
        for each in found:
            if each.rank != dist.get_rank():
                continue
            numel = each.end - each.start
            values = shards[name][each.shard_start : each.shard_start + numel]
            assert torch.equal(values, whole[name].flatten()[each.start : each.end]), name
    owners = [found[0].rank for found in ranges.values() if len(found) == 1]
    assert len(owners) >= 4  # two matrices of each block are owned whole, ties apart


@distributed(4)
def test_ranges_name_ranks_of_the_world() -> None:
    """Of the shard group of this rank; the replicas have ranges of their own."""
    mesh = replica_mesh()
    model = seeded(lambda: nn.Linear(6, 4))
    assert get_param_ranges(model) == {}
    fully_shard(model, mesh=mesh)
    found = get_param_ranges(model)
    ranks = sorted({each.rank for ranges in found.values() for each in ranges})
    assert ranks == mesh["shard"].mesh.tolist()
    assert found["weight"][0].flat_start == found["weight"][0].shard_start == 0
    assert found["weight"][1].flat_start == found["weight"][0].end
