"""What a program keeps of its parameters stays true: objects that a forward kept, attributes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from composable_shard import (
    ShardingStrategy,
    fully_shard,
    is_sharded,
    reshard,
    unshard,
    unshard_params,
)
from tests.harness.helpers import distributed
from tests.harness.pairs import pairwise
from tests.programs.claims import assert_right
from tests.programs.models import average_gradients, rank_input, square_mean


class Collecting(nn.Module):
    """Keeps its weights when it is used first, and computes with what it has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(5))
        self.weights: list[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.weights is None:
            self.weights = [each.weight for each in self.layers] + [self.scale]
        for index, layer in enumerate(self.layers):
            x = torch.tanh(x @ self.weights[index].T) + layer.bias
            x = x * getattr(layer.weight, "mult", 1.0)
        return x * self.weights[2]


class CollectingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Collecting(), Collecting())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x)
        return result


def _shard_collecting(model: nn.Module, **options: Any) -> None:
    fully_shard(model.body[0], **options)
    fully_shard(model, **options)


def _loss_of_number(model: nn.Module, number: int) -> Tensor:
    return square_mean(model(rank_input(3, 5, step=number, dtype=torch.float64)))


def halves_data(model: nn.Module, number: int) -> None:
    """`p.data = x` before each microbatch."""
    for param in model.parameters():
        param.data = param.data * 0.5
    _loss_of_number(model, number).backward()


def backs_through_averages(model: nn.Module, number: int) -> None:
    """Averages for an evaluation, and the weights back."""
    params = list(model.parameters())
    backup = [param.data for param in params]
    for param in params:
        param.data = param.data * 2
    with torch.no_grad():
        averaged = _loss_of_number(model, number)
    for param, value in zip(params, backup, strict=True):
        param.data = value
    (averaged * _loss_of_number(model, number)).backward()


def converts(model: nn.Module, number: int) -> None:
    """To other dtypes and back."""
    _loss_of_number(model, number)
    model.float()
    with torch.no_grad():
        model(rank_input(3, 5, step=number))
    model.double()
    _loss_of_number(model, number).backward()


def _set_mult(model: nn.Module, value: float) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.mult = value


def sets_attributes(model: nn.Module, number: int) -> None:
    """A schedule sets an attribute that the forward reads."""
    _set_mult(model, 1.0 + number)
    _loss_of_number(model, number).backward()


def sets_attributes_of_full(model: nn.Module, number: int) -> None:
    """An attribute that is set between `unshard` and `reshard`."""
    _loss_of_number(model, number)
    if is_sharded(model):
        unshard(model, recurse=True)
    _set_mult(model, 1.0 + number)
    if is_sharded(model):
        reshard(model, recurse=True)
    _loss_of_number(model, number).backward()


def sets_attributes_in_a_scope(model: nn.Module, number: int) -> None:
    """An attribute that is set inside `unshard_params`."""
    _loss_of_number(model, number)
    with unshard_params(model) if is_sharded(model) else nullcontext():
        _set_mult(model, 1.0 + number)
    _loss_of_number(model, number).backward()


def assigns_own_data(model: nn.Module, number: int) -> None:
    """Conversions in a forward that change nothing."""

    def convert(module: nn.Module, *_: object) -> None:
        module.to(torch.float64)
        for layer in module.layers:
            layer.weight.data = layer.weight.data.to("cpu")
            with torch.no_grad():
                layer.weight.set_(layer.weight)
                layer.weight.set_(layer.weight.data)

    hooks = [each.register_forward_pre_hook(convert) for each in model.body]
    _loss_of_number(model, number).backward()
    for hook in hooks:
        hook.remove()


class _Plus(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + 1


def parametrizes(model: nn.Module, number: int) -> None:
    """A parametrization that is registered and removed inside a forward."""

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        module.weights = None
        layer = module.layers[1]
        parametrize.register_parametrization(layer, "weight", _Plus())
        result: Tensor = type(module).forward(module, x)
        module.weights = None
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
        return result

    for module in model.body:
        module.forward = partial(forward, module)
    _loss_of_number(model, number).backward()
    for module in model.body:
        del module.forward


PROGRAMS = [
    halves_data,
    backs_through_averages,
    converts,
    sets_attributes,
    sets_attributes_of_full,
    sets_attributes_in_a_scope,
    assigns_own_data,
    parametrizes,
]


@pytest.mark.parametrize(
    *pairwise(
        program=PROGRAMS,
        strategy=list(ShardingStrategy),
        use_orig_params=[True, False],
        world_size=[1, 2, 3],
    )
)
@distributed()
def test_what_a_forward_has_kept_is_the_parameter(
    program: Callable[[nn.Module, int], None], strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Gradients and values are those of the plain model, whatever builds the parameters anew."""
    assert_right(
        CollectingModel,
        program,
        shard=_shard_collecting,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@distributed(1, 2, 3)
def test_a_copy_computes_with_its_own_parameters(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Also a copy of a copy, and after the first model has been trained further."""
    torch.manual_seed(0)
    plain = CollectingModel().double()
    model = copy.deepcopy(plain)
    _shard_collecting(model, strategy=strategy, use_orig_params=use_orig_params)
    for each in (plain, model):
        _loss_of_number(each, 0)
        _set_mult(each, 3.0)
    twins = [copy.deepcopy(copy.deepcopy(each)) for each in (plain, model)]
    _set_mult(twins[0], 3.0)  # torch's own copy of a parameter has no attributes
    for each in (plain, model):
        for param in each.parameters():
            param.data = param.data * 0
    for each in twins:
        _loss_of_number(each, 1).backward()
    average_gradients(twins[0].parameters())
    with unshard_params(twins[1], writeback=False, with_grads=True):
        for name, param in twins[1].named_parameters():
            torch.testing.assert_close(param.grad, twins[0].get_parameter(name).grad)
