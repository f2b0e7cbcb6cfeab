"""Parameters that ranks share are written equally often, or the next backward says so."""

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
    ("name", "strategy"),
    [
        ("step_twice", "FULL_SHARD/collective"),  # with hooks on gradients
        ("step_twice", "NO_SHARD"),
        ("write_a_parameter", "FULL_SHARD"),
        ("write_a_parameter", "NO_SHARD"),
    ],
)
def test_l_alone_writes_of_one_rank_are_named(name: str, strategy: str) -> None:
    """Alone: an optimizer step, or an edit, on one rank; both trained on with other weights."""
    cell = differences.measure(name, strategy, timeout_s=20)
    assert cell.kind == "error", cell
    assert "rank 0 is in a backward after " in cell.texts[0]
    assert "rank 1 is in a backward after " in cell.texts[0]


@pytest.mark.parametrize(
    ("name", "strategy", "text"),
    [
        ("step_twice", "FULL_SHARD/whole", "rank 1 is in a backward after 2 steps of the optim"),
        ("no_step", "SHARD_GRAD_OP/whole", "rank 1 is in a backward after 0 steps of the optim"),
        ("no_zero_grad", "SHARD_OPTIM/whole", "rank 1 is in a backward after a step whose gradi"),
        ("no_zero_grad", "FULL_SHARD/whole/flat", "had an earlier gradient"),
        ("write_a_parameter", "NO_SHARD/whole", "rank 1 is in a backward after 3 writes to"),
    ],
)
@distributed(2)
def test_l_alone_steps_of_owners_are_compared(name: str, strategy: str, text: str) -> None:
    """Alone: whole parameters, each of which only its owner writes."""
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
