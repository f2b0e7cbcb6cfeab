"""A parameter that is replaced while full parameters are shown: named, and back afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_shard import ShardingStrategy, reshard, unshard
from composable_shard.runtime import get_states
from tests.harness.ranks import distributed
from tests.programs.claims import assert_right, strategies, variants
from tests.programs.models import rank_input, square_mean

_NAMED = (
    r"^parameter '1.scale' (was replaced by another object \((Parameter\(15,\)|None)\) after "
    "fully_shard, as by assignment|is gone from its module)"
)


def _assign_scale(layer: nn.Module) -> None:
    layer.scale = nn.Parameter(torch.full((15,), 0.5))


def _set_no_scale(layer: nn.Module) -> None:
    layer.scale = None


def _delete_scale(layer: nn.Module) -> None:
    del layer.scale


_WAYS = [_assign_scale, _set_no_scale, _delete_scale]


class _ReplacesScale(nn.Module):
    """Calls `on_forward` with itself before it reads its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(15))
        self.on_forward: Callable[[nn.Module], None] = _keep_scale

    def forward(self, x: Tensor) -> Tensor:
        self.on_forward(self)
        scale = getattr(self, "scale", None)
        return x if scale is None else x * scale


def _keep_scale(layer: nn.Module) -> None:
    pass


def _make_scaled() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 15), _ReplacesScale(), nn.Linear(15, 3))


def _run_and_differentiate(model: nn.Module, number: int) -> None:
    square_mean(model(rank_input(3, 5, step=number, dtype=torch.float64))).backward()


@pytest.mark.parametrize("replace", _WAYS)
@variants
@distributed(2)
def test_c16_parameter_that_a_forward_replaces_is_named(
    replace: Callable[[nn.Module], None],
    strategy: ShardingStrategy,
    use_orig_params: bool,
    accumulates: bool,
) -> None:
    """Case 16: its value was ignored in silence; the next forwards are right."""

    def program(model: Any, number: int) -> None:
        if get_states(model) and number in (1, 3):
            model[1].on_forward = replace
            with pytest.raises(RuntimeError, match=_NAMED):
                _run_and_differentiate(model, number)
            model[1].on_forward = _keep_scale
        _run_and_differentiate(model, number)

    assert_right(
        _make_scaled,
        program,
        strategy=strategy,
        use_orig_params=use_orig_params,
        accumulates=accumulates,
    )


@pytest.mark.parametrize("replace", _WAYS)
@strategies
@distributed(2)
def test_c16_parameter_replaced_between_unshard_and_reshard_is_named(
    replace: Callable[[nn.Module], None], strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Case 16: a second `reshard` puts it back."""

    def program(model: Any, number: int) -> None:
        if get_states(model) and number == 3:
            unshard(model, recurse=True)
            replace(model[1])
            with pytest.raises(RuntimeError, match=_NAMED):
                reshard(model, recurse=True)
            reshard(model, recurse=True)
        _run_and_differentiate(model, number)

    assert_right(_make_scaled, program, strategy=strategy, use_orig_params=use_orig_params)


@pytest.mark.parametrize("replace", _WAYS)
@strategies
@distributed(2)
def test_c16_parameter_replaced_before_the_backward_is_named(
    replace: Callable[[nn.Module], None], strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Case 16: after the forward, where the backward would put the old one back."""

    def program(model: Any, number: int) -> None:
        if get_states(model) and number == 3 and use_orig_params:
            loss, scale = model(rank_input(3, 5, dtype=torch.float64)).sum(), model[1].scale
            replace(model[1])
            with pytest.raises(RuntimeError, match=_NAMED):
                loss.backward()
            model[1].scale = scale
        _run_and_differentiate(model, number)

    assert_right(_make_scaled, program, strategy=strategy, use_orig_params=use_orig_params)
