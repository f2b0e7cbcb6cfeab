"""The library waits for what must be waited for: its steps have no races on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from composable_shard import MixedPrecisionPolicy, OffloadPolicy, ShardingStrategy
from tests.common import device
from tests.device.programs import LOW, MIXED, shard_net, train_net
from tests.device.running import on_device

POLICIES: dict[str, dict[str, Any]] = {
    "same": {},
    "mixed": {"mp_policy": MIXED},
    "low": {"mp_policy": LOW},
    "wire": {"mp_policy": MixedPrecisionPolicy(gather_dtype=torch.int8)},
    "params on the host": {"offload_policy": OffloadPolicy(params=True), "mp_policy": LOW},
    "state on the host": {"offload_policy": OffloadPolicy(optim_state=True)},
    "row": {"granularity": "row"},
    "param": {"granularity": "param"},
    "bucket": {"bucket_cap_mb": 0.0005, "mp_policy": LOW},
    "kept": {"reshard_after_forward": False},
}


@on_device(num_ranks=2)
def _silent(strategy: ShardingStrategy) -> None:
    for options in POLICIES.values():
        train_net(shard_net(strategy=strategy, **options), num_steps=3)
        device.check_races()


@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_steps_have_no_races(strategy: ShardingStrategy) -> None:
    """Under each policy, over one group of ranks."""
    _silent(strategy=strategy)


@pytest.mark.long
@on_device(num_ranks=4)
def test_steps_with_replicas_have_no_races() -> None:
    """The second stage of reductions, put off in some microbatches; and a part that is kept."""
    mesh = init_device_mesh(device.NAME, (2, 2), mesh_dim_names=("replicate", "shard"))
    for strategy in ShardingStrategy:
        for policy, options in POLICIES.items():
            if strategy is ShardingStrategy.NO_SHARD and policy != "same":
                continue  # one group of ranks again
            train_net(shard_net(strategy=strategy, mesh=mesh, **options), microbatches=True)
            device.check_races()
    train_net(shard_net(mp_policy=LOW, reshard_after_forward=2))
    dist.barrier()
