"""Edits of full parameters in a forward: each rank writes its part back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from composable_shard import (
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from tests.flat_param.test_edits import EDITS
from tests.harness.ranks import distributed
from tests.programs.claims import assert_right, strategies, unsharded_values, variants
from tests.programs.models import Net, rank_input, shard_blocks, shard_children, square_mean


def _run_step(model: nn.Module, number: int) -> None:
    x = rank_input(3, 5, step=number, dtype=torch.float64)
    square_mean(model(x)).backward()


class _Aliased(Net):
    """Its root has a layer under the name that the edits take."""

    @property
    def up(self) -> nn.Module:
        return self.inp


@pytest.mark.parametrize("edit", EDITS)
@variants
@distributed(2)
def test_c16_edit_in_forward_is_right(
    edit: Callable[..., None], strategy: ShardingStrategy, use_orig_params: bool, accumulates: bool
) -> None:
    """Case 16: whichever alias it goes through, of a block and of the root."""

    def make() -> nn.Module:
        model = _Aliased()
        for module in (model, model.blocks[0]):
            module.register_forward_pre_hook(edit)
        return model

    assert_right(
        make,
        _run_step,
        shard=shard_blocks,
        strategy=strategy,
        use_orig_params=use_orig_params,
        accumulates=accumulates,
    )


class _Normalizes(nn.Module):
    """Sets its parameters in the first forward, as ActNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.scale = nn.Parameter(torch.zeros(15)), nn.Parameter(torch.ones(15))
        self.is_new = self.is_alike = True

    def forward(self, x: Tensor) -> Tensor:
        if self.is_new:
            self.is_new = False
            with torch.no_grad():
                self.bias.copy_(torch.full_like(self.bias, 0.3) if self.is_alike else -x.mean(0))
                self.scale.data.mul_(1.5)
        return (x + self.bias) * self.scale


class _Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 15), _Normalizes(), nn.Linear(15, 2)
        self.checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = checkpoint(self.norm, x, use_reentrant=False) if self.checkpoints else self.norm(x)
        return self.last(x)


def _begin(model: nn.Module, how: str) -> None:
    model.checkpoints = how == "checkpoint"
    if how in ("no_grad", "inference"):
        with torch.no_grad() if how == "no_grad" else torch.inference_mode():
            model(rank_input(3, 5, dtype=torch.float64))


@pytest.mark.parametrize("how", ["training", "no_grad", "inference", "checkpoint"])
@strategies
@distributed(2)
def test_c16_parameters_that_the_first_forward_sets_are_right(
    how: str, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Case 16: a training forward, an evaluation, or one that runs again."""

    def program(model: nn.Module, number: int) -> None:
        if model.norm.is_new:
            _begin(model, how)
        _run_step(model, number)

    assert_right(
        _Normalized,
        program,
        shard=shard_children,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


@pytest.mark.parametrize("begins", ["training", "no_grad"])
@strategies
@distributed(2)
def test_c16_edits_that_ranks_make_differently_are_refused(
    begins: str, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Case 16: on every rank, by the next backward; each would have written another slice."""
    model = _Normalized().double()
    model.norm.is_alike = False
    shard_children(model, strategy=strategy, use_orig_params=use_orig_params)
    _begin(model, begins)
    with pytest.raises(RuntimeError, match=r"not in step.*edits of full parameters in a forward"):
        _run_step(model, 0)


_OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "int8": {"mp_policy": MixedPrecisionPolicy(gather_dtype=torch.int8)},
    "offload": {"offload_policy": OffloadPolicy(params=True)},
    "owned": {"granularity": "param"},
    "rows": {"granularity": "row"},
    "small_group": {"reshard_after_forward": 2},
}


@pytest.mark.parametrize("name", _OPTIONS)
@pytest.mark.parametrize("records", [True, False])
@distributed(4)
def test_edit_in_forward_writes_only_what_it_edits(name: str, records: bool) -> None:
    """The rest keeps its precision, and a backward of the same forward runs."""
    model = _Normalized()
    plain = copy.deepcopy(model)
    for module in (model.norm, model):
        fully_shard(module, **_OPTIONS[name])
    with nullcontext() if records else torch.no_grad():
        loss = square_mean(model(rank_input(3, 5)))
    if records:
        loss.backward()
    values = unsharded_values(model)
    for key, expected in plain.named_parameters():
        if key == "norm.bias":
            torch.testing.assert_close(values[key], torch.full((15,), 0.3), atol=2e-3, rtol=0)
        else:
            scale = 1.5 if key == "norm.scale" else 1.0
            assert torch.equal(values[key], scale * expected), key
