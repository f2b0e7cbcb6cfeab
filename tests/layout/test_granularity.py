"""Granularities: what may be cut where, and that training does not depend on it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_shard import Block, ShardingStrategy, fully_shard, get_handles, unshard_params
from tests.harness.ranks import distributed
from tests.programs.models import (
    Net,
    Twins,
    assert_at_rest,
    assert_is_slice,
    every_granularity,
    loss_of,
    shard_blocks,
)

GRANULARITIES: dict[str, Any] = {
    "row": "row",
    "block": Block(16),
    "large blocks": Block(64),
    "param": "param",
    "mixed": every_granularity,
}


FULL = ShardingStrategy.FULL_SHARD
CASES = [("block", FULL), ("large blocks", FULL), ("mixed", ShardingStrategy.NO_SHARD)]
CASES += [
    (granularity, strategy)
    for granularity in ("row", "param", "mixed")
    for strategy in (FULL, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.SHARD_OPTIM)
]


@pytest.mark.parametrize(
    ("granularity", "strategy", "world_size"),
    [(*case, 2 + index % 2) for index, case in enumerate(CASES)],
)
@distributed()
def test_training_equals_the_unsharded_model(granularity: str, strategy: ShardingStrategy) -> None:
    """Losses, gradients and parameters over four AdamW steps, and no shard that cuts a block."""
    shard = partial(shard_blocks, strategy=strategy, granularity=GRANULARITIES[granularity])
    twins = Twins(Net, shard)
    optimizers = twins.optimizers(torch.optim.AdamW)
    for step in range(4):
        twins.step(partial(loss_of, step=step))
        for each in optimizers:
            each.step()
            each.zero_grad()
        twins.assert_equal_parameters()
    assert_at_rest(twins.sharded)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@distributed(2, 3)
def test_full_parameters_are_shown_and_written_back(granularity: str) -> None:
    """Every way into a scope and out of it."""
    twins = Twins(Net, partial(shard_blocks, granularity=GRANULARITIES[granularity]))
    for options in ({}, {"rank0_only": True}, {"offload_to_cpu": True, "rank0_only": True}):
        with unshard_params(twins.sharded, **options), torch.no_grad():
            if dist.get_rank() == 0 or "rank0_only" not in options:
                for param in twins.sharded.parameters():
                    param.neg_()
        for param in twins.plain.parameters():
            param.data.neg_()
        twins.assert_equal_parameters()
    twins.step(loss_of)


@pytest.mark.fast
@pytest.mark.parametrize("value", ["rows", 3, None, Block, {"row"}], ids=str)
@distributed(1)
def test_other_values_raise(value: object) -> None:
    """The message lists what is possible; nothing is changed."""
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match='expected granularity to be "element", "row", "param"'):
        fully_shard(model, granularity=value)
    assert type(model.weight) is nn.Parameter


@distributed(2)
def test_function_that_returns_something_else_raises() -> None:
    """The message names the parameter."""
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="got 'rows' for 'weight'"):
        fully_shard(model, granularity=lambda param: "rows")
    assert type(model.weight) is nn.Parameter


@distributed(2, 3)
def test_rows_and_blocks_stay_whole() -> None:
    """No rank holds a part of a row, or of a block."""
    for granularity, numel in (("row", 7), (Block(10), 10)):
        model = nn.Linear(7, 9, bias=False)
        full = model.weight.detach().clone()
        fully_shard(model, granularity=granularity)
        (handle,) = get_handles(model)
        spec = handle.entries[0].spec
        for rank in range(spec.world_size):
            start, end = spec.range_of(rank)
            assert start % numel == 0
            assert end % numel == 0 or end == 63
        assert_is_slice(model.weight, full)
