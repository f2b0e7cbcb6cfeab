"""All ranks have written parameters, or none has, or the next backward says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_shard import ShardingStrategy, fully_shard
from tests import differences
from tests.harness.assertions import Planned
from tests.harness.ranks import distributed
from tests.programs.models import rank_input


@pytest.mark.parametrize(
    ("name", "strategy", "text"),
    [
        ("step_twice", "FULL_SHARD", "rank 1 is in a backward that came after 2 steps of"),
        ("step_twice", "SHARD_OPTIM/whole", "rank 1 is in a backward that came after 2 steps of"),
        ("write_a_parameter", "FULL_SHARD/flat", "rank 1 is in .* 1 steps .* with edits"),
        ("write_a_parameter", "NO_SHARD/whole", "with edits .*, 13 writes,"),
        ("no_step", "SHARD_GRAD_OP/whole", "rank 1 is in a backward that came after 0 steps"),
        ("no_zero_grad", "SHARD_OPTIM", "and with gradients of earlier ones"),
    ],
)
@distributed(2)
def test_alone_writes_of_one_rank_are_named(name: str, strategy: str, text: str) -> None:
    """Alone: a step or an edit on one rank, or gradients that one has left."""
    with pytest.raises(RuntimeError, match=text) as caught:
        differences.train(name, strategy)
    assert "rank 0 is in a backward" in str(caught.value)


class _FailingSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise Planned


@pytest.mark.parametrize("kept", ["optimizer", "error"])
@distributed(2)
def test_an_edit_after_a_step_that_failed_is_an_edit_on_all_ranks(kept: str) -> None:
    """Even if one rank alone keeps the optimizer of that step, or its error with the frames."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4))
    model(rank_input(2, 4)).sum().backward()
    optimizer: Any = _FailingSGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    error: Planned | None = None
    try:
        optimizer.step()
    except Planned as caught:
        error = caught
    assert error is not None
    if dist.get_rank() == 1 and kept == "optimizer":
        del optimizer
    if dist.get_rank() == 1 or kept == "optimizer":
        error = None
    for _ in range(2):
        with torch.no_grad():
            model.weight.mul_(1.0)
        model(rank_input(2, 4)).sum().backward()


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@pytest.mark.parametrize("granularity", ["element", "param"])
@distributed(2, 3)
def test_optimizers_may_leave_out_empty_shards(
    world_size: int,
    granularity: str,
    strategy: ShardingStrategy,
    foreach: bool,
    use_orig_params: bool,
) -> None:
    """They write to other parameters on each rank, in groups that are written differently often."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3), nn.LayerNorm(3))
    options = {"strategy": strategy, "granularity": granularity}
    fully_shard([model[0], model[1]], use_orig_params=use_orig_params, **options)
    fully_shard(model, use_orig_params=use_orig_params, **options)
    params = [param for param in model.parameters() if param.to_local().numel()]
    groups = [
        {"params": [param for param in params if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([each for each in groups if each["params"]], foreach=foreach)
    assert world_size == dist.get_world_size()
    for _ in range(3):
        model(rank_input(4, 7)).square().mean().backward()
        optimizer.step()
        model.zero_grad()


@pytest.mark.parametrize("granularity", ["element", "param"])
@distributed(3)
def test_ranks_may_step_and_edit_what_they_hold(granularity: str) -> None:
    """Optimizers that a rank does not have, two steps in a row, edits of tiny parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 12), nn.LayerNorm(12), nn.Linear(12, 3), nn.PReLU(1))
    fully_shard(model, granularity=granularity)
    params = [param for param in model.parameters() if param.to_local().numel()]
    kinds = [[p for p in params if p.ndim > 1], [p for p in params if p.ndim < 2]]
    optimizers = [torch.optim.SGD(kind, lr=0.1) for kind in kinds if kind]
    found = [None] * 3
    dist.all_gather_object(found, [bool(kind) for kind in kinds])
    assert not all(map(all, found))
    for number in range(4):
        model(rank_input(4, 7, step=number)).square().mean().backward()
        for optimizer in optimizers * (1 + number % 2):
            optimizer.step()
        if number > 1:
            with torch.no_grad():
                model[3].weight.clamp_(0.5, 1.5)
        model.zero_grad()
    assert model[3].weight.full_tensor() == 0.5
