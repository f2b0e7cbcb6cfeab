"""What people do to parameters at rest, beside plain tensors, by value.

The programs are in `tests/programs/parameters.py`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from composable_shard import Block, FlatShard, ShardingStrategy, fully_shard
from tests.harness.ranks import distributed
from tests.programs.parameters import FLAT_PROGRAMS, PROGRAMS, Named, Parts, Program


def _values_in(result: Any) -> list[Tensor]:
    if isinstance(result, list | tuple):
        return [x for item in result for x in _values_in(item)]
    if isinstance(result, int | float):
        return [torch.tensor(result)]
    if not isinstance(result, Tensor):
        return []
    found = result.full_tensor() if isinstance(result, FlatShard | DTensor) else result
    return [found.detach().clone()]


def _by_name(net: nn.Module, other: nn.Module) -> Named:
    second = {f"other.{name}": param for name, param in other.named_parameters()}
    return {**dict(net.named_parameters()), **second}


def _part(value: Tensor, like: Tensor) -> Tensor:
    """Return what this rank holds of a whole value; no communication."""
    return (
        FlatShard.from_full(value, like._shard_spec)._local
        if isinstance(like, FlatShard)
        else value
    )


def _run_program(
    run: Program, params: Named, values: list[tuple[Tensor, Tensor]]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return what a program gives from these values: its result, and parameters with gradients."""
    for param, (value, grad) in zip(params.values(), values, strict=True):
        param.data.copy_(value)
        param.grad = torch.zeros_like(param)
        param.grad.copy_(grad)
    torch.manual_seed(3)
    with torch.no_grad():
        result = _values_in(run(params))
    return result, [x.detach() for param in params.values() for x in (param, param.grad)]


def _are_same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.allclose(one, other, atol=1e-5, rtol=1e-4, equal_nan=True)


def _difference(run: Program, plain: Named, sharded: Named, values: Any) -> str:
    expected, whole = _run_program(run, plain, values)
    try:
        found, shards = _run_program(run, sharded, values)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    parts = [_part(value, shard) for value, shard in zip(whole, shards, strict=True)]
    own = [x._local if isinstance(x, FlatShard) else x for x in shards]
    for what, one, other in (("result", found, expected), ("values", own, parts)):
        if len(one) != len(other) or not all(map(_are_same, one, other)):
            return f"another {what}"
    return ""


def _compare_each(programs: dict[str, Program], plain: Named, sharded: Named) -> None:
    """Run each program on plain parameters and on sharded ones."""
    values = [(x.detach().clone(), torch.randn_like(x)) for x in plain.values()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {name: _difference(run, plain, sharded, values) for name, run in programs.items()}
    wrong = [f"{name}: {text}" for name, text in found.items() if text]
    assert not wrong, "\n".join(wrong)


def _compare_programs(shard_net: Callable[[nn.Module], None]) -> None:
    """Run each program on parameters of two plain models and of sharded ones."""
    torch.manual_seed(1)
    plain = Parts(), Parts()
    net, other = copy.deepcopy(plain)
    shard_net(net)
    fully_shard(other, granularity="row")
    _compare_each(PROGRAMS, _by_name(*plain), _by_name(net, other))


@pytest.mark.parametrize(
    "granularity", ["element", "row", Block(4)], ids=["element", "row", "block"]
)
@distributed(2, 3)
def test_programs_at_rest_are_those_of_plain_tensors(granularity: Any) -> None:
    """Results, parameters and gradients; three ranks have empty parts."""

    def shard_net(net: nn.Module) -> None:
        for unit in (net.a, net.conv, net):
            fully_shard(unit, granularity=granularity)

    _compare_programs(shard_net)


@distributed(2)
def test_programs_at_rest_under_other_strategies() -> None:
    """Units that are not sharded beside those that are."""

    def shard_net(net: nn.Module) -> None:
        fully_shard(net.a, strategy=ShardingStrategy.NO_SHARD)
        fully_shard(net, strategy=ShardingStrategy.SHARD_OPTIM)

    _compare_programs(shard_net)


@distributed(4)
def test_programs_at_rest_with_replicas() -> None:
    """HSDP: shards are gathered inside the shard group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def shard_net(net: nn.Module) -> None:
        for unit in (net.a, net):
            fully_shard(unit, mesh=mesh)

    _compare_programs(shard_net)


@pytest.mark.parametrize("is_alone", [False, True])
@distributed(4)
def test_programs_at_rest_on_a_tensor_parallel_mesh(is_alone: bool) -> None:
    """Parameters that are cut by rows and by columns; also where a unit is not sharded."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def shard_net(net: nn.Module) -> None:
        plan = {"square": ColwiseParallel(), "a": RowwiseParallel()}
        parallelize_module(net, mesh["tensor"], plan)
        strategy = ShardingStrategy.NO_SHARD if is_alone else ShardingStrategy.FULL_SHARD
        fully_shard(net.a, mesh=mesh["data"], strategy=strategy)
        fully_shard(net.square, mesh=mesh["data"], strategy=strategy)
        fully_shard(net, mesh=mesh["data"])

    _compare_programs(shard_net)


@pytest.mark.parametrize("granularity", ["element", "row"])
@distributed(2, 3)
def test_programs_on_flat_parameters_are_those_of_vectors(granularity: Any) -> None:
    """With `use_orig_params=False`, beside what is gathered of them."""
    torch.manual_seed(1)
    net = Parts()
    for unit in (net.a, net):
        fully_shard(unit, granularity=granularity, use_orig_params=False)
    sharded = dict(zip(("root", "unit"), net.parameters(), strict=True))
    assert len(sharded["unit"]) < len(sharded["root"])
    plain = {name: nn.Parameter(x.detach().full_tensor()) for name, x in sharded.items()}
    _compare_each(FLAT_PROGRAMS, plain, sharded)
