"""The library waits for what must be waited for: its steps have no races on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_shard import (
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    clip_grad_norm_,
    no_sync,
    set_requires_all_reduce,
)
from tests import device
from tests.device.running import on_device
from tests.models import Net, shard_blocks, shard_root

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LOW = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
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


def shard_waiting(policy: str, **options: Any) -> nn.Module:
    """Return a model on the device, each block a unit of its own unless units are buckets."""
    torch.manual_seed(0)
    given = POLICIES[policy] | options
    model = Net(2)
    if "offload_policy" not in given:
        model.to(device.NAME)
    shard = shard_root if policy == "bucket" else shard_blocks
    shard(model, **given)
    return model


def train_waiting(model: nn.Module, *, num_steps: int, microbatches: bool = False) -> None:
    """Take clipped steps; with microbatches, those before the last put reductions off."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    for _ in range(num_steps):
        if microbatches:
            set_requires_all_reduce(model, False)
            _backward_waits(model)
            set_requires_all_reduce(model, True)
            with no_sync(model):
                _backward_waits(model)
        _backward_waits(model)
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _backward_waits(model: nn.Module) -> None:
    x = torch.randn(3, 5, device=device.NAME)
    model(x).float().square().mean().backward()


@on_device(num_ranks=2)
def _silent(strategy: ShardingStrategy) -> None:
    for policy in POLICIES:
        train_waiting(shard_waiting(policy, strategy=strategy), num_steps=3)
        device.check_races()


@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_steps_have_no_races(strategy: ShardingStrategy) -> None:
    """Under each policy, over one group of ranks."""
    _silent(strategy=strategy)


@on_device(num_ranks=4)
def test_steps_with_replicas_have_no_races() -> None:
    """The second stage of reductions, put off in some microbatches; and a part that is kept."""
    mesh = init_device_mesh(device.NAME, (2, 2), mesh_dim_names=("replicate", "shard"))
    for strategy in ShardingStrategy:
        for policy in POLICIES:
            if strategy is ShardingStrategy.NO_SHARD and policy != "same":
                continue  # one group of ranks again
            model = shard_waiting(policy, strategy=strategy, mesh=mesh)
            train_waiting(model, num_steps=2, microbatches=True)
            device.check_races()
    train_waiting(shard_waiting("low", reshard_after_forward=2), num_steps=2)
    dist.barrier()
