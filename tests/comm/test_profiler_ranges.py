"""What profilers see of a step, and that nobody pays for it otherwise."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from composable_shard import ShardingStrategy
from composable_shard.comm import count_collectives, devices
from composable_shard.flat_param.full_values import FullValues
from tests.harness.ranks import distributed
from tests.programs.models import loss_of, make_net


@pytest.mark.counts
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@distributed(2)
def test_profiles_have_ranges_with_names(strategy: str) -> None:
    """Of each gather and reduction, by the unit's FQN; the methods are the plain ones after it."""
    model = make_net(2, strategy=ShardingStrategy[strategy])
    loss_of(model, 0).backward()
    plain = FullValues.gather
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss_of(model, 1).backward()
        assert FullValues.gather is not plain
    counts = {event.key: event.count for event in profiler.key_averages()}
    units = ["blocks.0", "blocks.1", "Net"]
    if strategy == "FULL_SHARD":
        assert [counts[f"all_gather {name}"] for name in units] == [2, 2, 1]
        assert [counts[f"reduce_scatter {name}"] for name in units] == [1, 1, 1]
        assert {f"wait all_gather {name}" for name in units} <= counts.keys()
        assert {f"wait reduce_scatter {name}" for name in units} <= counts.keys()
    else:
        assert [counts[f"all_reduce {name}"] for name in units] == [1, 1, 1]
        assert not any("gather" in key for key in counts)
    with torch.no_grad():
        loss_of(model, 2)
    assert FullValues.gather is plain


@pytest.mark.parametrize("by_messages", [True, False])
@distributed(2)
def test_comm_debug_mode_sees_the_backends_collectives(by_messages: bool) -> None:
    """On gloo shards travel as messages, which it does not count; `count_collectives` does."""
    from torch.distributed.tensor.debug import CommDebugMode  # noqa: PLC0415 -- and the compiler

    with pytest.MonkeyPatch.context() as patch:
        if not by_messages:
            patch.setattr(devices, "MAX_EXCHANGE_SIZE", 0)
        model = make_net()
        with torch.no_grad():
            loss_of(model)
            with CommDebugMode() as mode, count_collectives() as log:
                loss_of(model)
    counts = {str(op).rpartition(".")[2]: number for op, number in mode.comm_counts.items()}
    gathers = [number for name, number in counts.items() if "gather" in name]
    assert sum(gathers) == (0 if by_messages else log.count("all_gather"))
    assert log.count("all_gather") == 4
