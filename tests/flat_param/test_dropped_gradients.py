"""`param.grad = None` while modules show full parameters, whose gradients are at rest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from composable_shard import ShardingStrategy, no_sync, reshard, unshard
from tests.harness.helpers import distributed
from tests.programs.claims import assert_close, strategies, unsharded_gradients
from tests.programs.models import (
    Net,
    average_gradients,
    rank_input,
    shard_blocks,
    square_mean,
)


def _drop(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


def _after_an_interrupt(model: nn.Module, run: Callable[[int], None]) -> None:
    """Interrupt a forward, which leaves full parameters; drop; run on."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.blocks[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(1)
    handle.remove()
    _drop(model)
    run(2)


def _between_unshard_and_reshard(model: nn.Module, run: Callable[[int], None]) -> None:
    unshard(model, recurse=True)
    run(1)
    _drop(model)
    run(2)
    reshard(model, recurse=True)


@pytest.mark.parametrize("program", [_after_an_interrupt, _between_unshard_and_reshard])
@pytest.mark.parametrize("accumulates", [False, True])
@strategies
@distributed(1, 2)
def test_what_a_full_parameter_drops_is_dropped_at_rest(
    program: Callable[[nn.Module, Callable[[int], None]], None],
    accumulates: bool,
    strategy: ShardingStrategy,
    use_orig_params: bool,
) -> None:
    """Also what waits from a microbatch under no_sync; the gradient is the last call's alone."""
    torch.manual_seed(0)
    model = Net().double()
    plain = copy.deepcopy(model)
    shard_blocks(model, strategy=strategy, use_orig_params=use_orig_params)

    def run(number: int) -> None:
        x = rank_input(3, 5, step=number, dtype=torch.float64)
        square_mean(model(x)).backward()

    with no_sync(model) if accumulates else nullcontext():
        run(0)
    program(model, run)
    square_mean(plain(rank_input(3, 5, step=2, dtype=torch.float64))).backward()
    average_gradients(plain.parameters())
    found = unsharded_gradients(model)
    for name, param in plain.named_parameters():
        assert_close(found[name], param.grad, f"gradient of {name}")
