"""Layers sharded without a `fully_shard` around them: each is a tree of its own."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard import fully_shard, get_handles, get_states, no_sync
from tests.harness.assertions import Planned
from tests.harness.ranks import distributed
from tests.programs import claims
from tests.programs.models import Twins, assert_at_rest, average_gradients, rank_input, square_mean


class _Layers(nn.Module):
    def __init__(self, dim: int = 15, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def _shard_alone(model: nn.Module, **options: Any) -> None:
    for layer in model.layers:
        fully_shard(layer, **options)


def _shard_with_root(model: nn.Module, **options: Any) -> None:
    _shard_alone(model, **options)
    fully_shard(model, **options)


def _train_layers(model: nn.Module, microbatch: int) -> None:
    square_mean(model(rank_input(3, 15, step=microbatch, dtype=torch.float64))).backward()


@claims.variants
@distributed(2)
def test_c11_layers_without_a_root(strategy: Any, use_orig_params: bool, accumulates: bool) -> None:
    """Case 11 of the claims: right by value."""
    claims.assert_right(
        _Layers,
        _train_layers,
        shard=_shard_alone,
        accumulates=accumulates,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


@distributed(2)
def test_c11_evaluations_between_steps() -> None:
    """They leave nothing behind."""
    twins = Twins(_Layers, _shard_alone)
    for step in range(3):
        twins.step(lambda model, step=step: square_mean(model(rank_input(3, 15, step=step))))
        for model in twins:
            model.zero_grad()
            with torch.no_grad():
                model(rank_input(3, 15))
        assert_at_rest(twins.sharded)


class _Branches(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        return sum(torch.tanh(layer(x)) for layer in self.layers)


class _ByKeyword(_Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(input=x))
        return x


@pytest.mark.parametrize("make", [_Branches, _ByKeyword])
@distributed(2)
def test_c11_layers_that_only_the_backward_connects(make: type[nn.Module]) -> None:
    """Their calls see nothing of each other."""
    twins = Twins(make, _shard_alone)
    for step in range(3):
        twins.step(lambda model, step=step: square_mean(model(rank_input(3, 15, step=step))))
        for model in twins:
            model.zero_grad()
    assert_at_rest(twins.sharded)


@distributed(2)
def test_c11_equal_layers_that_ranks_call_in_another_order() -> None:
    """Nothing is called around them: their numbers tell them apart, which copies keep.

    So one rank may copy a layer that the others don't.
    """
    layers = [fully_shard(nn.Linear(5, 5), check_initial_values=False) for _ in range(2)]
    copied = copy.deepcopy(layers[0])
    if dist.get_rank() == 0:
        copy.deepcopy(copied)
    layers.append(fully_shard(nn.Linear(5, 5), check_initial_values=False))
    numbers = [get_handles(each)[0].label.number for each in (*layers, copied)]
    assert numbers == [numbers[0], numbers[0] + 1, numbers[0] + 2, numbers[0]]
    with pytest.raises(RuntimeError, match=f"number {numbers[0]} of.*number {numbers[1]} of"):
        layers[dist.get_rank()](rank_input(3, 5))
    output = rank_input(3, 5)
    for layer in (*layers, copied):
        output = layer(output)
    output.sum().backward()


@distributed(2)
def test_c11_models_in_one_process_stay_apart() -> None:
    """An aborted backward of one model drops no gradient of another, whose calls lie between."""
    models = [_Layers().double() for _ in range(2)]
    plain = copy.deepcopy(models[0])
    for model in models:
        _shard_alone(model)
    x = rank_input(3, 15, dtype=torch.float64)
    for step in range(2):
        outputs = [x, x]
        for layers in zip(*(model.layers for model in models), strict=True):
            outputs = [torch.tanh(layer(x)) for layer, x in zip(layers, outputs, strict=True)]
        if step == 0:
            with no_sync(models[0]):
                square_mean(outputs[0]).backward()
            outputs[1].register_hook(_fail)
            with pytest.raises(Planned):
                square_mean(outputs[1]).backward()
        else:
            square_mean(outputs[0]).backward()
            square_mean(outputs[1]).backward()
    for _ in range(2):
        output = x
        for layer in plain.layers:
            output = torch.tanh(layer(output))
        square_mean(output).backward()
    average_gradients(plain.parameters())
    found = claims.unsharded_gradients(models[0])
    for name, param in plain.named_parameters():
        claims.assert_close(found[name], param.grad, name)


def _fail(_: Tensor) -> None:
    raise Planned


@distributed(2)
def test_c11_layers_can_get_a_root_and_be_deleted() -> None:
    """A unit around some layers takes them out; without references nothing stays."""
    twins = Twins(_Layers, _shard_alone)
    twins.step(lambda model: square_mean(model(rank_input(3, 15))))
    for model in twins:
        model.zero_grad()
    fully_shard(twins.sharded)
    twins.step(lambda model: square_mean(model(rank_input(3, 15))))
    assert_at_rest(twins.sharded)
    model = _Layers()
    _shard_alone(model)
    square_mean(model(rank_input(3, 15))).backward()
    handle, context = map(weakref.ref, (get_handles(model)[0], get_states(model)[0].context))
    gc.disable()
    try:
        del model
        assert handle() is None
        assert context() is None
    finally:
        gc.enable()
