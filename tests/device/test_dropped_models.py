"""A model that is dropped while its collectives run leaves no memory that they still write to."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from composable_shard import ShardingStrategy, fully_shard
from tests.common import device
from tests.device.running import on_device
from tests.device.test_launches import issuing_alone
from tests.runtime.test_failures import Planned

WIDTH = 32


def _make_units(strategy: ShardingStrategy) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(device.NAME)
    for layer in model:
        fully_shard(layer, strategy=strategy)
    fully_shard(model, strategy=strategy)
    return model


def _end_with_planned(*_: object) -> None:
    raise Planned


def _let_backward_fail(module: nn.Module, args: object, output: Tensor) -> None:
    output.register_hook(_end_with_planned)


def _drop_in_backward(strategy: ShardingStrategy) -> None:
    """End a backward when the last two units are reduced, and give up the model."""
    model = _make_units(strategy)
    model(torch.ones(2, WIDTH, device=device.NAME)).sum().backward()
    model[0].register_forward_hook(_let_backward_fail)
    with pytest.raises(Planned):
        model(torch.ones(2, WIDTH, device=device.NAME)).sum().backward()


def _drop_in_forward(strategy: ShardingStrategy) -> None:
    """End a forward when the next unit is being gathered, and give up the model."""
    model = _make_units(strategy)
    model(torch.ones(2, WIDTH, device=device.NAME)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model[1].register_forward_hook(_end_with_planned)
    with pytest.raises(Planned):
        model(torch.ones(2, WIDTH, device=device.NAME))


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@pytest.mark.parametrize("fail", [_drop_in_backward, _drop_in_forward])
@on_device(num_ranks=2)
def test_what_is_allocated_next_stays_as_it_is(fail: object, strategy: ShardingStrategy) -> None:
    """By value; a race would fail it too, where the delays hide it."""
    assert callable(fail)
    device.configure("slow_side", delay_us=2_000, poison=False)
    with issuing_alone(True):  # a launch of all units would be waited for
        fail(strategy)
    gc.collect()
    numels = [WIDTH, WIDTH * WIDTH, WIDTH * WIDTH + WIDTH, (WIDTH * WIDTH + WIDTH) // 2]
    others: list[Tensor] = [torch.zeros(n, device=device.NAME) for n in numels * 8]
    device.synchronize()
    assert [int(x.count_nonzero()) for x in others] == [0] * len(others)
