"""Gradients that share memory: with each other, with a parameter, with what a caller keeps.

Autograd shares memory between gradients where operations pass a gradient on unchanged, and lets
`.grad` of several parameters be views of it. Plain models go wrong there themselves, so what is
expected comes from `autograd.grad`, which adds nothing up.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh

from composable_shard import (
    ShardingStrategy,
    clip_grad_norm_,
    fully_shard,
    no_sync,
    set_gradient_divide_factor,
)
from tests.harness.assertions import assert_equal
from tests.harness.poison import poisoned
from tests.harness.ranks import distributed
from tests.programs.claims import assert_close, unsharded_gradients
from tests.programs.models import shard_children, shard_root

STRATEGIES = list(ShardingStrategy)


class _PassesOn(torch.autograd.Function):
    """A sum written by hand, whose backward gives one tensor to both."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return first + second

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], grads[0]


_Compute = Callable[["_Shares", Tensor], Tensor]
_PROGRAMS: dict[str, _Compute] = {
    "sum": lambda m, x: x @ (m.a + m.b),
    "views": lambda m, x: x @ (m.a.view(3, 3) + m.b.view(3, 3)),
    "transposed": lambda m, x: x @ (m.a.t() + m.b.t()),
    "stacked": lambda m, x: x @ torch.stack([m.a, m.b]).sum(0),
    "expanded": lambda m, x: x @ (m.a.expand(3, 3) + m.b.unsqueeze(0).squeeze(0)),
    "shared and private": lambda m, x: x @ (m.a + m.b) + x @ (m.a + m.c.view(3, 3)),
    "ViT, batch of 1": lambda m, x: (x[None] + m.a + m.b[None]) + m.c.view(1, 3, 3),
    "by hand": lambda m, x: x @ _PassesOn.apply(m.a, m.b),
}


class _Shares(nn.Module):
    def __init__(self, program: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.program = program
        shapes = {"a": (3, 3), "b": (3, 3), "c": (9,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64)))

    def forward(self, x: Tensor) -> Tensor:
        return _PROGRAMS[self.program](self, x)


def _sharing_inputs() -> list[Tensor]:
    """Return three microbatches, the same on all ranks."""
    torch.manual_seed(1)
    return [torch.randn(3, 3, dtype=torch.float64) for _ in range(3)]


def _expected_gradients(plain: nn.Module) -> dict[str, Tensor]:
    """Return the sums of the gradients of all microbatches, each in memory of its own."""
    total = {name: torch.zeros_like(param) for name, param in plain.named_parameters()}
    for x in _sharing_inputs():
        loss = plain(x).square().sum()
        found = torch.autograd.grad(loss, list(plain.parameters()), allow_unused=True)
        for name, gradient in zip(total, found, strict=True):
            if gradient is not None:
                total[name] = total[name] + gradient
    return total


def _assert_shared_gradients(
    model: nn.Module, expected: dict[str, Tensor], factor: float = 1.0
) -> None:
    for name, gradient in unsharded_gradients(model).items():
        found = torch.zeros_like(expected[name]) if gradient is None else gradient
        torch.testing.assert_close(found, expected[name] * factor, rtol=1e-9, atol=1e-9, msg=name)


def _on_one_rank(world_size: int) -> dict[str, Any]:
    """Return options that give a unit a mesh of one of several ranks."""
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("outer", "inner"))
    return {"mesh": mesh["inner"]}


def _train_sharing(model: nn.Module, *, puts_off: bool, scale: float = 1.0) -> None:
    *first, last = _sharing_inputs()
    for x in first:
        with no_sync(model) if puts_off else nullcontext():
            (scale * model(x).square().sum()).backward()
    (scale * model(last).square().sum()).backward()


@pytest.mark.parametrize("puts_off", [False, True])
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("program", _PROGRAMS)
@distributed(1, 2)
def test_gradients_that_share_memory_add_up_apart(
    world_size: int, program: str, strategy: ShardingStrategy, use_orig_params: bool, puts_off: bool
) -> None:
    """Three microbatches add up right, reduced or not, and are clipped once.

    On one rank as on two; and where the mesh of a unit has one of two ranks.
    """
    plain = _Shares(program)
    expected = _expected_gradients(plain)
    norm = torch.stack([each.norm() for each in expected.values()]).norm()
    for mesh in [{}, _on_one_rank(world_size)]:
        model = copy.deepcopy(plain)
        fully_shard(model, strategy=strategy, use_orig_params=use_orig_params, **mesh)
        _train_sharing(model, puts_off=puts_off)
        _assert_shared_gradients(model, expected)
        torch.testing.assert_close(clip_grad_norm_(model, 0.5), norm)
        _assert_shared_gradients(model, expected, 0.5 / (float(norm) + 1e-6))


