"""Interrupts of `reduce_pending_gradients`, at any line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from composable_shard import ShardingStrategy, no_sync, reduce_pending_gradients
from tests.harness.helpers import distributed
from tests.interrupts import Interrupter, without_lost_interrupts
from tests.programs.claims import assert_close, unsharded_gradients
from tests.programs.models import Net, average_gradients, rank_input, shard_blocks, square_mean


def _by_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def _by_module(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad()


def _parameter_by_parameter(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad = None


def _run_one_batch(model: nn.Module, number: int) -> None:
    square_mean(model(rank_input(3, 5, step=number, dtype=torch.float64))).backward()


@pytest.mark.parametrize("zero", [_by_optimizer, _by_module, _parameter_by_parameter])
@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@distributed(1)
def test_what_waits_is_dropped_after_an_interrupted_reduction(
    zero: Callable[[nn.Module, torch.optim.Optimizer], None], strategy: ShardingStrategy
) -> None:
    """By `zero_grad` in any form, or with the reduction."""
    torch.manual_seed(0)
    plain, model = Net().double(), Net().double()
    model.load_state_dict(plain.state_dict())
    shard_blocks(model, strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    _run_one_batch(plain, 1)
    average_gradients(plain.parameters())
    moment, step, has_ended = 1, 7, False
    while not has_ended:
        with no_sync(model):
            _run_one_batch(model, 0)
        interrupter = Interrupter(moment)
        try:
            with without_lost_interrupts(), interrupter.watching():
                reduce_pending_gradients(model)
            has_ended = True
        except KeyboardInterrupt:
            torch.set_grad_enabled(True)  # torch's own `no_grad` is not left in each line
        zero(model, optimizer)
        _run_one_batch(model, 1)
        for name, gradient in unsharded_gradients(model).items():
            expected = plain.get_parameter(name).grad
            assert_close(gradient, expected, f"{interrupter.place}: gradient of {name}")
        optimizer.zero_grad()
        moment += step
    assert moment > 20 * step
