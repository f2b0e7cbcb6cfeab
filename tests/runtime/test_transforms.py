"""`torch.func` and forward-mode differentiation over sharded models, also as their first use."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    vjp,
    vmap,
)

from composable_shard import ShardingStrategy, fully_shard, get_handles, reshard
from tests.harness.pairs import pairwise
from tests.harness.poison import poisoned
from tests.harness.ranks import distributed
from tests.programs import claims
from tests.programs.models import Layer, rank_input, shard_children, square_mean

Transform = Callable[[nn.Module, Tensor], Tensor]


@functools.cache
def _load_formulas() -> None:
    """Let torch compile formulas, as with the first use of forward mode; it warns of that."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore")
        forward_ad.make_dual(torch.ones(1), torch.ones(1))


def _make_tanh_layers() -> nn.Module:
    return nn.Sequential(Layer(15, 4), nn.Sequential(nn.Tanh(), nn.Linear(15, 2)))


def _inputs(number: int) -> Tensor:
    return rank_input(3, 15, step=number, dtype=torch.float64)


def _grad(model: nn.Module, x: Tensor) -> Tensor:
    return grad(lambda v: model(v).square().sum())(x)


def _grad_by_row(model: nn.Module, x: Tensor) -> Tensor:
    return vmap(grad(lambda v: model(v).square().sum()))(x)


def _by_row(model: nn.Module, x: Tensor) -> Tensor:
    return vmap(model)(x)


def _jvp(model: nn.Module, x: Tensor) -> Tensor:
    return jvp(model, (x,), (torch.cos(x),))[1]


def _jacrev(model: nn.Module, x: Tensor) -> Tensor:
    return jacrev(model)(x)


def _jacfwd(model: nn.Module, x: Tensor) -> Tensor:
    return jacfwd(model)(x)


def _hessian(model: nn.Module, x: Tensor) -> Tensor:
    return hessian(lambda v: model(v).square().sum())(x[0])


def _functional_call(model: nn.Module, x: Tensor) -> Tensor:
    return functional_call(model, dict(model.named_parameters()), (x,))


