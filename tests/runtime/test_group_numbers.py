"""Numbers in the groups of optimizers that differ between ranks: found by the next backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from composable_shard import ShardingStrategy, count_collectives
from tests.common import device
from tests.device.running import on_device
from tests.harness.ranks import distributed
from tests.programs.models import Net, loss_of, make_net, shard_blocks

_STRATEGIES = list(ShardingStrategy)


def _step_all(model: nn.Module, *optimizers: Optimizer) -> None:
    loss_of(model).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("granularity", ["element", "row", "param"])
@pytest.mark.parametrize("strategy", _STRATEGIES)
@distributed(2)
def test_a_rate_of_one_rank_is_named_before_it_is_used(
    strategy: ShardingStrategy, granularity: str
) -> None:
    """As a scheduler sets it that watches this rank's loss: group, key, both sides."""
    model = make_net(strategy=strategy, granularity=granularity)
    first, second = list(model.parameters())[:2], list(model.parameters())[2:]
    optimizer = AdamW([{"params": first}, {"params": second}], lr=0.25)
    _step_all(model, optimizer)
    optimizer.param_groups[1]["lr"] /= 1 + dist.get_rank()
    with pytest.raises(RuntimeError, match="not in step") as caught:
        loss_of(model).backward()
    assert "rank 0 is in a step of AdamW with param_groups[1]['lr'] = 0.25;" in str(caught.value)
    assert "rank 1 is in a step of AdamW with param_groups[1]['lr'] = 0.125." in str(caught.value)
    assert all(param.grad is None for param in model.parameters())


_DIFFERENT: dict[str, tuple[object, object]] = {
    "int": (1, 2),
    "flag": (True, False),
    "word": ("cosine", "linear"),
    "betas": ((0.9, 0.99), (0.9, 0.95)),
    "list": ([0.9, 0.99], [0.9, 0.95]),
    "tensor": (torch.tensor(1.0), torch.tensor(2.0)),
    "vector of one": (torch.tensor([1.0]), torch.tensor([2.0])),
    "is unset": (1.0, None),
}


@pytest.mark.parametrize("key", _DIFFERENT)
@distributed(2)
def test_every_kind_of_number_is_compared(key: str) -> None:
    """Also one that a rank alone has, which is missing on the other."""
    model = make_net()
    optimizer = SGD(model.parameters(), lr=0.1)
    for value in (_DIFFERENT[key][0], torch.ones(2), object()):
        optimizer.param_groups[0][key] = value
        _step_all(model, optimizer)
    optimizer.param_groups[0][key] = _DIFFERENT[key][dist.get_rank()]
    with pytest.raises(RuntimeError, match=rf"rank 1 is in .*param_groups\[0\]\['{key}'\] = "):
        _step_all(model, optimizer)
    optimizer.param_groups[0].pop(key)
    optimizer.step()
    _step_all(model, optimizer)
    if dist.get_rank():
        optimizer.param_groups[0][key] = 1
    with pytest.raises(RuntimeError, match=rf"rank 0 is in .*param_groups\[0\]\['{key}'\] missing"):
        _step_all(model, optimizer)


@distributed(2)
def test_settings_of_a_rank_are_its_own() -> None:
    """How it computes a step, the seed that it draws with, and whatever is no number."""
    model = make_net()
    optimizer = SGD(model.parameters(), lr=0.1)
    group = optimizer.param_groups[0]
    rank = dist.get_rank()
    group["foreach"], group["seed"] = bool(rank), rank
    group["noise"], group["hook"] = torch.full((2,), float(rank)), object()
    before = _first_value(model)
    for _ in range(3):
        _step_all(model, optimizer)
    assert not torch.equal(_first_value(model), before)


def _first_value(model: nn.Module) -> Tensor:
    param: Any = next(iter(model.parameters()))
    return param.detach().full_tensor().clone()  # type: ignore[no-any-return]


def _one_per_param(params: list[nn.Parameter]) -> list[Optimizer]:
    return [SGD([param], lr=0.1 + dist.get_rank()) for param in params]


def _other_groups(params: list[nn.Parameter]) -> list[Optimizer]:
    return [SGD([{"params": [param]} for param in params], lr=0.1 + dist.get_rank())]


