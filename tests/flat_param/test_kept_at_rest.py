"""Full parameters that a program has kept, read and written at rest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard import MixedPrecisionPolicy, ShardingStrategy, unshard_params
from tests.flat_param.test_kept_objects import CollectingModel, _kept, _shard_collecting
from tests.harness.pairs import pairwise
from tests.harness.ranks import distributed
from tests.programs.models import average_gradients, rank_input, square_mean


def _with_full_values(value: Any) -> Any:
    """Return a result as a plain model has it."""
    if isinstance(value, Tensor):
        return value.full_tensor() if hasattr(value, "full_tensor") else value
    return [_with_full_values(each) for each in value] if isinstance(value, list | tuple) else value


def _averages(weights: list[Tensor]) -> list[Tensor]:
    averages = [torch.ones(weight.shape, dtype=weight.dtype) for weight in weights]
    for average, weight in zip(averages, weights, strict=True):
        average.lerp_(weight, 0.25)
    return averages


def _scaled(weights: list[Tensor]) -> list[Tensor]:
    results = [torch.zeros(weight.shape, dtype=weight.dtype) for weight in weights]
    for result, weight in zip(results, weights, strict=True):
        torch.mul(weight, 3, out=result)
    return results


READS: dict[str, Callable[[list[Tensor]], Any]] = {
    "clone": lambda weights: [weight.clone() for weight in weights],
    "arithmetic": lambda weights: [1 - weight / 2 for weight in weights],
    "detach": lambda weights: [weight.detach().clone() for weight in weights],
    "data": lambda weights: [weight.data * 2 for weight in weights],
    "norm": lambda weights: [weight.norm() for weight in weights],
    "number": lambda weights: [weight.sum().item() for weight in weights],
    "row": lambda weights: [weight[0] for weight in weights],
    "product": lambda weights: weights[0] @ weights[1].t(),
    "stack": lambda weights: torch.stack(weights[:2]),
    "list": lambda weights: torch._foreach_mul(weights, 2),
    "averages": _averages,
    "out": _scaled,
    "function": lambda weights: nn.functional.layer_norm(weights[0], (5,), weights[2]),
    "copies": lambda weights: [copy.deepcopy(weight).detach() for weight in weights],
    "facts": lambda weights: [
        [*weight.shape, weight.requires_grad, weight.is_leaf, len(weight), weight.element_size()]
        for weight in weights
    ],
    "gradients": lambda weights: [weight.grad for weight in weights],
}


def _written(weights: list[Tensor]) -> None:
    for weight in weights:
        weight.mul_(0.5)
        weight.data.add_(0.25)
        weight += 1
        weight[0] = weight.detach()[-1]
        weight.data = weight * 2
    torch._foreach_mul_(weights, 0.5)
    torch.add(weights[0], weights[1], out=weights[1])


def _train_a_step(plain: nn.Module, sharded: nn.Module, number: int) -> None:
    for model in (plain, sharded):
        square_mean(model(rank_input(3, 5, step=number, dtype=torch.float64))).backward()
    average_gradients(plain.parameters())
    for model in (plain, sharded):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def _twins(**options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = CollectingModel().double()
    sharded = copy.deepcopy(plain)
    _shard_collecting(sharded, **options)
    return plain, sharded


@pytest.mark.parametrize(*pairwise(read=READS, strategy=list(ShardingStrategy)))
@distributed(1, 2, 3)
def test_reads_at_rest_see_the_last_step(read: str, strategy: ShardingStrategy) -> None:
    """Each operation gives what it gives of a plain model's weights, before and after a step."""
    plain, sharded = _twins(strategy=strategy)
    for number in range(2):
        _train_a_step(plain, sharded, number)
        with torch.no_grad():
            expected, found = (READS[read](_kept(model)) for model in (plain, sharded))
        torch.testing.assert_close(_with_full_values(found), expected)
        sharded.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@distributed(1, 2, 3)
