"""A step of the optimizer that one rank leaves out, before backwards that communicate nothing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_shard import ShardingStrategy, no_sync
from tests.harness.ranks import distributed
from tests.programs.models import shard_children


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@distributed(2)
def test_missed_step_before_no_sync_is_named(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """A backward under no_sync compares nothing, so it leaves the facts to the next one.

    Under the other strategies the next forward raises: one rank gathers alone.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    shard_children(model, strategy=strategy, use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def accumulate() -> None:
        with no_sync(model):
            model(torch.ones(2, 4)).sum().backward()
        model(torch.ones(2, 4)).sum().backward()

    for step in range(2):
        accumulate()
        if step == 0 or dist.get_rank() == 0:
            optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"not in step: .* a backward that came after . steps"):
        accumulate()