@pytest.mark.parametrize("program", _PROGRAMS)
@distributed(1, 2)
def test_gradients_that_share_memory_are_divided_and_unscaled_once(
    world_size: int, program: str
) -> None:
    """A divide factor of 8 times the ranks gives an eighth; GradScaler takes its scale out once."""
    plain = _Shares(program)
    expected = _expected_gradients(plain)
    for mesh in [{}, _on_one_rank(world_size)]:
        model = copy.deepcopy(plain)
        fully_shard(model, **mesh)
        set_gradient_divide_factor(model, 8.0 * (1 if mesh else world_size))
        scaler = GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        _train_sharing(model, puts_off=False, scale=4.0)
        scaler.unscale_(torch.optim.SGD(model.parameters(), lr=1.0))
        _assert_shared_gradients(model, expected, 1 / 8)


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(1, 2)
def test_gradients_that_callers_keep_are_not_written(strategy: ShardingStrategy) -> None:
    """What `backward` was given, and what hooks keep, has its values afterwards."""
    model = _Shares("ViT, batch of 1")
    fully_shard(model, strategy=strategy)
    set_gradient_divide_factor(model, 2.0)
    kept: list[Tensor] = []
    given = torch.ones(1, 3, 3, dtype=torch.float64)
    for x in _sharing_inputs():
        output = model(x)
        output.register_hook(kept.append)
        output.backward(given)
        scaled = model(x)
        scaled.register_hook(kept.append)
        (scaled * 3).backward(given)
        clip_grad_norm_(model, 0.1)
    assert_equal(given, torch.ones_like(given), "given")
    for index, gradient in enumerate(kept):
        assert_equal(gradient, torch.full_like(given, 3.0 if index % 2 else 1.0), f"kept {index}")


class _GivesValues(torch.autograd.Function):
    """A function whose backward gives what it has saved, or views of that."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor, gives: _Gives) -> Tensor:
        ctx.save_for_backward(first, second)
        ctx.gives = gives
        return first * second

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *ctx.gives(*ctx.saved_tensors, grads[0]), None


_Gives = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
_GIVEN: dict[str, _Gives] = {
    "the other": lambda a, b, g: (b, a),
    "a view of the other": lambda a, b, g: (b.t(), a.view_as(b)),
    "a detached one": lambda a, b, g: (b.detach(), a.detach()),
    "the first one's": lambda a, b, g: (b, g * a),
    "the second one's": lambda a, b, g: (g * b, a),
    "itself": lambda a, b, g: (a, b),
    "a view of itself": lambda a, b, g: (a.t(), b.t()),
    "one for both": lambda a, b, g: (b, b),
}
_USES: dict[str, Callable[[_Shares, Tensor], tuple[Tensor, Tensor]]] = {
    "parameters": lambda m, x: (m.a, m.b),
    "a view": lambda m, x: (m.a, m.c.view(3, 3)),
    "a product": lambda m, x: (m.c.view(3, 3) * 2, m.b),
    "an activation": lambda m, x: (x, m.b),
}


class _SharingInner(_Shares):
    def __init__(self, uses: str, gives: str) -> None:
        super().__init__("")
        self.uses, self.gives = uses, gives

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _GivesValues.apply(*_USES[self.uses](self, x), _GIVEN[self.gives])
        return found + x.square()


class _Outer(nn.Module):
    """A unit of its own before the one with the function: gradients go on to it."""

    def __init__(self, uses: str, gives: str) -> None:
        super().__init__()
        self.before = nn.Linear(3, 3, dtype=torch.float64)
        self.inner = _SharingInner(uses, gives)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.before(x))


@pytest.mark.parametrize("creates_graph", [False, True])
@pytest.mark.parametrize("shard", [shard_root, shard_children])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("gives", _GIVEN)
@distributed(1, 2)
@poisoned()
def test_gradients_that_are_parameters_have_their_values(
    gives: str, strategy: ShardingStrategy, shard: Any, creates_graph: bool
) -> None:
    """A function may give a weight, or a view of it, as a gradient: of itself, or of another one.

    Under `FULL_SHARD` gradients take the place of values, and values are freed before all who are
    given them have read them.
    """
    for uses in _USES:
        plain = _Outer(uses, gives)
        model = copy.deepcopy(plain)
        shard(model, strategy=strategy)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (plain, model)]
        for step, x in enumerate([*_sharing_inputs(), *_sharing_inputs()]):
            params = dict(plain.named_parameters())
            loss = plain(x).sum()
            found = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
            for param, gradient in zip(params.values(), found, strict=True):
                param.grad = None if gradient is None else gradient.detach().clone()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
                model(x).sum().backward(create_graph=creates_graph)
            for name, gradient in unsharded_gradients(model).items():
                assert_close(gradient, params[name].grad, f"{uses}, step {step}: {name}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
