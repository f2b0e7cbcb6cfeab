"""A unit of several modules, of which any may run, in any order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from composable_shard import fully_shard
from composable_shard.comm.trace import count_collectives
from tests.harness.ranks import distributed
from tests.programs.models import (
    CheckpointsBlocks,
    Net,
    Twins,
    assert_at_rest,
    loss_of_shape,
    rank_input,
    square_mean,
    train_by,
)
from tests.programs.modules import SomeLayers, shard_pairs


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(2)
def test_unit_of_several_modules(reshard_after_forward: bool) -> None:
    """It is gathered once for all of them, and stays until the last has run."""
    twins = Twins(SomeLayers, shard_pairs, reshard_after_forward=reshard_after_forward)
    for step in range(2):
        with count_collectives() as counts:
            twins.step(loss_of_shape(4, 15, step=step))
        twins.zero_grad()
    assert counts.count("reduce_scatter") == 2
    assert_at_rest(twins.sharded, kept=twins.sharded_units(reshard_after_forward))


@distributed(2)
def test_only_some_modules_of_a_unit_run() -> None:
    """Any of them, in any order; what did not run gets no gradient."""
    twins = Twins(SomeLayers, shard_pairs)
    for used in ((0, 2), (1,), (3, 0), (0, 0, 1), (1, 2, 0, 3), ()):
        x = rank_input(4, 15).requires_grad_()
        twins.step(lambda model, used=used, x=x: square_mean(model(x, used)))
        twins.zero_grad()
        assert_at_rest(twins.sharded)


@pytest.mark.fast
@distributed(2)
def test_modules_of_a_unit_without_a_root() -> None:
    """Each call is led by the unit itself."""
    model = SomeLayers()
    twins = Twins(SomeLayers, lambda model: fully_shard(list(model.layers)))
    del model
    train_by(twins, lambda step: loss_of_shape(4, 15, step=step))
    twins.step(lambda model: square_mean(model(rank_input(4, 15), (2,))))
    assert_at_rest(twins.sharded)


class _Checkpointed(CheckpointsBlocks, Net):
    pass


def _shard_pairs_of_blocks(model: nn.Module) -> None:
    fully_shard(list(model.blocks[:2]))
    fully_shard(list(model.blocks[2:]))
    fully_shard(model)


@pytest.mark.parametrize("use_reentrant", [False, True])
@distributed(2)
def test_modules_of_a_unit_may_be_checkpointed_one_by_one(use_reentrant: bool) -> None:
    """Each is recomputed on its own, in the unit that is gathered once for all of them."""
    twins = Twins(lambda: _Checkpointed(4), _shard_pairs_of_blocks)
    for model in twins:
        model.use_reentrant = use_reentrant
    optimizers = twins.optimizers()
    for step in range(3):
        with count_collectives() as log:
            twins.step(loss_of_shape(4, 5, step=step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        twins.assert_equal_parameters()
    assert log.count("reduce_scatter") == 3
    assert_at_rest(twins.sharded)


class _Caller(nn.Module):
    """Calls a module of its own unit that is no child of it."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(15, 15)
        self.others = (other,)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.others[0](torch.tanh(self.linear(x)))))


class _WithCaller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(15, 15)
        self.caller = _Caller(self.inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.caller(x)


@distributed(2)
def test_module_that_calls_another_of_its_unit() -> None:
    """The call is still the caller's."""
    twins = Twins(_WithCaller, lambda model: fully_shard([model.caller, model.inner]))
    train_by(twins, lambda step: loss_of_shape(4, 15, step=step))
    assert_at_rest(twins.sharded)
