"""Gradients that are reduced in an agreed order, whichever order the ranks run their units in."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from composable_shard import ShardingStrategy, fully_shard
from composable_shard.comm.trace import trace_events
from tests import differences
from tests.differences import Chain, Run
from tests.harness.ranks import distributed

KEPT = [ShardingStrategy.SHARD_OPTIM, ShardingStrategy.NO_SHARD]
ORDERS = [
    "swap_equal_units",
    "swap_unequal_units",
    "swap_for_good",
    "reverse_all_units",
    "skip_a_unit",
    "skip_the_first_unit",
    "skip_the_wide_unit",
    "skip_all_units",
    "skip_different_units",
    "repeat_a_unit",
    "repeat_for_another",
    "no_module_of_a_unit",
    "unequal_modules_of_a_unit",
    "modules_of_a_wide_unit_around_another",
    "extra_forward",
    "extra_evaluation",
    "evaluation_after_the_step",
    "forward_of_one_unit",
    "checkpointing",
]


@pytest.mark.parametrize("strategy", ["SHARD_OPTIM", "NO_SHARD", "SHARD_OPTIM/buckets"])
@distributed(2)
def test_order_of_kept_gradients_is_not_the_forwards(strategy: str) -> None:
    """Order: the values of DistributedDataParallel, whatever one rank runs, and how often."""
    wrong = [name for name in ORDERS if not differences.train(name, strategy)]
    assert not wrong


@distributed(2)
def test_order_in_which_buckets_of_one_unit_fill_is_not_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Order: a model in one call, as under DistributedDataParallel."""
    for name in ORDERS:
        as_one_unit = replace(differences.DIFFERENCES[name], units=())
        monkeypatch.setitem(differences.DIFFERENCES, name, as_one_unit)
    wrong = [name for name in ORDERS if not differences.train(name, "NO_SHARD/buckets")]
    assert not wrong


def _sharded_run(strategy: ShardingStrategy) -> Run:
    model = Chain()
    for block in model.blocks:
        fully_shard(block, strategy=strategy)
    fully_shard(model, strategy=strategy)
    return Run(model, dist.get_rank())


def _reductions(run: Run) -> list[str]:
    with trace_events() as events:
        run.step()
    return [event.name for event in events if event.kind == "issue_reduce"]


@pytest.mark.parametrize("strategy", KEPT)
@distributed(2)
def test_an_order_that_all_ranks_have_is_taken_over(strategy: ShardingStrategy) -> None:
    """The first backward in another order waits for the order of before; the next one does not."""
    run = _sharded_run(strategy)
    usual = ["blocks.3", "blocks.2", "blocks.1", "blocks.0", "Chain"]
    assert _reductions(run) == usual
    run.model.order = [2, 0, 3, 1]
    assert _reductions(run) == usual
    assert _reductions(run) == ["blocks.1", "blocks.3", "blocks.0", "blocks.2", "Chain"]


@distributed(2)
def test_units_that_no_rank_uses_are_soon_left_out() -> None:
    """After two backwards without them; one that comes back is reduced at the backward's end."""
    run = _sharded_run(ShardingStrategy.NO_SHARD)
    run.step()
    run.model.order = [0, 1, 3]
    assert [len(_reductions(run)) for _ in range(4)] == [5, 5, 4, 4]
    run.model.order = [0, 1, 2, 3]
    assert _reductions(run) == ["blocks.3", "blocks.1", "blocks.0", "Chain", "blocks.2"]
