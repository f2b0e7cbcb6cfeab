"""Views of full values that autograd does not connect with the parameter, and kept ones."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composable_shard import ShardingStrategy, fully_shard, get_handles, reshard, unshard
from tests.harness.pairs import pairwise
from tests.harness.ranks import distributed
from tests.programs import claims
from tests.programs.models import rank_input

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


# --- Views that a forward keeps ---


class Keeps(nn.Module):
    """Keeps something of its weight: `kept` is what `take` returns for the weight."""

    def __init__(self, take: Callable[[Keeps, Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) / 6)
        self.take = take
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the weight."""
        self.kept = self.take(self, self.weight)
        return F.linear(x, self.weight)


def _in_buffer(module: nn.Module, weight: Tensor) -> Tensor:
    module.register_buffer("cache", weight.detach().t())
    return module.get_buffer("cache")


KEEPING: dict[str, Callable[[Keeps, Tensor], Any]] = {
    "view": lambda _, weight: weight.t(),
    "list": lambda _, weight: [weight[1:]],
    "buffer": _in_buffer,
}


def _view_of(module: Keeps) -> Tensor:
    kept = module.kept
    view: Tensor = kept[0] if isinstance(kept, list) else kept
    return view


def _sharded_with(take: Callable[[Keeps, Tensor], Any], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Keeps(take)).double()
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


@pytest.mark.parametrize("form", KEEPING)
@pytest.mark.parametrize("first", [0, 4])
@distributed(2)
def test_c16_kept_view_is_refused_by_name(form: str, first: int) -> None:
    """C16: by each forward that keeps it; to read it may crash the process. Then all is right."""
    model = _sharded_with(lambda module, weight: None)
    x = rank_input(4, 6, dtype=torch.float64)
    for _ in range(first):
        model(x).square().mean().backward()

    def take(module: Keeps, weight: Tensor) -> Any:
        _ = weight.sum()  # a loss that is not used, for one
        return KEEPING[form](module, weight)

    model[1].take = take
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"forward of unit '1' keeps views.*\(\d, 6\)"):
            model(x)
    model[1].take = lambda module, weight: KEEPING[form](module, weight.clone())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).square().mean().backward()


def _uses_kept_view(model: nn.Module, number: int) -> None:
    if get_handles(model):
        unshard(model[1])
    y = model(rank_input(4, 6, step=number, dtype=torch.float64))
    ((model[1].kept * torch.arange(6)).sum() + y.square().mean()).backward()
    if get_handles(model):
        reshard(model[1])


@claims.variants
@distributed(2)
def test_c16_kept_view_is_right_after_unshard(
    strategy: ShardingStrategy, use_orig_params: bool, accumulates: bool
) -> None:
    """C16: the remedy that the error names."""
    claims.assert_right(
        lambda: nn.Sequential(nn.Linear(6, 6), Keeps(KEEPING["view"])),
        _uses_kept_view,
        strategy=strategy,
        use_orig_params=use_orig_params,
        accumulates=accumulates,
    )


class _HoldsView(torch.autograd.Function):
    """Holds a view without `save_for_backward`, as functions for quantised weights do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight, ctx.x = weight, x.detach()
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad @ ctx.weight.t(), ctx.x.t() @ grad


class _WithFunction(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _HoldsView.apply(x, self.weight.t())
        return y


@distributed(2)
def test_c16_view_in_the_context_of_a_function_keeps_nothing() -> None:
    """C16: it is read in the backward, when the values are there again."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        claims.assert_right(
            lambda: nn.Sequential(nn.Linear(6, 6), _WithFunction(6, 6, bias=False)),
            _run_and_square,
        )


@distributed(2)
def test_c16_parameter_made_of_full_values_is_refused() -> None:
    """C16: torch's own text names neither the parameter nor a remedy."""
    model = _sharded_with(lambda _, weight: nn.Parameter(weight))
    with pytest.raises(RuntimeError, match=r"can't be made of the full values of '1.weight'"):
        model(rank_input(4, 6, dtype=torch.float64))
    model[1].take = lambda _, weight: nn.Parameter(weight.detach().clone())
    model(rank_input(4, 6, dtype=torch.float64)).sum().backward()


def _detach(weight: Tensor) -> Tensor:
    return weight.detach()


def _data(weight: Tensor) -> Tensor:
    return weight.data


@pytest.mark.parametrize("take", [_detach, _data, copy.deepcopy])
@claims.strategies
@distributed(1, 2)
def test_c16_weight_that_a_hook_kept_is_right_or_refused(
    take: Callable[[Any], Any], strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Case 16: read after the step, it has the new values; under a flat parameter it is refused."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)).double()
    kept: list[Any] = []
    model[0].register_forward_hook(lambda module, *_: kept.append(module.weight))
    fully_shard(model, strategy=strategy, use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _run_and_square(model, 0)
    optimizer.step()
    if get_handles(model)[0].full.is_whole:
        claims.assert_close(take(kept[0]), claims.unsharded_values(model)["0.weight"], "weight")
        return
    if use_orig_params:
        whole = take(kept[0]).detach().full_tensor()
        claims.assert_close(whole, claims.unsharded_values(model)["0.weight"], "weight")
        return
    with pytest.raises(RuntimeError, match=r"'0.weight' has no values of its own"):
        take(kept[0]).detach()
