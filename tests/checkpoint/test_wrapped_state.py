"""Optimizer state of a class that wraps other tensors: every bit back, or values by permission."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from composable_shard import (
    Block,
    fully_shard,
    get_optimizer_state_dict,
    load_checkpoint,
    save_checkpoint,
)
from composable_shard.optim import with_local_state
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.optim.test_optimizers import BLOCK, Coded, LowBit
from tests.programs.models import EVERYWHERE

# Rank 0 holds 40 of the 48 and 24 elements; rank 1's 8 of the first are too few to quantise.


def _low_bit_pair(seed: int, **options: Any) -> tuple[nn.Sequential, LowBit]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 6, bias=False), nn.Linear(6, 4, bias=False))
    fully_shard(model, **options)
    return model, with_local_state(LowBit)(model.parameters(), {})


def _train_low_bit(model: nn.Module, optimizer: LowBit, steps: range) -> None:
    for step in steps:
        model(torch.arange(8.0) * step + 1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _bits_and_weights(model: nn.Module, optimizer: LowBit) -> list[Any]:
    state = [optimizer.state[param]["mean"].to_local() for param in model.parameters()]
    parts = [[each.codes, each.scale] if isinstance(each, Coded) else each for each in state]
    return [parts, [param.full_tensor() for param in model.parameters()]]


@distributed(2)
@pytest.mark.parametrize("is_used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("async_op", [False, True])
def test_wrapped_state_comes_back_bit_by_bit(tmp_path: Path, is_used: bool, async_op: bool) -> None:
    """Where one rank's shard is quantised and another's is not, too; later steps are equal."""
    model, optimizer = _low_bit_pair(0, granularity=Block(BLOCK))
    _train_low_bit(model, optimizer, range(2))
    saved = save_checkpoint(tmp_path, model, optimizer, step=2, async_op=async_op)
    _train_low_bit(model, optimizer, range(2, 4))
    if async_op:
        saved.wait()  # type: ignore[union-attr] # a save in the background
    other, fresh = _low_bit_pair(1, granularity=Block(BLOCK))
    if is_used:
        _train_low_bit(other, fresh, range(3))
    with torch.serialization.safe_globals([Coded]):
        load_checkpoint(tmp_path, other, fresh)
    _train_low_bit(other, fresh, range(2, 4))
    kinds = {type(state["mean"].to_local()) for state in fresh.state.values()}
    assert kinds == {Coded, torch.Tensor}
    assert_equal(_bits_and_weights(other, fresh), _bits_and_weights(model, optimizer))


@distributed(2)
@pytest.mark.parametrize("options", [{"granularity": Block(24)}, {"strategy": "no_shard"}], ids=str)
def test_another_split_takes_values_alone(tmp_path: Path, options: dict[str, Any]) -> None:
    """Refused by name with the remedy, changing nothing; `strict=False` loads plain values."""
    model, optimizer = _low_bit_pair(0, granularity=Block(BLOCK))
    _train_low_bit(model, optimizer, range(2))
    save_checkpoint(tmp_path, model, optimizer, step=2)
    expected = get_optimizer_state_dict(model, optimizer, options=EVERYWHERE)["state"]
    other, fresh = _low_bit_pair(1, **options)
    before = [param.full_tensor() for param in other.parameters()]
    with torch.serialization.safe_globals([Coded]):
        text = "optimizer state 'mean' was saved as .*Coded, .* pass strict=False"
        with pytest.raises(ValueError, match=text):
            load_checkpoint(tmp_path, other, fresh)
        assert not fresh.state
        assert_equal([param.full_tensor() for param in other.parameters()], before)
        load_checkpoint(tmp_path, other, fresh, strict=False)
    found = get_optimizer_state_dict(other, fresh, options=EVERYWHERE)["state"]
    assert_equal(found, expected)


@distributed(2)
def test_an_unknown_class_is_refused_by_name(tmp_path: Path) -> None:
    """A checkpoint makes no class that the program has not allowed."""
    model, optimizer = _low_bit_pair(0, granularity=Block(BLOCK))
    _train_low_bit(model, optimizer, range(2))
    save_checkpoint(tmp_path, model, optimizer, step=2)
    other, fresh = _low_bit_pair(1, granularity=Block(BLOCK))
    text = re.escape("test_optimizers.Coded, which this program does not know")
    with pytest.raises(ValueError, match=text):
        load_checkpoint(tmp_path, other, fresh)
    assert not fresh.state
