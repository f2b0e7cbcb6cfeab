"""Gradients of gradients, and of inputs alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard import no_sync, reshard
from composable_shard.comm.trace import count_collectives
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.programs.models import (
    Layer,
    Net,
    Optional,
    Twins,
    assert_at_rest,
    loss_of_shape,
    rank_input,
    shard_blocks,
    shard_root,
    square_mean,
    train_by,
)
from tests.programs.modules import RepeatedBlock


class _InnerGradient(nn.Module):
    """Differentiates a unit inside its own forward."""

    def __init__(self, create_graph: bool) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(15, 15), nn.Tanh(), nn.Linear(15, 1))
        self.last = nn.Linear(15, 3)
        self.create_graph = create_graph

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.energy(x).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=self.create_graph)
        return self.last(force) + energy


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@pytest.mark.parametrize("create_graph", [True, False])
@distributed(2, on_device=True)
def test_backward_inside_a_forward(create_graph: bool, reshard_after_forward: bool | None) -> None:
    """As for forces from an energy; without create_graph the energy needs its own graph."""
    twins = Twins(lambda: _InnerGradient(create_graph), reshard_after_forward=reshard_after_forward)

    def run(model: nn.Module) -> Tensor:
        return square_mean(model(rank_input(4, 15)))

    with torch.no_grad():
        outputs = [run(model) for model in twins]
        assert_equal(outputs[1], outputs[0])
    for _ in range(2):
        losses = [run(model) for model in twins]
        assert_equal(losses[1].detach(), losses[0].detach())
        if create_graph:
            for model, loss in zip(twins, losses, strict=True):
                twins.backward(model, loss)
            twins.assert_equal_gradients()
            twins.zero_grad()
    if create_graph:
        reshard(twins.sharded, recurse=True)  # what a graph may read stays until then
    assert_at_rest(twins.sharded, kept=twins.sharded_units(reshard_after_forward))


def _make_chain() -> nn.Module:
    return nn.Sequential(Layer(), Layer(), nn.Linear(15, 1))


@pytest.mark.parametrize("make", [_make_chain, RepeatedBlock])
@distributed(2)
def test_gradient_penalty(make: Callable[[], nn.Module]) -> None:
    """create_graph=True, then a backward through the gradient, for several steps."""
    twins = Twins(make)
    optimizers = twins.optimizers(torch.optim.SGD)
    for step in range(3):
        for model in twins:
            x = rank_input(4, 15, step=step).requires_grad_()
            loss = square_mean(model(x))
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            twins.backward(model, loss + grad.square().sum())
        twins.assert_equal_gradients()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        twins.sharded(rank_input(4, 15))
    assert_at_rest(twins.sharded)


@distributed(2, on_device=True)
def test_backward_with_create_graph() -> None:
    """The gradients of the parameters are right; their graph is not kept."""
    twins = Twins(lambda: nn.Sequential(Layer(), Layer()))
    for model in twins:
        x = rank_input(4, 15).requires_grad_()
        grads = torch.autograd.grad(square_mean(model(x)), x, create_graph=True)
        twins.backward(model, grads[0].square().sum())
    twins.assert_equal_gradients()


class _AddsLast(nn.Module):
    """A block whose last operation adds a parameter, on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Layer(), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        return y + self.last.sum() if dist.get_rank() else y


@distributed(2)
def test_a_gradient_before_the_recomputation() -> None:
    """It leaves the value in place: no rank gathers the unit once more for that."""
    twins = Twins(lambda: nn.Sequential(_AddsLast(), _AddsLast(), Layer()))
    for _ in range(2):
        for model in twins:
            y = rank_input(4, 15)
            for child in model:
                y = torch.utils.checkpoint.checkpoint(child, y, use_reentrant=False)
            loss = square_mean(y)
            twins.backward(model, loss, retain_graph=True)
            model.zero_grad()
            twins.backward(model, loss)
        twins.assert_equal_gradients()
        for model in twins:
            model.zero_grad()


@pytest.mark.fast
@distributed(2)
def test_create_graph_of_microbatches() -> None:
    """What only the first of them used is packed at the unit's end, without its graph."""
    twins = Twins(Optional, shard_root)
    for model in twins:
        for used in ([0, 1, 2], [0, 2]):
            with no_sync(twins.sharded) if len(used) == 3 else nullcontext():
                loss = square_mean(model(rank_input(4, 5), used))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch warns of cycles that this can make
                    twins.backward(model, loss, create_graph=True)
    for param, plain in zip(twins.sharded.parameters(), twins.plain.parameters(), strict=True):
        assert param.grad.requires_grad  # as the plain one; a backward through it raises
        with pytest.raises(RuntimeError, match="has no graph"):
            param.grad.sum().backward()
        torch.testing.assert_close(param.grad.full_tensor(), plain.grad.detach())


@distributed(2)
def test_input_gradients_alone_reduce_nothing() -> None:
    """`torch.autograd.grad` of the inputs leaves `.grad` alone and everything at rest."""
    twins = Twins(Net, shard_blocks)
    twins.sharded(rank_input(4, 5))
    grads = []
    with count_collectives() as counts:
        for model in twins:
            x = rank_input(4, 5).requires_grad_()
            grads += torch.autograd.grad(square_mean(model(x)), x)
    assert_equal(grads[1], grads[0])
    assert counts.count("reduce_scatter") == 0
    assert all(param.grad is None for param in twins.sharded.parameters())
    assert_at_rest(twins.sharded)


@distributed(2)
def test_backward_to_some_inputs_only() -> None:
    """`backward(inputs=[x])` gives no parameter a gradient."""
    twins = Twins(Net, shard_blocks)
    for model in twins:
        x = rank_input(4, 5).requires_grad_()
        square_mean(model(x)).backward(inputs=[x])
        assert x.grad is not None
    assert all(param.grad is None for param in twins.sharded.parameters())
    assert_at_rest(twins.sharded)
    train_by(twins, lambda step: loss_of_shape(4, 5, step=step))
