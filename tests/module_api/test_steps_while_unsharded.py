"""Full parameters between `unshard` and `reshard` have the values of a step taken there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from composable_shard import (
    MixedPrecisionPolicy,
    ShardingStrategy,
    count_collectives,
    fully_shard,
    is_sharded,
    reshard,
    unshard,
    unshard_params,
    writeback,
)
from tests.harness.pairs import pairwise
from tests.harness.ranks import distributed
from tests.programs.claims import unsharded_values
from tests.programs.models import average_gradients, rank_input, square_mean


class _KeepingTanh(nn.Module):
    """Keeps its weight when it is used first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.kept or [self.layer.weight]
        return torch.tanh(self.layer(x))


class _HeldModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(_KeepingTanh(), _KeepingTanh())
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.scale


def _shard_held(model: nn.Module, **options: Any) -> None:
    fully_shard(model.body[0], **options)
    fully_shard(model, **options)


def _held_input(number: int) -> Tensor:
    return rank_input(3, 5, step=number, dtype=torch.float64)


def _step_held(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    square_mean(model(_held_input(number))).backward()
    if not is_sharded(model):
        average_gradients(model.parameters())
    optimizer.step()
    optimizer.zero_grad()


def _weights(model: nn.Module) -> list[Tensor]:
    shown = [each.layer.weight for each in model.body]
    return [*shown, *(kept for each in model.body for kept in each.kept), model.scale]


def _reads(model: nn.Module) -> Any:
    weights = _weights(model)
    with torch.no_grad():
        return [
            *(2 * weight for weight in weights),
            *(weight.detach().clone() for weight in weights),
            *(weight.data[0].clone() for weight in weights),
            *(torch.from_numpy(weight.detach().numpy()) + 0 for weight in weights),
            *(weight.sum().item() for weight in weights),
            weights[0] @ weights[1].t(),
            torch.stack(weights[:2]),
            nn.functional.layer_norm(weights[0], (5,), weights[-1]),
        ]


def _calls_layers(model: nn.Module) -> Any:
    """Without hooks of a unit."""
    x = _held_input(7)
    with torch.no_grad():
        found = [each.layer(x) for each in model.body]
    square_mean(model.body[1].layer(model.body[0].layer(x)) * model.scale).backward()
    return found


def _penalizes(model: nn.Module) -> Any:
    penalty = sum(weight.square().sum() for weight in _weights(model))
    assert isinstance(penalty, Tensor)
    penalty.backward()
    return penalty.detach()


def _edits(model: nn.Module) -> Any:
    with torch.no_grad():
        for weight in _weights(model):
            weight.mul_(0.5)
        model.scale.data.add_(0.25)
    if is_sharded(model):
        writeback(model, recurse=True)
    return _reads(model)


def _reads_around_a_scope(model: nn.Module) -> Any:
    found = []
    for writes in (False, True):
        with unshard_params(model, writeback=writes) if is_sharded(model) else torch.no_grad():
            found += _reads(model)
        found += _reads(model)
    return found


USES: dict[str, Callable[[nn.Module], Any]] = {
    "reads": _reads,
    "calls of layers": _calls_layers,
    "a penalty": _penalizes,
    "edits": _edits,
    "a scope": _reads_around_a_scope,
    "a call": lambda model: model(_held_input(5)).detach(),
}


def _sets_data(optimizer: torch.optim.Optimizer) -> None:
    for param in optimizer.param_groups[0]["params"]:
        param.data = param.data * 0.5


# By name: torch replaces `SGD.step` when it makes the first optimizer, so it does not pickle.
WRITES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "a step": lambda optimizer: optimizer.step(),
    "other data": _sets_data,
}


