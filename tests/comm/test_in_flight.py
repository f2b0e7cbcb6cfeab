"""When a forward or backward returns, nothing that the library issued is still in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from composable_shard import (
    ShardingStrategy,
    fully_shard,
    set_requires_all_reduce,
    set_reshard_after_backward,
)
from tests.harness.ranks import distributed
from tests.programs.models import Net, Optional, rank_input, shard_blocks, square_mean

_ISSUING = ("allreduce", "broadcast", "send", "recv", "_allgather_base", "_reduce_scatter_base")


@contextmanager
def _recorded() -> Iterator[list[dist.Work]]:
    """Record the work of every collective that this process issues on any group."""
    works: list[dist.Work] = []

    def recording(issue: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
        def call(*args: Any, **kwargs: Any) -> dist.Work:
            works.append(issue(*args, **kwargs))
            return works[-1]

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in _ISSUING:
            patch.setattr(dist.ProcessGroup, name, recording(getattr(dist.ProcessGroup, name)))
        yield works


def _assert_nothing_in_flight(works: list[dist.Work]) -> None:
    assert works
    assert all(work.is_completed() for work in works)
    works.clear()


@pytest.mark.parametrize("strategy", ShardingStrategy)
@distributed(2, 3)
def test_nothing_is_in_flight_after_a_step(strategy: ShardingStrategy) -> None:
    """A rank that used all its parameters waits for the exchange of their use too."""
    torch.manual_seed(0)
    model = Net()
    shard_blocks(model, strategy=strategy)
    square_mean(model(rank_input(4, 5))).backward()
    with _recorded() as works:
        for _ in range(5):
            square_mean(model(rank_input(4, 5))).backward()
            _assert_nothing_in_flight(works)


@pytest.mark.parametrize("strategy", ShardingStrategy)
@distributed(4)
def test_nothing_is_in_flight_on_a_2d_mesh(strategy: ShardingStrategy) -> None:
    """The deferred all-reduce and the sub-groups' exchanges included."""
    torch.manual_seed(0)
    model = Net()
    shard_blocks(model, strategy=strategy, mesh=init_device_mesh("cpu", (2, 2)))
    square_mean(model(rank_input(4, 5))).backward()
    with _recorded() as works:
        for flag in (False, True):
            set_requires_all_reduce(model, flag)
            square_mean(model(rank_input(4, 5))).backward()
            if works:
                _assert_nothing_in_flight(works)


@pytest.mark.fast
@distributed(2)
def test_nothing_is_in_flight_where_a_rank_lacks_a_gradient() -> None:
    """Whether this rank used all its parameters or not."""
    torch.manual_seed(0)
    model = fully_shard(Optional())
    used = [0, 1, 2] if dist.get_rank() else [0, 2]
    square_mean(model(rank_input(4, 5), used)).backward()
    with _recorded() as works:
        for _ in range(5):
            square_mean(model(rank_input(4, 5), used)).backward()
            _assert_nothing_in_flight(works)


@distributed(2)
def test_a_gather_ahead_for_a_unit_that_a_forward_skips_is_waited_for() -> None:
    """Also where the policy keeps the values."""
    model = Optional()
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(model)
    with torch.no_grad():
        model(rank_input(4, 5), [0, 1, 2])  # the order that the next forward expects
        for param in model.parameters():
            param.mul_(1.0)
    with _recorded() as works:
        model(rank_input(4, 5), [0])
        _assert_nothing_in_flight(works)


class _Cut(nn.Module):
    """Three layers, of which a backward reaches the last one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[2](self.layers[1](self.layers[0](x)).detach())


@distributed(2)
def test_a_gather_ahead_for_a_unit_that_a_backward_skips_is_waited_for() -> None:
    """Also where the values are kept after a backward."""
    model = _Cut()
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=True)
    set_reshard_after_backward(fully_shard(model), False)
    with _recorded() as works:
        loss = square_mean(model(rank_input(4, 5)))
        _assert_nothing_in_flight(works)
        loss.backward()
        _assert_nothing_in_flight(works)
