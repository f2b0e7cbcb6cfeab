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
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

from composable_shard import ShardingStrategy, get_handles, reshard
from composable_shard.runtime.reads import LearntReads
from tests import claims
from tests.helpers import distributed
from tests.models import Layer, rank_input, shard_children, square_mean

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
        with claims.poisoned(), torch.no_grad():
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
        for name in [str(index) for index, _ in enumerate(model) if get_handles(model)]:
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


class _NamesTransform(_TransformInside):
    """Calls it in the forward itself."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + vmap(grad(lambda row: self.energy(row).sum()))(x).sum()


class _NamesPackage(_TransformInside):
    """Calls it as an attribute of torch."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.func.jacrev(self.energy)(x[0]).sum()


class _NamesHelper(_TransformInside):
    """Calls a method that calls a function that does."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.by_row(x).sum()

    def by_row(self, x: Tensor) -> Tensor:
        """Return the gradient of the energy, row by row."""
        return _grad_by_row(self.energy, x)


def _train_by_squares(model: nn.Module, number: int) -> None:
    model(_inputs(number)).square().mean().backward()


@pytest.mark.parametrize("kind", [_NamesTransform, _NamesPackage, _NamesHelper])
@claims.strategies
@distributed(2)
def test_c15_transform_that_the_forward_names_is_right_at_once(
    kind: type[_TransformInside], strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """C15: such a unit takes no hooks from the beginning."""
    claims.assert_right(
        lambda: nn.Sequential(kind(_grad), kind(_grad)),
        _train_by_squares,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


@pytest.mark.fast
def test_forward_of_one_instance_alone_is_searched_for_transforms() -> None:
    """Modules of one class have their code in common, but for a forward of their own."""
    plain, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.forward = lambda x: vmap(torch.sin)(x)  # type: ignore[method-assign] # a patch, as users write
    assert not LearntReads([plain, plain]).refuses_hooks
    assert LearntReads([plain, other]).refuses_hooks
    assert LearntReads([other, plain]).refuses_hooks
    penalised, other = _ChoosesForward(is_penalised=True), _ChoosesForward(is_penalised=False)
    assert LearntReads([penalised, other]).refuses_hooks
    assert LearntReads([other, penalised]).refuses_hooks
    assert not LearntReads([other, other]).refuses_hooks


class _ChoosesForward(nn.Module):
    def __init__(self, *, is_penalised: bool) -> None:
        super().__init__()
        self.is_penalised = is_penalised

    @property
    def forward(self) -> Callable[[Tensor], Tensor]:  # type: ignore[override]
        return self.with_penalty if self.is_penalised else torch.sin

    def with_penalty(self, x: Tensor) -> Tensor:
        return vmap(torch.sin)(x)
