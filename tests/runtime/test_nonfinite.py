"""Gradients that are not finite on one rank: named before the average hides where they are from."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from composable_shard import FlatShard, ShardingStrategy, clip_grad_norm_, fully_shard, no_sync
from composable_shard.comm.trace import count_collectives
from tests.helpers import distributed
from tests.models import Net, replica_mesh, shard_blocks

NAMED = (
    r"the gradient of parameter '{}' is not finite on rank 1, the first one of this backward, "
    r"before the average over the ranks is taken. No gradient was published"
)


class _Spoilt(torch.autograd.Function):
    """Identity whose gradient is not finite on rank 1."""

    @staticmethod
    def forward(ctx: object, x: Tensor, value: float) -> Tensor:
        ctx.value = value  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        value: float = ctx.value  # type: ignore[attr-defined]
        return (grad * value if dist.get_rank() else grad), None


class _Spoiling(nn.Module):
    """A net in whose backward a value appears between two blocks."""

    def __init__(self, value: float = math.nan) -> None:
        super().__init__()
        self.net = Net()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        x = self.net.inp(x)
        for index, block in enumerate(self.net.blocks):
            x = block(x)
            if index == 1:
                x = _Spoilt.apply(x, self.value)
        return self.net.out(x)


def _sharded(value: float = math.nan, **options: object) -> _Spoiling:
    torch.manual_seed(0)
    model = _Spoiling(value)
    for block in model.net.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def _run_spoilt(model: nn.Module) -> None:
    model(torch.ones(2, 5)).square().sum().backward()


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(2)
def test_l_nonfinite_first_parameter_and_rank_are_named(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Non-finite: the same error on all ranks; gradients are dropped, and the next ones right."""
    options = {"strategy": strategy, "use_orig_params": use_orig_params}
    for value in (math.nan, math.inf):
        model = _sharded(value, check_for_nan_in_grad=True, **options)
        with pytest.raises(RuntimeError, match=NAMED.format("net.blocks.1.down.bias")):
            _run_spoilt(model)
        assert all(param.grad is None for param in model.parameters())
        model.value = 2.0
        other = _sharded(2.0, **options)
        for each in (model, other):
            _run_spoilt(each)
        assert clip_grad_norm_(model, 1.0) == clip_grad_norm_(other, 1.0)


@distributed(2)
def test_l_nonfinite_costs_nothing_where_it_is_off() -> None:
    """No op and no collective more; where it is on, one all-gather for each backward."""
    numbers = {}
    for checks in (False, True):
        model = _sharded(1.0, check_for_nan_in_grad=checks)
        _run_spoilt(model)
        with count_collectives() as log, profile(activities=[ProfilerActivity.CPU]) as seen:
            _run_spoilt(model)
        ops = sum(1 for event in seen.events() if event.name.startswith("aten::"))
        numbers[checks] = len(log.events), ops
    assert numbers[True][0] == numbers[False][0] + 1
    assert numbers[True][1] > numbers[False][1]
    plain = _sharded(1.0)
    _run_spoilt(plain)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        _run_spoilt(plain)
    assert sum(1 for e in seen.events() if e.name.startswith("aten::")) == numbers[False][1]


@distributed(2, on_device=True)
def test_l_nonfinite_of_an_earlier_microbatch() -> None:
    """Found when it is reduced."""
    model = _sharded(math.nan, check_for_nan_in_grad=True)
    with no_sync(model):
        _run_spoilt(model)
    model.value = 1.0
    with pytest.raises(RuntimeError, match=NAMED.format("net.blocks.1.down.bias")):
        _run_spoilt(model)


@distributed(4)
def test_l_nonfinite_over_replicas() -> None:
    """And with buckets, offload and half precision."""
    mesh = replica_mesh(2, 2)
    net = Net()
    shard_blocks(net, mesh=mesh, check_for_nan_in_grad=True, bucket_cap_mb=1)
    net.out.weight.register_hook(lambda grad: grad * math.nan if dist.get_rank() == 3 else grad)
    with pytest.raises(RuntimeError, match=r"'out.weight' is not finite on rank 3"):
        _run_spoilt(net)


@distributed(1)
def test_l_nonfinite_on_one_rank() -> None:
    """Nothing is averaged, and the option works."""
    net = Net()
    shard_blocks(net, check_for_nan_in_grad=True)
    net.out.weight.register_hook(lambda grad: grad * math.nan)
    with pytest.raises(RuntimeError, match=r"'out.weight' is not finite on rank 0"):
        _run_spoilt(net)
    assert isinstance(net.out.weight, FlatShard)
