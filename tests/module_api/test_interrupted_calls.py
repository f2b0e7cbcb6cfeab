"""Interrupts of functions that users call between steps, at any line."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import nn

from composable_shard import (
    ShardingStrategy,
    fully_shard,
    no_sync,
    reduce_pending_gradients,
    unshard_params,
)
from tests.harness.ranks import distributed
from tests.interrupts import Interrupter, without_lost_interrupts
from tests.programs.claims import assert_close, unsharded_gradients
from tests.programs.models import (
    Net,
    average_gradients,
    rank_input,
    shard_blocks,
    shard_children,
    square_mean,
)


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


#: Lines at which nothing of `close` has run: the scope stays open, and a training forward says so.
_BEFORE = ("unshard_params", "FullParamsScope.close", "FullParamsScope._restore")


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@distributed(1)
def test_an_interrupt_at_the_end_of_a_scope_leaves_the_model_right(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """State dict in the handler, values and gradients of the next step."""
    torch.manual_seed(0)
    plain = Net(num_blocks=1).double()
    x = rank_input(3, 5, dtype=torch.float64)
    square_mean(plain(x)).backward()
    moment, step, num_open, has_ended = 1, 7, 0, False
    while not has_ended:
        model = Net(num_blocks=1).double()
        model.load_state_dict(plain.state_dict())
        shard_blocks(model, strategy=strategy, use_orig_params=use_orig_params)
        scope = unshard_params(model)
        scope.__enter__()
        interrupter = Interrupter(moment)
        moment += step
        try:
            with without_lost_interrupts(), interrupter.watching():
                scope.__exit__(None, None, None)
            has_ended = True
        except KeyboardInterrupt:
            torch.set_grad_enabled(True)
        del scope
        if use_orig_params:
            assert model.state_dict().keys() == plain.state_dict().keys(), interrupter.place
        try:
            square_mean(model(x)).backward()
        except RuntimeError as error:
            assert "inside unshard_params" in str(error), interrupter.place  # noqa: PT017
            assert interrupter.place.endswith(_BEFORE)
            num_open += 1
            continue
        for name, gradient in unsharded_gradients(model).items():
            assert_close(gradient, plain.get_parameter(name).grad, f"{interrupter.place}: {name}")
    assert num_open <= len(_BEFORE) < moment // step // 9


@distributed(1)
def test_an_interrupt_while_modules_are_noted_leaves_changes_seen() -> None:
    """In the first forward: what is added later is refused all the same."""

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        shard_children(model)
        return model

    def forward(model: nn.Module, moment: int) -> Interrupter:
        interrupter = Interrupter(moment)
        with without_lost_interrupts(), suppress(KeyboardInterrupt), interrupter.watching():
            model(rank_input(3, 5))
        return interrupter

    found = forward(make(), 0).moments
    moments = [each for place in found if "_watch" in place for each in found[place]]
    assert moments
    for moment in moments:
        model = make()
        assert "_watch" in forward(model, moment).place
        model(rank_input(3, 5))
        model[0].lora = nn.Linear(5, 5)
        with pytest.raises(RuntimeError, match="no unit manages the trainable parameters"):
            model(rank_input(3, 5))


def _run_blocks(blocks: nn.ModuleList, number: int) -> None:
    x = rank_input(3, 5, step=number, dtype=torch.float64)
    for block in blocks:
        x = torch.tanh(block(x))
    square_mean(x).backward()


def _replace_layer(blocks: nn.ModuleList) -> nn.Module:
    """Give a block another inner layer, and return it."""
    torch.manual_seed(1)
    del blocks[1][1]
    blocks[1].append(nn.Linear(5, 5).double())
    return blocks[1][1]  # type: ignore[no-any-return, index] # of nn.Sequential


@distributed(1)
def test_an_interrupt_while_trees_join_leaves_gradients_right() -> None:
    """Two blocks without a root that share a weight, one of which is rebuilt with a new unit."""

    def make() -> tuple[nn.ModuleList, nn.ModuleList]:
        torch.manual_seed(0)
        plain = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)) for _ in range(2))
        plain[1][0].weight = plain[0][0].weight  # type: ignore[index]
        plain.double()
        blocks = copy.deepcopy(plain)
        for block in blocks:
            fully_shard(block)
        _run_blocks(blocks, 0)
        for each in (plain, blocks):
            layer = _replace_layer(each)
            each.zero_grad()
        fully_shard(layer)
        return plain, blocks

    def interrupt(blocks: nn.ModuleList, moment: int) -> Interrupter:
        interrupter = Interrupter(moment)
        with without_lost_interrupts(), suppress(KeyboardInterrupt), interrupter.watching():
            _run_blocks(blocks, 1)
        blocks.zero_grad()
        return interrupter

    found = interrupt(make()[1], 0).moments
    moments = [each for place in found if "take_over" in place for each in found[place]]
    assert moments
    for moment in range(min(moments), max(moments) + 2):
        plain, blocks = make()
        place = interrupt(blocks, moment).place
        _run_blocks(plain, 2)
        _run_blocks(blocks, 2)
        for name, gradient in unsharded_gradients(blocks).items():
            assert_close(gradient, plain.get_parameter(name).grad, f"{place}: {name}")
