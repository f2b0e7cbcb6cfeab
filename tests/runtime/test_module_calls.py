"""A module that runs once, several times, inside itself or never gets the unsharded gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from composable_shard.comm.trace import count_collectives
from tests.harness.assertions import assert_equal
from tests.harness.pairs import pairwise
from tests.harness.ranks import distributed
from tests.programs.models import (
    Net,
    Twins,
    assert_at_rest,
    assert_is_slice,
    loss_of_shape,
    rank_input,
    shard_blocks,
    shard_children,
    shard_root,
    square_mean,
    train_by,
)
from tests.programs.modules import (
    ALL_USED,
    NONE_USED,
    CallsItself,
    Choosing,
    OptionalLayer,
    OptionalStack,
    RepeatedBlock,
    Sandwich,
    shard_linears,
)


@distributed(2, 3, on_device=True)
def test_training_equals_the_unsharded_model() -> None:
    """Losses, gradients and parameters agree over steps."""
    twins = Twins(Net, shard_blocks)
    train_by(twins, lambda step: loss_of_shape(4, 5, step=step), steps=3)
    assert_at_rest(twins.sharded)


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@distributed(2, on_device=True)
def test_module_called_twice(reshard_after_forward: bool | None) -> None:
    """The gradients of both calls are added and reduced once."""
    twins = Twins(RepeatedBlock, reshard_after_forward=reshard_after_forward)
    for step in range(2):
        with count_collectives() as counts:
            twins.step(loss_of_shape(4, 15, step=step))
        twins.zero_grad()
    assert counts.count("reduce_scatter") == 2  # the root has no parameters left
    assert_at_rest(twins.sharded)


@distributed(2)
def test_module_called_twice_with_others_between() -> None:
    """A unit that runs first and last is reduced when its first use has passed."""

    twins = Twins(lambda: Sandwich(), shard_children)
    train_by(twins, lambda step: loss_of_shape(4, 15, step=step))
    assert_at_rest(twins.sharded)


@pytest.mark.parametrize("shard", [shard_root, shard_children])
@distributed(2)
def test_module_that_calls_itself(shard: Callable[..., None]) -> None:
    """Inner calls neither gather again nor free what the outer one needs."""
    twins = Twins(CallsItself, shard)
    train_by(twins, lambda step: loss_of_shape(4, 15, step=step))
    assert_at_rest(twins.sharded)


@distributed(2)
def test_unit_that_is_not_called_gets_no_gradient() -> None:
    """Its parameters keep None on all ranks, whatever ran in the step before."""
    twins = Twins(Choosing, shard_linears)
    x = rank_input(4, 15)
    for used in ((0, 1, 2), (0, 2), (1,), (), (2, 1, 0)):
        twins.step(lambda model, used=used: square_mean(model(x, used)))
        not_used = {0, 1, 2} - set(used)
        assert all(twins.sharded.layers[i].weight.grad is None for i in not_used)
        twins.zero_grad()
    assert_at_rest(twins.sharded)


class _OptionalLast(OptionalLayer):
    def forward(self, x: Tensor, is_used: bool) -> Tensor:
        x = torch.tanh(self.always(x))
        return torch.tanh(self.optional(x)) if is_used else x


def _make_last_stack() -> nn.Module:
    return OptionalStack(_OptionalLast)


@pytest.mark.parametrize("make", [OptionalStack, _make_last_stack])
@distributed(2)
def test_parameter_unused_on_all_ranks_gets_no_gradient(make: Callable[[], nn.Module]) -> None:
    """Inside a used unit it keeps None, not zeros; it gets one when it is used again."""
    twins = Twins(make, shard_blocks)
    patterns = (ALL_USED, NONE_USED, NONE_USED, (False, True, False), ALL_USED, (True, False, True))
    for step, used in enumerate(patterns):
        x = rank_input(4, 5, step=step)
        twins.step(lambda model, x=x, used=used: square_mean(model(x, used)))
        twins.zero_grad()
    assert_at_rest(twins.sharded)


@pytest.mark.parametrize(
    *pairwise(
        make=[OptionalStack, _make_last_stack],
        reshard_after_forward=[None, False],
        world_size=(2, 3),
    )
)
@distributed(on_device=True)
def test_parameter_used_on_one_rank_only(
    make: Callable[[], nn.Module], reshard_after_forward: bool | None
) -> None:
    """The other ranks contribute zeros and nobody hangs, in changing patterns."""
    twins = Twins(make, shard_blocks, reshard_after_forward=reshard_after_forward)
    is_first = dist.get_rank() == 0
    mixed = (is_first, not is_first, is_first)
    optimizers = twins.optimizers(torch.optim.SGD)
    for step, used in enumerate((mixed, NONE_USED, mixed, ALL_USED, (not is_first,) * 3, mixed)):
        x = rank_input(4, 5, step=step)
        twins.step(lambda model, x=x, used=used: square_mean(model(x, used)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_at_rest(twins.sharded)


@pytest.mark.fast
@distributed(2)
def test_unused_parameters_equal_ddp() -> None:
    """Gradients are those of DistributedDataParallel(find_unused_parameters=True)."""
    plain = OptionalStack()
    model = copy.deepcopy(plain)
    ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    shard_blocks(model)
    is_first = dist.get_rank() == 0
    for step, used in enumerate((ALL_USED, (is_first, False, not is_first), ALL_USED)):
        x = rank_input(4, 5, step=step)
        losses = [square_mean(net(x, used)) for net in (ddp, model)]
        for loss in losses:
            loss.backward()
        assert_equal(losses[1], losses[0])
        for (name, param), expected in zip(
            model.named_parameters(), plain.parameters(), strict=True
        ):
            assert (param.grad is None) == (expected.grad is None), name
            if expected.grad is not None:
                assert_is_slice(param.grad, expected.grad, name)
        plain.zero_grad()
        model.zero_grad()


class _Detached(nn.Module):
    """Uses a weight without its gradient too, before the place that makes the gradient."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(15, 15)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        weight = weight.detach() if self.kind == "detach" else weight.data
        x = torch.tanh(nn.functional.linear(x, weight))
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize("kind", ["detach", "data"])
@distributed(2)
def test_weight_that_is_needed_after_its_gradient(kind: str) -> None:
    """The last gradient of a unit need not be the last use of its values."""
    twins = Twins(lambda: nn.Sequential(*(_Detached(kind) for _ in range(3))))
    train_by(twins, lambda step: loss_of_shape(4, 15, step=step))
    assert_at_rest(twins.sharded)
