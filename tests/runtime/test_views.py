"""Views of full values that autograd does not connect with the parameter, and kept ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import claims
from tests.helpers import distributed
from tests.models import rank_input
from tests.pairs import pairwise

DETACHED: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed detach": lambda weight: weight.t().detach(),
    "transposed data": lambda weight: weight.t().data,
    "sliced data": lambda weight: weight[:].data.t(),
    "no_grad": torch.no_grad()(lambda weight: weight.t()),
}


class ReadsDetached(nn.Module):
    """Multiplies by a detached view of its weight, then by the weight, whose gradient comes first.

    Args:
        form: Of the view.
        first: From which forward on.
    """

    def __init__(self, form: str, first: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) / 6)
        self.form, self.first, self.number = form, first, -1

    def forward(self, x: Tensor) -> Tensor:
        """Read the weight twice."""
        self.number += 1
        if self.number >= self.first:
            x = torch.tanh(x @ DETACHED[self.form](self.weight))
        return F.linear(x, self.weight)


def _run_and_square(model: nn.Module, number: int) -> None:
    model(rank_input(4, 6, step=number, dtype=torch.float64)).square().mean().backward()


@pytest.mark.parametrize(
    *pairwise(
        form=list(DETACHED),
        first=[0, 1, 4],
        use_orig_params=[True, False],
        accumulates=[False, True],
    )
)
@distributed(2)
def test_c17_detached_view_of_a_weight(
    form: str, first: int, use_orig_params: bool, accumulates: bool
) -> None:
    """C17: read after the weight's gradient is complete, and could have taken its place."""
    claims.assert_right(
        lambda: nn.Sequential(nn.Linear(6, 6), ReadsDetached(form, first), nn.Linear(6, 6)),
        _run_and_square,
        use_orig_params=use_orig_params,
        accumulates=accumulates,
        steps=6 if first else 3,
    )