@pytest.mark.parametrize("build", [_one_per_param, _other_groups])
@distributed(2)
def test_optimizers_that_a_rank_has_alone_are_not_compared(
    build: Callable[[list[nn.Parameter]], list[Optimizer]],
) -> None:
    """For the parameters of which it holds something; the ranks learn of it once."""
    model = make_net(granularity="param")
    params: list[Any] = list(model.parameters())
    held = [param for param in params if param.to_local().numel()]
    optimizers = build(held if dist.get_rank() else params)
    optimizers += [] if len(optimizers) == 1 else [SGD(params, lr=0.0)]
    same = make_net(granularity="param")
    for _ in range(12):  # by then identities are not exchanged any more
        _step_all(model, *optimizers)
        _step_all(same, SGD(same.parameters(), lr=0.1))
    assert _num_collectives(model, *optimizers) == _num_collectives(same)


@distributed(2)
def test_only_kinds_of_optimizers_that_ranks_differ_in_are_left_out() -> None:
    """Others of the model are compared, in that backward too, and so is this kind of others."""
    model = make_net(granularity="param")
    params: list[Any] = list(model.parameters())
    both = AdamW(params, lr=0.1)
    own = [SGD([param], lr=0.1 + dist.get_rank()) for param in params[: 3 + dist.get_rank()]]
    both.param_groups[0]["lr"] *= 1 + dist.get_rank()
    _step_all(model, *own, both)
    with pytest.raises(RuntimeError, match=r"AdamW with param_groups\[0\]\['lr'\] = 0\.2"):
        _step_all(model, *own, both)
    both.param_groups[0]["lr"] = 0.1
    for _ in range(3):
        _step_all(model, *own, both)
    both.param_groups[0]["lr"] *= 1 + dist.get_rank()
    with pytest.raises(RuntimeError, match=r"AdamW with param_groups\[0\]\['lr'\] = 0\.2"):
        _step_all(model, *own, both)
    other = make_net(granularity="param")
    optimizer = SGD(other.parameters(), lr=0.1)
    _step_all(other, optimizer)
    optimizer.param_groups[0]["lr"] *= 1 + dist.get_rank()
    with pytest.raises(RuntimeError, match=r"SGD with param_groups\[0\]\['lr'\] = 0\.2"):
        _step_all(other, optimizer)


def _num_collectives(model: nn.Module, *optimizers: Optimizer) -> int:
    with count_collectives() as log:
        _step_all(model, *optimizers)
    return len(log.events)


class _GlobalStep(Optimizer):
    """Divides its rate by the largest gradient of all parameters, which it keeps in the group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"d": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step with the last step's `d`."""
        group = self.param_groups[0]
        stepped = [param for param in group["params"] if param.grad is not None]
        for param in stepped:
            param.sub_(param.grad, alpha=0.1 / group["d"])
        group["d"] += sum(param.grad.norm().item() for param in stepped)


@distributed(2)
def test_a_step_size_of_all_parameters_is_refused_where_ranks_see_their_own() -> None:
    """On every rank, and right with another granularity."""
    model = make_net()
    optimizer = _GlobalStep(model.parameters())
    for _ in range(3):
        _step_all(model, optimizer)
    model = make_net(granularity="param")
    optimizer = _GlobalStep(model.parameters())
    _step_all(model, optimizer)
    with pytest.raises(RuntimeError, match=r"_GlobalStep.*\['d'\] = .*needs a granularity other"):
        _step_all(model, optimizer)


@on_device(num_ranks=2)
def test_the_host_reads_no_number_of_a_device() -> None:
    """It would wait in each step; a rate that the host holds is compared, two steps later."""
    torch.manual_seed(0)
    model: nn.Module = Net(2).to(device.NAME)
    shard_blocks(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    group = optimizer.param_groups[0]
    group["unread"] = torch.tensor(float(dist.get_rank()), device=device.NAME)
    x = torch.randn(4, 5, device=device.NAME)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        step()
    group["lr"] += dist.get_rank()
    step()
    step()
    with pytest.raises(RuntimeError, match=r"SGD with param_groups\[0\]\['lr'\] = 1\.1"):
        step()
