"""Small gradients wait and are packed together: the same values, at the same points of a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from composable_shard import FlatParamHandle, ShardingStrategy, get_handles, no_sync
from composable_shard.flat_param.grad_pieces import SmallGradients, write_gradients
from tests.helpers import assert_equal, distributed
from tests.models import Twins, rank_input, shard_root

pytestmark = pytest.mark.fast

BIG = 130  # 130 * 130 * 4 bytes are more than may wait


def _views(*numels: int) -> list[Tensor]:
    return [torch.empty(numel) for numel in numels]


def _arrived_at_once(small: SmallGradients, *indices: int) -> list[int]:
    """Return which of these gradients arrived at once."""
    arrived: list[int] = []
    for index in indices:
        small.receive(index, arrived.append, torch.empty(0))
    return arrived


def test_gradients_wait_while_there_is_room() -> None:
    """Those that need more arrive, and so do large ones, second ones, and all before `open`."""
    small = SmallGradients()
    small.bind(_views(100, 16384, 8000, 8000, 1000, 50))
    assert _arrived_at_once(small, 0, 5) == [0, 5]
    small.open([False, False, False, False, False, True])
    assert _arrived_at_once(small, 5, 1, 0, 2, 0) == [5, 1, 0]
    assert small.indices == [0, 2]
    assert _arrived_at_once(small, 3, 4) == [
        4
    ]  # 4 * (100 + 8000 + 8000) bytes leave no room for it
    assert small.take() == [0, 2, 3]
    assert _arrived_at_once(small, 4) == []
    small.close()
    assert small.indices == []
    assert _arrived_at_once(small, 4) == [4]


@pytest.mark.parametrize("factor", [None, 0.5])
def test_what_waits_is_written_in_one_go(factor: float | None) -> None:
    """Sparse gradients too; parameters without a gradient, or that are gone, are passed over."""
    params = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
    params[0].grad = torch.tensor([1.0, 2.0, 3.0])
    params[2].grad = torch.tensor([0.0, 4.0, 0.0]).to_sparse()
    views = [torch.full((3,), -1.0) for _ in range(4)]
    scalar = None if factor is None else torch.tensor(factor)
    assert write_gradients(views, [*params, None], scalar) == [0, 2]
    assert write_gradients(views, [*params, None], scalar) == []
    scale = factor or 1.0
    assert_equal(views[0], torch.tensor([1.0, 2.0, 3.0]) * scale)
    assert_equal(views[2], torch.tensor([0.0, 4.0, 0.0]) * scale)
    assert all(bool((views[index] == -1).all()) for index in (1, 3))
    assert all(param.grad is None for param in params)


class _SmallAndBig(nn.Module):
    """Small parameters around one that is too large to wait; one is used twice, one not always."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, BIG)
        self.big = nn.Linear(BIG, BIG)
        self.twice = nn.Parameter(torch.linspace(-1, 1, BIG))
        self.unused = nn.Parameter(torch.ones(5))
        self.last = nn.Linear(BIG, 3)
        self.uses_all = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.twice
        hidden = torch.tanh(self.big(hidden)) * self.twice
        y = self.last(hidden)
        return y + self.unused.sum() if self.uses_all else y


def _loss_of_small_and_big(model: nn.Module, step: int) -> Tensor:
    return model(rank_input(4, 6, step=step)).square().mean()


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@distributed(2, 3)
def test_gradients_that_wait_equal_the_mean(strategy: ShardingStrategy) -> None:
    """Only the first gradient of the unit and the large one arrive by themselves."""
    twins = Twins(_SmallAndBig, shard_root, strategy=strategy)
    (handle,) = get_handles(twins.sharded)
    for step in range(3):
        for model in twins:
            model.uses_all = torch.distributed.get_rank() > 0 or step == 2
        twins.step(partial(_loss_of_small_and_big, step=step))
        for model in twins:
            model.zero_grad()
        if step == 0:
            arrived = _log_arrivals(handle)
    names = [handle.entries[index].label.fqn for index in arrived]
    assert names.count("big.weight") == 2
    assert len(names) == 4  # and one other in each of two steps


def _log_arrivals(handle: FlatParamHandle) -> list[int]:
    arrived: list[int] = []
    on_gradient = handle._on_gradient

    def log(handle: FlatParamHandle, index: int) -> None:
        arrived.append(index)
        on_gradient(handle, index)  # type: ignore[misc]

    handle._on_gradient = log  # type: ignore[assignment]
    return arrived


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@distributed(2)
def test_gradients_that_wait_add_up_over_microbatches(strategy: ShardingStrategy) -> None:
    """With `no_sync` on all microbatches but the last."""
    twins = Twins(_SmallAndBig, shard_root, strategy=strategy)
    for step in range(3):
        twins.backward(twins.plain, _loss_of_small_and_big(twins.plain, step))
        with no_sync(twins.sharded) if step < 2 else nullcontext():
            twins.backward(twins.sharded, _loss_of_small_and_big(twins.sharded, step))
    for param, plain in zip(twins.sharded.parameters(), twins.plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), plain.grad, rtol=1e-5, atol=1e-7)


@distributed(2)
def test_an_aborted_backward_forgets_what_waits() -> None:
    """The next one has its own gradients, and nothing of the one before."""
    twins = Twins(_SmallAndBig, shard_root)
    (handle,) = get_handles(twins.sharded)
    twins.step(partial(_loss_of_small_and_big, step=0))
    for model in twins:
        model.zero_grad()
    waited: list[int] = []

    def fail(_: Tensor) -> None:
        waited.extend(handle.grad.small.indices)
        raise RuntimeError("planned")

    x = rank_input(4, 6, step=1).requires_grad_()
    x.register_hook(fail)  # the last gradient of the backward
    with pytest.raises(RuntimeError, match="planned"):
        twins.sharded(x).square().mean().backward()
    assert waited
    assert handle.grad.small.indices == []
    twins.step(partial(_loss_of_small_and_big, step=2))


@distributed(2)
def test_a_gradient_that_a_hook_takes_away_is_none() -> None:
    """A hook on the full parameter, put there in a forward, may keep the gradient to itself."""
    for strategy in ShardingStrategy:
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
        shard_root(model, strategy=strategy)
        taken: list[Tensor | None] = []

        def take(param: Tensor, taken: list[Tensor | None] = taken) -> None:
            taken.append(param.grad)
            param.grad = None

        def hook(module: nn.Module, *_: object, take: Callable[..., None] = take) -> None:
            module.bias.register_post_accumulate_grad_hook(take)

        handle = model[0].register_forward_pre_hook(hook)
        model(rank_input(2, 6)).sum().backward()
        handle.remove()
        assert len(taken) == 1
        assert taken[0] is not None
        assert model[0].bias.grad is None
        assert model[0].weight.grad is not None
