"""Programs against the claims of `docs/architecture.md`: right by value, or refused by name.

`assert_right` runs one in the workers, where an error ends the test. `outcome_of` asks from outside
of them which of the two it is: a refusal is an error on every rank, and anything else fails.

A program is what a user writes for one microbatch: a forward, a loss, a backward. It runs on a
plain model in float64 whose gradients are then averaged over the ranks, and on the sharded copy.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from operator import or_
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_shard import ShardingStrategy, no_sync, unshard_params
from composable_shard.flat_param import LOCKED
from composable_shard.runtime.saved_values import LATE_READ
from tests.harness.assertions import assert_within
from tests.harness.poison import poisoned
from tests.harness.ranks import RankError, run_ranks
from tests.programs.models import average_gradients, shard_children

Program = Callable[[nn.Module, int], None]  # of a model and the number of a microbatch

RTOL = 1e-9
#: What autograd and a unit's hooks say of full values that nobody announced, and what ranks say of
#: which some have read them where others have not.
REFUSALS = (f"is at version {LOCKED}", LATE_READ, "the ranks are not in step: ")
_WAITS = "after another rank had failed"  # of a rank whose collective fails when that has ended


def outcome_of(run: Callable[..., None], *args: object, world_size: int = 2) -> str:
    """Run a function on new ranks; return "right" or "refused", raise if it is neither."""
    try:
        run_ranks(world_size, run, *args)
    except RankError as error:
        if not is_refused(error, world_size):
            raise
        return "refused"
    return "right"


def is_refused(error: RankError, world_size: int, *others: str) -> bool:
    """Return whether every rank has raised one of the refusals, or waits for one that has."""
    texts = [error.errors.get(rank, "") for rank in range(world_size)]
    found = [any(refusal in text for refusal in (*REFUSALS, *others)) for text in texts]
    return any(found) and all(map(or_, found, [_WAITS in text for text in texts]))


def strategies(test: Any) -> Any:
    """Give a `distributed` test each `strategy`, half of them with `use_orig_params`.

    The name of the test says which half: two strategies with, two without. So each test meets all
    values, and the tests together all pairs.
    """
    return _in_turn(test, "strategy", "use_orig_params")


def variants(test: Any) -> Any:
    """As `strategies`, with `accumulates`, which meets both values of `use_orig_params`."""
    return _in_turn(test, "strategy", "use_orig_params", "accumulates")


def _in_turn(test: Any, *names: str) -> Any:
    turn = zlib.crc32(test.__name__.encode())
    rows = [
        (strategy, (number ^ turn) % 2 == 0, (number ^ turn) % 4 < 2)[: len(names)]
        for number, strategy in enumerate(ShardingStrategy)
    ]
    return pytest.mark.parametrize(names, rows)(test)


def unsharded_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the gradients of a sharded model as whole tensors; all ranks must call it."""
    with unshard_params(model, writeback=False, with_grads=True):
        return {
            name: None if param.grad is None else param.grad.detach().clone()
            for name, param in model.named_parameters()
        }


def _compare_step(plain: nn.Module, sharded: nn.Module, step: int) -> None:
    """Compare gradients and `requires_grad`; all ranks must call it."""
    __tracebackhide__ = True
    with unshard_params(sharded, writeback=False, with_grads=True):
        found = dict(sharded.named_parameters())
        for name, param in plain.named_parameters():
            assert_close(found[name].grad, param.grad, f"step {step}: gradient of {name}")
        expected = {name: param.requires_grad for name, param in plain.named_parameters()}
        assert {name: p.requires_grad for name, p in found.items()} == expected, f"step {step}"


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
    assert_within(actual, expected, what, atol=RTOL * scale)


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
        _compare_step(plain, sharded, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = unsharded_values(sharded)
    for name, param in plain.named_parameters():
        assert_close(found[name], param.detach(), f"parameter {name}")
