"""A backward in two parts, as pipelines without bubbles run it; outputs that may be detached."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from composable_shard import ShardingStrategy
from tests import claims
from tests.helpers import distributed
from tests.models import Layer, rank_input, square_mean


class _HandsOn(nn.Module):
    """Returns what a unit inside has returned, and an input, beside a value of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()
        self.scale = nn.Parameter(torch.ones(15))

    def forward(self, x: Tensor, scalar: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inner = self.second(self.first(x * self.scale))
        return inner, torch.tanh(inner) * self.scale, scalar


@claims.variants
@distributed(2)
def test_c5_what_a_unit_hands_on_is_no_view(
    strategy: ShardingStrategy, use_orig_params: bool, accumulates: bool
) -> None:
    """Case 5: the output of an inner unit, or an input, is as detachable as in a plain module."""

    def program(model: nn.Module, number: int) -> None:
        x = rank_input(4, 15, step=number, dtype=torch.float64).requires_grad_()
        scalar = x.sum() * 2  # of no dimension
        kept = torch.tanh(scalar)
        inner, own, handed_on = model(x, scalar)
        assert handed_on is scalar
        # Saved before it was handed on, as input and as output: autograd finds nothing written.
        loss = square_mean(inner) + square_mean(own) + handed_on * scalar + kept
        loss.backward()
        for tensor in (inner, own, handed_on):
            tensor.detach_()
            assert not tensor.requires_grad

    claims.assert_right(
        _HandsOn,
        program,
        accumulates=accumulates,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )
