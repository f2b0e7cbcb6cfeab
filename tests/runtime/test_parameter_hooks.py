"""What users hang on parameters: tensor hooks, post-accumulate hooks, attributes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from composable_shard import FlatShard
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.programs.models import (
    Net,
    Twins,
    assert_at_rest,
    assert_gradients_equal,
    average_gradients,
    loss_of_shape,
    shard_blocks,
)


class _GradientLog:
    """A hook that counts its calls and keeps the gradients it saw."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, value: Tensor) -> None:
        grad = value.grad if isinstance(value, nn.Parameter) else value
        assert grad is not None
        self.seen.append(grad.full_tensor() if isinstance(grad, FlatShard) else grad.clone())


@pytest.mark.parametrize("is_before", [True, False])
@distributed(2)
def test_tensor_hook_on_a_parameter(is_before: bool) -> None:
    """`register_hook` sees this rank's full gradient, once, and may change it."""
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    logs = [_GradientLog(), _GradientLog()]
    for net, log in zip((plain, model), logs, strict=True):
        if not is_before and net is model:
            shard_blocks(model)
        net.blocks[0].up.weight.register_hook(log)
        net.blocks[1].up.weight.register_hook(lambda grad: 2 * grad)
        if is_before and net is model:
            shard_blocks(model)
    for net in (plain, model):
        loss_of_shape(4, 5)(net).backward()
    assert len(logs[0].seen) == len(logs[1].seen) == 1
    assert_equal(logs[1].seen[0], logs[0].seen[0])
    average_gradients(plain.parameters())
    assert_gradients_equal(model, plain)


@distributed(2)
def test_removed_tensor_hook_does_not_fire() -> None:
    """The handle that `register_hook` returns removes it."""
    twins = Twins(Net, shard_blocks)
    log = _GradientLog()
    handle = twins.sharded.out.weight.register_hook(log)
    twins.step(loss_of_shape(4, 5))
    handle.remove()
    twins.step(loss_of_shape(4, 5))
    assert len(log.seen) == 1


@pytest.mark.parametrize("is_before", [True, False])
@distributed(2)
def test_post_accumulate_hook_on_a_parameter(is_before: bool) -> None:
    """It sees the final, averaged gradient, once, when all are there."""
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    log = _GradientLog()
    if is_before:
        model.blocks[0].up.weight.register_post_accumulate_grad_hook(log)
    shard_blocks(model)
    if not is_before:
        model.blocks[0].up.weight.register_post_accumulate_grad_hook(log)
    for net in (plain, model):
        loss_of_shape(4, 5)(net).backward()
    average_gradients([plain.blocks[0].up.weight])
    assert len(log.seen) == 1
    assert_equal(log.seen[0], plain.blocks[0].up.weight.grad)


@pytest.mark.fast
@distributed(2, on_device=True)
def test_optimizer_in_the_backward() -> None:
    """A post-accumulate hook may step its parameter's optimizer and drop the gradient."""
    twins = Twins(Net, shard_blocks)
    optimizers = {
        param: torch.optim.AdamW([param], lr=0.05)
        for model in twins
        for param in model.parameters()
    }

    def step(param: nn.Parameter) -> None:
        optimizers[param].step()
        param.grad = None

    for param in twins.sharded.parameters():
        param.register_post_accumulate_grad_hook(step)
    for index in range(2):
        twins.backward(twins.plain, loss_of_shape(4, 5, step=index)(twins.plain))
        for param in twins.plain.parameters():
            step(param)
        loss_of_shape(4, 5, step=index)(twins.sharded).backward()
    twins.assert_equal_parameters()
    assert all(param.grad is None for param in twins.sharded.parameters())
    assert_at_rest(twins.sharded)


@distributed(2)
def test_attributes_of_parameters_stay() -> None:
    """What users write on a parameter is there before, during and after a step."""
    model = Net()
    model.inp.weight.lr_scale = 0.5
    shard_blocks(model)
    model.out.weight.lr_scale = 0.25
    loss_of_shape(4, 5)(model).backward()
    assert model.inp.weight.lr_scale == 0.5
    assert model.out.weight.lr_scale == 0.25
