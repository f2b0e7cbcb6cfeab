"""Parameters tied inside a unit, between units, and to the root."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_shard import fully_shard
from composable_shard.comm.trace import trace_events
from tests.harness.ranks import distributed
from tests.programs.models import Twins, assert_at_rest, rank_input, square_mean, train_by
from tests.programs.modules import TiedLanguage, rank_tokens


def _shard_language(model: nn.Module, units: tuple[str, ...], **options: Any) -> None:
    for unit in units:
        fully_shard(model.get_submodule(unit), **options)
    fully_shard(model, **options)


@pytest.mark.parametrize(
    "units",
    [
        ("blocks.0", "blocks.1"),
        ("embedding", "blocks.0", "blocks.1"),
        ("blocks.0", "head"),
        ("embedding", "blocks.0", "blocks.1", "head"),
        ("head", "blocks.1", "blocks.0", "embedding"),
    ],
)
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@distributed(2, on_device=True)
def test_tied_parameters(units: tuple[str, ...], reshard_after_forward: bool | None) -> None:
    """Inside a unit, between a unit and the root, between siblings, owner first or last."""
    twins = Twins(
        TiedLanguage, _shard_language, units=units, reshard_after_forward=reshard_after_forward
    )
    assert twins.sharded.head.weight is twins.sharded.embedding.weight
    train_by(twins, lambda step: lambda model: square_mean(model(rank_tokens(step))), steps=3)
    assert twins.sharded.head.weight is twins.sharded.embedding.weight
    assert_at_rest(twins.sharded, kept=twins.sharded_units(reshard_after_forward))


class _BorrowedOnly(nn.Module):
    """Two layers with one weight, so that the second unit has no parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5, bias=False)
        self.second = nn.Linear(5, 5, bias=False)
        self.first.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@distributed(2)
def test_a_unit_that_only_borrows_is_reached_twice_in_a_backward() -> None:
    """Its parameters' owner has ended and freed them between the two."""
    twins = Twins(_BorrowedOnly)
    for step in range(2):
        twins.step(
            lambda model, step=step: sum(
                model(rank_input(4, 5, step=2 * step + i)).square().mean() for i in range(2)
            )
        )
        for model in twins:
            model.zero_grad()
    assert_at_rest(twins.sharded)


@pytest.mark.fast
@distributed(2)
def test_collectives_of_parameters_tied_to_the_root() -> None:
    """The owner is gathered once for each pass and reduced once."""
    twins = Twins(TiedLanguage, _shard_language, units=("embedding",), reshard_after_forward=True)
    model = twins.sharded
    square_mean(model(rank_tokens(0))).backward()
    with trace_events() as events:
        square_mean(model(rank_tokens(0))).backward()
    names = [(event.kind, event.name) for event in events]
    assert names.count(("issue_gather", "embedding")) == 2
    assert names.count(("issue_reduce", "embedding")) == 1


@pytest.mark.parametrize("units", [("embedding", "head"), ("head", "embedding")])
@distributed(2)
def test_tied_parameter_of_a_unit_that_does_not_run(units: tuple[str, ...]) -> None:
    """The borrowing unit alone makes the gradient, and the owner alone does."""
    twins = Twins(TiedLanguage, _shard_language, units=units)
    for model in twins:
        model.head.bias.requires_grad_(True)
    twins.step(lambda model: square_mean(model.head(rank_input(4, 15))))
    twins.zero_grad()
    twins.step(lambda model: square_mean(model.embedding(rank_tokens(0))))
    twins.zero_grad()
    twins.step(lambda model: square_mean(model(rank_tokens(1))))
    assert_at_rest(twins.sharded)