def _dual(model: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        output = model(forward_ad.make_dual(x, torch.cos(x)))
        return forward_ad.unpack_dual(output).tangent


TRANSFORMS = [_grad, _grad_by_row, _by_row, _jvp, _jacrev, _jacfwd, _hessian, _dual]


@claims.strategies
@distributed(2)
def test_c15_training_through_transforms(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """Case 15: also as the model's first use, and beside an ordinary forward."""
    _load_formulas()
    for transform in (*TRANSFORMS, _functional_call):

        def program(model: nn.Module, number: int, transform: Transform = transform) -> None:
            first = transform(model, _inputs(number))
            loss = square_mean(model(_inputs(number + 100)))
            (square_mean(first) + square_mean(transform(model, _inputs(number))) + loss).backward()

        claims.assert_right(
            _make_tanh_layers, program, steps=2, strategy=strategy, use_orig_params=use_orig_params
        )


@claims.strategies
@distributed(2)
def test_c15_evaluation_through_transforms(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Case 15: under no_grad; what is gathered for it is freed by `reshard`."""
    _load_formulas()
    for transform in TRANSFORMS:
        torch.manual_seed(0)
        plain = _make_tanh_layers().double()
        model = copy.deepcopy(plain)
        shard_children(model, strategy=strategy, use_orig_params=use_orig_params)
        with poisoned(), torch.no_grad():
            for number in range(2):
                x = _inputs(number)
                claims.assert_close(transform(model, x), transform(plain, x), "result")
            claims.assert_close(model(x), plain(x), "output")
        reshard(model, recurse=True)
        if strategy is ShardingStrategy.FULL_SHARD:
            assert not any(handle.full.has_values for handle in get_handles(model))


@claims.strategies
@distributed(2)
def test_c15_other_parameters_are_refused(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Case 15: a gradient by parameters that are passed to functional_call, before and after."""
    torch.manual_seed(0)
    model = _make_tanh_layers().double()
    shard_children(model, strategy=strategy, use_orig_params=use_orig_params)
    x = _inputs(0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"was replaced by another object|no unit manages"):
            grad(lambda params: functional_call(model, params, (x,)).sum())(
                dict(model.named_parameters())
            )
        model(x).sum().backward()


class _TransformInside(nn.Module):
    """A layer beside one whose gradient by its input the forward asks `torch.func` for."""

    def __init__(self, transform: Transform) -> None:
        super().__init__()
        self.transform = transform
        self.layer, self.energy = Layer(15, 4), nn.Linear(15, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.transform(self.energy, x).sum()


def _train_with_transform(model: nn.Module, number: int) -> None:
    model(_inputs(number)).square().mean().backward()


def _loss_by_chunks(energy: nn.Module, x: Tensor) -> Tensor:
    """As liger's losses: gradients of a head's weight by chunks, in a function of autograd."""
    return _ChunkedLoss.apply(x, energy.weight)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        chunk_loss = grad_and_value(lambda w, rows: torch.tanh(rows @ w.t()).sum(), argnums=(0, 1))
        found = [chunk_loss(weight, rows) for rows in x.split(2)]
        ctx.save_for_backward(
            sum(by_weight for (by_weight, _), _ in found), torch.cat([by for (_, by), _ in found])
        )
        return torch.stack([loss for _, loss in found]).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        by_weight, by_rows = ctx.saved_tensors
        return gradient * by_rows, gradient * by_weight


def _residual(energy: nn.Module, x: Tensor) -> Tensor:
    """As physics-informed networks: derivatives of a network's functional form."""
    params = dict(energy.named_parameters())

    def at(params: dict[str, Tensor], point: Tensor) -> Tensor:
        return torch.tanh(F.linear(point, params["weight"], params["bias"])).sum()

    return vmap(grad(at, argnums=1), (None, 0))(params, x)


def _tangent(energy: nn.Module, x: Tensor) -> Tensor:
    return jvp(lambda v: torch.tanh(energy(v)), (x,), (torch.cos(x),))[1]


def _product_of_two(energy: nn.Module, x: Tensor) -> Tensor:
    out, pull = vjp(lambda w: torch.tanh(x @ w.t()), energy.weight)
    return pull(torch.ones_like(out))[0]


@pytest.mark.parametrize(
    *pairwise(
        transform=[
            _grad,
            _grad_by_row,
            _jacrev,
            _loss_by_chunks,
            _residual,
            _tangent,
            _product_of_two,
        ],
        strategy=list(ShardingStrategy),
        use_orig_params=[True, False],
        accumulates=[True, False],
        shard=[shard_children, fully_shard],
    )
)
@distributed(1, 2, 3)
def test_c15_transform_inside_the_forward_of_a_unit(
    transform: Transform,
    strategy: ShardingStrategy,
    use_orig_params: bool,
    accumulates: bool,
    shard: Any,
) -> None:
    """C15: the first call is right as the later ones are: the unit's hooks give way."""
    _load_formulas()
    before = torch.autograd.graph.disable_saved_tensors_hooks
    claims.assert_right(
        lambda: nn.Sequential(_TransformInside(transform), _TransformInside(transform)),
        _train_with_transform,
        shard=shard,
        accumulates=accumulates,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )
    assert torch.autograd.graph.disable_saved_tensors_hooks is before


@distributed(2)
def test_c15_forward_that_fails_in_a_transform_leaves_no_hooks() -> None:
    """C15: and the next one is right; a user's own hooks are refused as in a plain model."""

    def fail(v: Tensor) -> Tensor:
        raise LookupError("in a transform")

    def program(model: nn.Module, number: int) -> None:
        if number == 1:
            own = [module for module in model.modules() if isinstance(module, _TransformInside)]
            for module in own:
                module.transform = lambda energy, x: grad(fail)(x)
            with pytest.raises(LookupError):
                model(_inputs(number))
            for module in own:
                module.transform = _grad
            with pytest.raises(RuntimeError, match="saved tensor hooks"), save_on_cpu():
                model(_inputs(number))
        _train_with_transform(model, number)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None

    before = torch.autograd.graph.disable_saved_tensors_hooks
    claims.assert_right(
        lambda: nn.Sequential(_TransformInside(_grad), _TransformInside(_grad)), program
    )
    assert torch.autograd.graph.disable_saved_tensors_hooks is before


@claims.strategies
@distributed(2)
def test_c15_transform_inside_a_forward_without_hooks(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """C15: right at once inside what the refusal names."""

    def program(model: nn.Module, number: int) -> None:
        with disable_saved_tensors_hooks("a transform is inside"):
            y = model(_inputs(number))
        y.square().mean().backward()

    claims.assert_right(
        lambda: nn.Sequential(_TransformInside(_grad), _TransformInside(_jacrev)),
        program,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )
