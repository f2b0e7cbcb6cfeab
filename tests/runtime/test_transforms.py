"""`torch.func` and forward-mode differentiation over sharded models, also as their first use."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

from composable_shard import ShardingStrategy, get_handles, reshard
from tests.harness.helpers import distributed
from tests.harness.poison import poisoned
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


def _train_after_a_refusal(model: nn.Module, number: int) -> None:
    x = _inputs(number)
    if number == 1 and isinstance(model, nn.Sequential):
        frees = any(not handle.is_kept for handle in get_handles(model))
        for name in [str(index) for index, _ in enumerate(model) if frees]:
            text = rf"saved tensor hooks[^$]*in unit '{name}'[^$]*call the model again"
            with pytest.raises(RuntimeError, match=text):
                model(x)
    model(x).square().mean().backward()


@pytest.mark.parametrize("transform", [_grad, _grad_by_row, _jacrev])
@claims.strategies
@distributed(2)
def test_c15_transform_inside_the_forward_of_a_unit(
    transform: Transform, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """C15: the first call says that the unit has given up its hooks; from then on it is right."""
    claims.assert_right(
        lambda: nn.Sequential(_TransformInside(transform), _TransformInside(transform)),
        _train_after_a_refusal,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


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
