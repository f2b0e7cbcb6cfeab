"""Side streams: nothing is read, written or reused before those who use it are done."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable_shard import (
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    clip_grad_norm_,
    fully_shard,
    no_sync,
    reshard,
    set_requires_all_reduce,
    unshard,
)
from tests.models import Net, loss_of, shard_blocks, shard_root
from tests.stream_account import StreamAccount

FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM, NO_SHARD = ShardingStrategy
SAME = MixedPrecisionPolicy()
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LOW = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
WIRE = MixedPrecisionPolicy(gather_dtype=torch.int8)


def _train_clipped(model: nn.Module, *, microbatches: bool) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    for _ in range(2):
        if microbatches:
            set_requires_all_reduce(model, False)
            loss_of(model).backward()
            set_requires_all_reduce(model, True)
            with no_sync(model):
                loss_of(model).backward()
        loss_of(model).backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _check_no_races(
    monkeypatch: pytest.MonkeyPatch,
    train: Callable[[nn.Module], None],
    shard: Callable[..., None] = shard_blocks,
    **options: Any,
) -> None:
    torch.manual_seed(0)
    account = StreamAccount()
    model = Net(2)
    with account.taking_over(monkeypatch):
        shard(model, **options)
        train(model)
    assert account.races == []
    assert account.reduce.clock


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    ("strategy", "policy"),
    [
        (FULL_SHARD, SAME),
        (FULL_SHARD, MIXED),
        (FULL_SHARD, LOW),
        (FULL_SHARD, WIRE),
        (SHARD_GRAD_OP, LOW),
        (SHARD_OPTIM, MIXED),
        (NO_SHARD, MIXED),
    ],
)
def test_streams_wait_for_one_another(
    strategy: ShardingStrategy, policy: MixedPrecisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over one group of ranks."""
    train = partial(_train_clipped, microbatches=False)
    _check_no_races(monkeypatch, train, strategy=strategy, mp_policy=policy)


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    ("strategy", "policy"),
    [(FULL_SHARD, SAME), (FULL_SHARD, LOW), (SHARD_GRAD_OP, MIXED), (SHARD_OPTIM, SAME)],
)
def test_streams_wait_for_the_second_stage(
    strategy: ShardingStrategy, policy: MixedPrecisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards have copies, and microbatches put the all-reduce off."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    train = partial(_train_clipped, microbatches=True)
    _check_no_races(monkeypatch, train, mesh=mesh, strategy=strategy, mp_policy=policy)


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    ("shard", "options"),
    [
        (shard_blocks, {"reshard_after_forward": 2}),
        (shard_blocks, {"granularity": "row"}),
        (shard_root, {"bucket_cap_mb": 0.0005}),
        (shard_blocks, {"offload_policy": OffloadPolicy(params=True)}),
        (shard_blocks, {"offload_policy": OffloadPolicy(optim_state=True)}),
    ],
)
def test_streams_wait_where_units_differ(
    shard: Callable[..., None], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part kept between forward and backward, uneven shards, buckets, host memory."""
    train = partial(_train_clipped, microbatches=False)
    _check_no_races(monkeypatch, train, shard, mp_policy=LOW, **options)


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("policy", [SAME, LOW])
def test_streams_wait_after_a_failed_backward(
    policy: MixedPrecisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reductions may still run when their buffers are given up."""

    def train(model: nn.Module) -> None:
        def fail(*_: object) -> None:
            raise ZeroDivisionError

        for _ in range(2):
            hook = model.blocks[0].register_full_backward_hook(fail)
            with pytest.raises(ZeroDivisionError):
                loss_of(model).backward()
            hook.remove()
        loss_of(model).backward()

    _check_no_races(monkeypatch, train, mp_policy=policy)


@pytest.mark.fast
@pytest.mark.usefixtures("four_ranks")
def test_a_write_beside_a_gather_is_gathered_again() -> None:
    """A step between `unshard(async_op=True)` and its `wait()`."""
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model)
    work = unshard(model, async_op=True)
    assert work is not None
    with torch.no_grad():
        model.weight.fill_(2.0)
    work.wait()
    assert torch.equal(model.weight, torch.full((4, 4), 2.0))
    reshard(model)