def test_writes_at_rest_reach_the_parameters(strategy: ShardingStrategy) -> None:
    """In place, through `data`, an assignment to it, an item or `out`."""
    plain, sharded = _twins(strategy=strategy)
    for number in range(2):
        _train_a_step(plain, sharded, number)
        for model in (plain, sharded):
            with torch.no_grad():
                _written(_kept(model))
            model.zero_grad()
    with unshard_params(sharded, writeback=False):
        for name, param in sharded.named_parameters():
            torch.testing.assert_close(param, plain.get_parameter(name))


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@distributed(1, 2, 3)
def test_settings_at_rest_are_those_of_the_parameters(strategy: ShardingStrategy) -> None:
    """Flags and gradients that are set through what a forward has kept."""
    plain, sharded = _twins(strategy=strategy)
    _train_a_step(plain, sharded, 0)
    for model in (plain, sharded):
        first, second, *_ = _kept(model)
        first.requires_grad_(False).grad = None
        second.grad = None
    _train_a_step(plain, sharded, 1)
    with unshard_params(sharded, writeback=False, with_grads=True):
        for name, param in sharded.named_parameters():
            torch.testing.assert_close(param, plain.get_parameter(name))
            assert (param.grad is None) == (plain.get_parameter(name).grad is None), name


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@distributed(1, 2, 3)
def test_data_assigned_at_rest_is_read_before_the_next_forward(strategy: ShardingStrategy) -> None:
    """What a forward has kept follows `p.data = x`, also where one rank holds everything."""
    plain, sharded = _twins(strategy=strategy)
    _train_a_step(plain, sharded, 0)
    for model in (plain, sharded):
        for param in model.parameters():
            param.data = param.data * 3
    with torch.no_grad():
        expected, found = ([2 * weight for weight in _kept(model)] for model in (plain, sharded))
    torch.testing.assert_close(_with_full_values(found), expected)


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@distributed(2)
def test_reads_after_a_step_have_main_values(strategy: ShardingStrategy) -> None:
    """Where a unit computes in another dtype, they are those of the module's own parameter."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float32)
    _, sharded = _twins(strategy=strategy, mp_policy=policy)
    sharded(rank_input(3, 5)).sum().backward()
    torch.optim.SGD(sharded.parameters(), lr=0.1).step()
    for module in sharded.body:
        own = [layer.weight for layer in module.layers] + [module.scale]
        with torch.no_grad():
            for kept, param in zip(module.weights, own, strict=True):
                found, expected = _with_full_values(kept * 2), _with_full_values(param * 2)
                torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@distributed(1, 2, 3)
def test_reads_while_one_flat_parameter_is_shown(strategy: ShardingStrategy) -> None:
    """They are right while the values are there, and refused by name after a step."""
    plain, sharded = _twins(strategy=strategy, use_orig_params=False)
    _train_a_step(plain, sharded, 0)
    is_whole = dist.get_world_size() == 1 or strategy is ShardingStrategy.NO_SHARD
    with torch.no_grad():
        if is_whole:
            expected, found = ([2 * w for w in _kept(model)] for model in (plain, sharded))
            torch.testing.assert_close(found, expected)
        else:
            with pytest.raises(
                RuntimeError, match=r"'body\.0\.layers\.0\.weight' has no values of its own"
            ):
                _kept(sharded)[0] * 2


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@distributed(2)
def test_no_backward_reaches_what_is_kept_at_rest(strategy: ShardingStrategy) -> None:
    """Its gradient would not be reduced; where values are whole at rest, it is as before."""
    plain, sharded = _twins(strategy=strategy)
    _train_a_step(plain, sharded, 0)
    loss = _kept(sharded)[0].square().sum()
    torch.testing.assert_close(loss, _kept(plain)[0].square().sum())
    if strategy is not ShardingStrategy.NO_SHARD:
        with pytest.raises(RuntimeError, match=r"parameter 'body\.0\.layers\.0\.weight' at rest"):
            loss.backward()


@distributed(2)
def test_what_outlives_a_deleted_model_is_refused() -> None:
    """Nobody gathers its values any more."""
    model = CollectingModel().double()
    _shard_collecting(model)
    model(rank_input(3, 5, dtype=torch.float64))
    kept = _kept(model)[0]
    del model
    with pytest.raises(RuntimeError, match=r"'body\.0.*' was kept and is used after"):
        kept + 1
