"""Optimizers that use second derivatives: refused by name, and right with full parameters."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from composable_shard import fully_shard, reshard, unshard
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed


class Hutchinson(Optimizer):
    """Divides by the size of the Hessian's diagonal, as AdaHessian and SophiaH estimate it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None, hessian: Sequence[Tensor] = ()) -> None:
        """Estimate the diagonal, unless it is given for all parameters."""
        params = list(self.param_groups[0]["params"])
        for param in params:
            self.state[param].setdefault("diagonal", torch.zeros_like(param))
        if not hessian:
            params = [param for param in params if param.grad is not None]
            noise = [torch.randn_like(param) for param in params]
            products = torch.autograd.grad([param.grad for param in params], params, noise)
            hessian = [product * each for product, each in zip(products, noise, strict=True)]
        for param, estimate in zip(params, hessian, strict=True):
            diagonal = self.state[param]["diagonal"].mul_(0.9).addcmul_(estimate, estimate)
            if param.grad is not None:
                param.addcdiv_(param.grad, diagonal.sqrt().add_(1.0), value=-0.1)


def _both_nets(granularity: Any) -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    sharded = copy.deepcopy(plain)
    fully_shard(sharded[0], granularity=granularity)
    return plain, fully_shard(sharded, granularity=granularity)


def _loss_of_rank(model: nn.Module, rank: int, step: int) -> Tensor:
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(inputs).square().mean()


def _diagonal(loss: Tensor, params: Sequence[Tensor], step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    noise = [torch.randn(param.shape, generator=generator) for param in params]
    gradients = torch.autograd.grad(loss, params, create_graph=True)
    products = torch.autograd.grad(gradients, params, noise)
    return [product * each for product, each in zip(products, noise, strict=True)]


@pytest.mark.parametrize("granularity", ["element", "row", "param"])
@distributed(2)
def test_second_derivatives_of_gradients_at_rest_are_refused(granularity: str) -> None:
    """With the calls between which they work; the next step is right."""
    plain, model = _both_nets(granularity)
    optimizer = Hutchinson(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of cycles that create_graph can make
        _loss_of_rank(model, 0, 0).backward(create_graph=True)
    with pytest.raises(RuntimeError, match="gives no graph to gradients of sharded") as caught:
        optimizer.step()
    assert "between unshard(model, recurse=True) and reshard(model, recurse=True)" in str(
        caught.value
    )
    optimizer.zero_grad()
    for each in (plain, model):
        stepped = torch.optim.SGD(each.parameters(), lr=0.1)
        _loss_of_rank(each, 0, 1).backward()
        stepped.step()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert_equal(param.detach().full_tensor(), expected.detach())


@pytest.mark.parametrize("granularity", ["element", "row", "param"])
@distributed(2)
def test_second_derivatives_of_full_parameters_are_right(granularity: str) -> None:
    """Taken between unshard and reshard, averaged over the ranks and given to the step."""
    plain, model = _both_nets(granularity)
    optimizers = [Hutchinson(each.parameters()) for each in (plain, model)]
    for step in range(3):
        loss = (_loss_of_rank(plain, 0, step) + _loss_of_rank(plain, 1, step)) / 2
        expected = _diagonal(loss, list(plain.parameters()), step)
        ((_loss_of_rank(plain, 0, step) + _loss_of_rank(plain, 1, step)) / 2).backward()
        optimizers[0].step(hessian=expected)
        unshard(model, recurse=True)
        loss = _loss_of_rank(model, dist.get_rank(), step)
        found = _diagonal(loss, list(model.parameters()), step)
        reshard(model, recurse=True)
        for each in found:
            dist.all_reduce(each, dist.ReduceOp.SUM)
            each /= 2
        _loss_of_rank(model, dist.get_rank(), step).backward()
        optimizers[1].step(hessian=found)
        for optimizer in optimizers:
            optimizer.zero_grad()
    for param, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.detach().full_tensor(), wanted.detach())
