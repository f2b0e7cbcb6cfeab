"""All ranks have written parameters, or none has, or the next backward says so."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_shard import ShardingStrategy, fully_shard
from tests import differences
from tests.helpers import distributed
from tests.models import rank_input


@pytest.mark.parametrize(
    ("name", "strategy", "text"),
    [
        ("step_twice", "NO_SHARD", r"backward with writes .*, 2[0-9] of them"),
        ("write_a_parameter", "NO_SHARD/whole", r"backward with writes .*, 13 of them"),
        ("no_step", "SHARD_GRAD_OP/whole", "rank 1 is in a backward without writes"),
        ("no_zero_grad", "SHARD_OPTIM", "and with gradients of earlier ones"),
    ],
)
@distributed(2)
def test_l_alone_writes_of_one_rank_are_named(name: str, strategy: str, text: str) -> None:
    """Alone: a step or an edit on one rank, or gradients that one has left."""
    with pytest.raises(RuntimeError, match=text) as caught:
        differences.train(name, strategy)
    assert "rank 0 is in a backward" in str(caught.value)


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