@pytest.mark.parametrize(
    *pairwise(
        use=USES,
        writes=WRITES,
        strategy=list(ShardingStrategy),
        use_orig_params=[True, False],
        world_size=[1, 2, 3],
    )
)
@distributed()
def test_full_parameters_have_the_values_of_a_step(
    use: str, writes: str, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Results, gradients and what two more steps give are a plain model's."""
    torch.manual_seed(0)
    plain = _HeldModel().double()
    model = copy.deepcopy(plain)
    _shard_held(model, strategy=strategy, use_orig_params=use_orig_params)
    optimizers = {each: torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)}
    results: list[Any] = []
    for each, optimizer in optimizers.items():
        found = []
        for number in range(2):
            if each is model:
                unshard(model, recurse=True)
            _step_held(each, optimizer, 3 * number)
            found.append(USES[use](each))
            if each is plain:
                average_gradients(p for p in plain.parameters() if p.grad is not None)
            WRITES[writes](optimizer)
            found.append(USES[use](each))
            if each is model:
                reshard(model, recurse=True)
            optimizer.zero_grad()
            _step_held(each, optimizer, 3 * number + 1)
        results.append(found)
    torch.testing.assert_close(results[1], results[0])
    for name, value in unsharded_values(model).items():
        torch.testing.assert_close(value, plain.get_parameter(name).detach())


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@distributed(2)
def test_values_are_gathered_once_for_each_step(strategy: ShardingStrategy) -> None:
    """With the first operation after it; reads after a writeback gather nothing."""
    model = _HeldModel().double()
    _shard_held(model, strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    unshard(model, recurse=True)
    _step_held(model, optimizer, 0)
    keeps_whole = strategy is ShardingStrategy.NO_SHARD
    with torch.no_grad():
        for expected in (0 if keeps_whole else 1, 0):
            with count_collectives() as log:
                model.body[0].layer.weight + 1
                model.body[0].layer.bias + 1
            assert [event.kind for event in log.events] == ["all_gather"] * expected
        model.scale.mul_(2)
        writeback(model, recurse=True)
        with count_collectives() as log:
            model.scale + 1
        assert not log.events
    reshard(model, recurse=True)


@pytest.mark.parametrize(
    "policy",
    [MixedPrecisionPolicy(param_dtype=torch.float32), MixedPrecisionPolicy(torch.bfloat16)],
)
@distributed(1, 2)
def test_values_of_a_step_are_in_the_dtype_of_compute(policy: MixedPrecisionPolicy) -> None:
    """They are the rounded values that the next forward computes with."""
    model = _HeldModel().double()
    _shard_held(model, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    unshard(model, recurse=True)
    square_mean(model(_held_input(0)).double()).backward()
    optimizer.step()
    with torch.no_grad():
        found = [weight + 0 for weight in _weights(model)]
    reshard(model, recurse=True)
    weights = [*(each.layer.weight for each in model.body)] * 2 + [model.scale]
    for value, param in zip(found, weights, strict=True):
        assert value.dtype == policy.param_dtype
        torch.testing.assert_close(
            value, param.full_tensor().detach().to(value.dtype), rtol=0, atol=0
        )


@distributed(2)
def test_edits_that_a_step_overtakes_are_named() -> None:
    """A warning says before they are gone that they were not written back."""
    model = _HeldModel().double()
    _shard_held(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    unshard(model, recurse=True)
    square_mean(model(_held_input(0))).backward()
    with torch.no_grad():
        model.scale.mul_(2)
    with pytest.warns(UserWarning, match=r"\['scale'\] between unshard and reshard were not writt"):
        optimizer.step()
    reshard(model, recurse=True)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_OPTIM])
@distributed(2)
def test_tensor_parallel_parameters_have_the_values_of_a_step(strategy: ShardingStrategy) -> None:
    """DTensors, in a layer that is called without its unit."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    plain = nn.Linear(5, 5, bias=False)
    for param in plain.parameters():
        dist.broadcast(param.data, 0)
    model = nn.Sequential(parallelize_module(copy.deepcopy(plain), mesh["tp"], ColwiseParallel()))
    fully_shard(model, mesh=mesh["dp"], strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 5)
    unshard(model, recurse=True)
    model(x).square().sum().backward()
    optimizer.step()
    plain(x).square().sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    with torch.no_grad():
        torch.testing.assert_close(model[0](x), plain(x))
        torch.testing.assert_close((model[0].weight * 2).full_tensor(), plain.weight * 2)
        torch.testing.assert_close(model[0].weight.to_local(), plain.weight.detach())
    reshard(model, recurse=True)
