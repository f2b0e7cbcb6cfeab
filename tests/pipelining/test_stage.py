"""Sharded stages in the schedules of torch: by value, and what they send."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard import (
    ShardingStrategy,
    count_collectives,
    get_pending_gradients,
    no_sync,
    reduce_pending_gradients,
)
from tests.harness.ranks import distributed
from tests.harness.versions import needs_torch
from tests.programs.claims import assert_close, unsharded_gradients
from tests.programs.models import Layer, add_one, assert_at_rest, shard_children
from tests.programs.pipelines import (
    DIM,
    SCHEDULES,
    assert_pipeline_right,
    make_schedule,
    make_stages,
    pipeline_mesh,
    random_batch,
    run_schedule,
)

SENDS_TO_ITSELF = needs_torch("2.13", "before, torch sends to its own rank, which gloo refuses")


@pytest.mark.parametrize(
    ("name", "strategy", "keeps"),
    [
        ("1F1B", "FULL_SHARD", None),
        pytest.param("ZBVZeroBubble", "SHARD_OPTIM", None, marks=SENDS_TO_ITSELF),
        pytest.param("DualPipeV", "FULL_SHARD", False, marks=SENDS_TO_ITSELF),
    ],
)
@distributed(4)
def test_schedule_trains_as_one_process(name: str, strategy: str, keeps: bool | None) -> None:
    """Two stages or four, of two ranks each; `tests.programs.pipelines` runs the whole grid."""
    assert_pipeline_right(
        name, strategy=ShardingStrategy[strategy], reshard_after_forward=keeps, steps=2
    )


class _OneLayer(nn.Module):
    """Two units: a layer, and what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = Layer(DIM), nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x * self.scale))


def _make_step(
    name: str, num_microbatches: int = 8, *, scale_grads: bool = True, **options: Any
) -> tuple[Callable[[int], object], list[nn.Module]]:
    """Return a function that runs a step of a schedule, and the sharded stages of this rank."""
    mesh = pipeline_mesh(dist.get_world_size() // 2)
    torch.manual_seed(0)
    parts = [_OneLayer().double() for _ in range(2 * len(SCHEDULES[name][0]))]
    own = [parts[number] for number in SCHEDULES[name][mesh["pp"].get_local_rank()]]
    for part in own:
        shard_children(part, mesh=mesh["dp"], **options)
    stages = make_stages(parts, name, mesh)
    schedule = make_schedule(name, stages, num_microbatches, scale_grads=scale_grads)

    def run(step: int) -> None:
        batch = random_batch(mesh["dp"].get_local_rank(), step, num_microbatches)
        run_schedule(schedule, stages, batch)

    return run, own


@pytest.mark.parametrize(
    ("name", "keeps", "num_gathers", "num_reductions"),
    [
        ("1F1B", True, 18, 2),  # as FSDP2; 32 and 30 with torch's own stage
        ("1F1B", False, 2, 2),
        pytest.param("DualPipeV", False, 4, 4, marks=SENDS_TO_ITSELF),
    ],
)
@distributed(4)
def test_units_are_reduced_once_and_gathered_as_asked(
    name: str, keeps: bool | None, num_gathers: int, num_reductions: int
) -> None:
    """Of two units in each stage, with eight microbatches."""
    run, own = _make_step(name, reshard_after_forward=keeps)
    for step in range(2):
        run(step)
        for part in own:
            add_one(part)  # what was kept is of no use
            part.zero_grad()
    with count_collectives() as log:
        run(2)
    assert (log.count("all_gather"), log.count("reduce_scatter")) == (num_gathers, num_reductions)
    for part in own:
        assert_at_rest(part)


@pytest.mark.parametrize("name", ["InterleavedZeroBubble"])
@distributed(4)
def test_steps_under_no_sync_add_up(name: str) -> None:
    """They wait for the reduction that the next step makes, or that is asked for."""
    run, expected = _make_step(name, 4, scale_grads=False)
    for step in range(2):
        run(step)
    for is_asked_for in (False, True):
        run, own = _make_step(name, 4, scale_grads=False)
        with ExitStack() as stack:
            for part in own:
                stack.enter_context(no_sync(part))
            run(0)
            assert all(len(get_pending_gradients(part)) == 5 for part in own)
            if is_asked_for:
                run(1)
                for part in own:
                    reduce_pending_gradients(part)
        if not is_asked_for:
            run(1)
        for part, other in zip(own, expected, strict=True):
            found, sums = unsharded_gradients(part), unsharded_gradients(other)
            for key, value in sums.items():
                assert_close(found[key], value, key)
