"""Programs against the claims of `docs/architecture.md`: right by value, or refused by name.

A program is what a user writes for one microbatch: a forward, a loss, a backward. It runs on a
plain model in float64 whose gradients are then averaged over the ranks, and on the sharded copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_shard import ShardingStrategy, no_sync, unshard_params
from composable_shard.flat_param.full_values import Poison
from tests.models import average_gradients, shard_children
from tests.pairs import pairwise

Program = Callable[[nn.Module, int], None]  # of a model and the number of a microbatch

RTOL = 1e-9

#: Decorates a `distributed` test with arguments `strategy`, `use_orig_params` and `accumulates`.
variants = pytest.mark.parametrize(
    *pairwise(
        strategy=list(ShardingStrategy), use_orig_params=[True, False], accumulates=[False, True]
    )
)
#: The same, without `accumulates`.
strategies = pytest.mark.parametrize(
    *pairwise(strategy=list(ShardingStrategy), use_orig_params=[True, False])
)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill memory that nobody may read with NaN inside the block."""
    before, Poison.is_on = Poison.is_on, True
    try:
        yield
    finally:
        Poison.is_on = before


def unsharded_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the gradients of a sharded model as whole tensors; all ranks must call it."""
    with unshard_params(model, writeback=False, with_grads=True):
        return {
            name: None if param.grad is None else param.grad.detach().clone()
            for name, param in model.named_parameters()
        }


def trainable(model: nn.Module) -> dict[str, bool]:
    """Return `requires_grad` of the parameters of a sharded model; all ranks must call it."""
    with unshard_params(model, writeback=False):
        return {name: param.requires_grad for name, param in model.named_parameters()}


def unsharded_values(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a sharded model as whole tensors; all ranks must call it."""
    with unshard_params(model, writeback=False):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def assert_close(actual: Tensor | None, expected: Tensor | None, what: str) -> None:
    """Assert equal values up to `RTOL` of the largest; None counts as zeros."""
    __tracebackhide__ = True
    if actual is None and expected is None:
        return
    if actual is None or expected is None:
        found = actual if actual is not None else expected
        assert found is not None
        assert not found.any(), f"{what}: got {actual}, expected {expected}"
        return
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=RTOL * scale, msg=lambda text: f"{what}: {text}"
    )


@poisoned()
def assert_right(
    make: Callable[[], nn.Module],
    program: Program,
    *,
    shard: Callable[..., object] = shard_children,
    accumulates: bool = False,
    steps: int = 3,
    **options: Any,
) -> None:
    """Train a plain model and its sharded copy with a program; compare gradients and values.

    Args:
        make: Makes the model, which is converted to float64.
        program: Runs one microbatch, its backward included.
        shard: Shards the copy, called with `options`.
        accumulates: Whether a step has a microbatch under `no_sync` before the one that is reduced.
        steps: Steps of SGD to compare.
        options: Of `fully_shard`.
    """
    __tracebackhide__ = True
    torch.manual_seed(0)
    plain = make().double()
    sharded = copy.deepcopy(plain)
    shard(sharded, **options)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (plain, sharded)]
    for step in range(steps):
        for model in (plain, sharded):
            if accumulates:
                with nullcontext() if model is plain else no_sync(model):
                    program(model, 2 * step)
            program(model, 2 * step + 1)
        average_gradients(plain.parameters())
        found = unsharded_gradients(sharded)
        for name, param in plain.named_parameters():
            assert_close(found[name], param.grad, f"step {step}: gradient of {name}")
        expected = {name: param.requires_grad for name, param in plain.named_parameters()}
        assert trainable(sharded) == expected, f"step {step}: requires_grad"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = unsharded_values(sharded)
    for name, param in plain.named_parameters():
        assert_close(found[name], param.detach(), f"parameter {name}")
