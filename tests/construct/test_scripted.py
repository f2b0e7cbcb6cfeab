"""Scripted and traced modules (torch.jit) inside a unit: right, or refused by name."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_shard import (
    MixedPrecisionPolicy,
    fully_shard,
    is_sharded,
    load_checkpoint,
    save_checkpoint,
    shard_model,
)
from tests.harness.ranks import distributed
from tests.programs.claims import assert_close, unsharded_gradients, unsharded_values
from tests.programs.models import average_gradients, rank_input, square_mean

DIM = 4


class _Activation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((DIM,), 1.5))
        self.inner = nn.Sequential(nn.GELU(), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


def _trace(module: nn.Module) -> nn.Module:
    return torch.jit.trace(module, torch.ones(3, DIM))


COMPILED: dict[str, Callable[[], nn.Module]] = {
    "scripted": lambda: torch.jit.script(nn.GELU()),
    "scripted with a buffer": lambda: torch.jit.script(_Activation()),
    "traced": lambda: _trace(nn.GELU()),
    "traced with a buffer": lambda: _trace(_Activation()),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "flat": {"use_orig_params": False},
    "no_shard": {"strategy": "no_shard"},
    "cast": {"mp_policy": MixedPrecisionPolicy(buffer_dtype=torch.float64)},
    "sync": {"sync_module_states": True},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", COMPILED)
@distributed(1, 2, 3)
def test_compiled_module_without_parameters_runs(kind: str, options: str) -> None:
    """Gradients and values of three steps are those of a plain model; so are a copy's."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(DIM, DIM), COMPILED[kind](), nn.Linear(DIM, DIM)).double()
    model = fully_shard(copy.deepcopy(plain), **OPTIONS[options])
    assert [name for name, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        for each in (plain, model):
            each.zero_grad()
            square_mean(each(rank_input(3, DIM, step=step).double())).backward()
        average_gradients(plain.parameters())
        found = unsharded_gradients(model)
        for name, param in plain.named_parameters():
            assert_close(found.get(name), param.grad, name)
        for optimizer in optimizers:
            optimizer.step()
    values = unsharded_values(copy.deepcopy(model))
    for name, param in plain.named_parameters():
        assert_close(values[name], param.detach(), name)


@distributed(1, 2, 3)
def test_checkpoint_of_a_model_with_a_scripted_module_comes_back(tmp_path: Path) -> None:
    """State dicts and checkpoints have its buffers too."""
    model = fully_shard(nn.Sequential(nn.Linear(DIM, DIM), COMPILED["scripted with a buffer"]()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    folder = save_checkpoint(tmp_path, model, optimizer, step=1)
    before = unsharded_values(model)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.zero_()
    load_checkpoint(str(folder), model, optimizer)
    after = unsharded_values(model)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert torch.equal(model[1].scale, torch.full((DIM,), 1.5))
    assert model.load_state_dict(model.state_dict()).missing_keys == []


@pytest.mark.parametrize("make", [torch.jit.script, _trace])
@distributed(1, 2, 3)
def test_compiled_module_with_parameters_is_refused_by_name(make: Any) -> None:
    """Before anything changes; with its parameters ignored the rest is sharded."""
    model = nn.Sequential(nn.Linear(DIM, DIM), make(nn.Linear(DIM, DIM)))
    kind = type(model[1]).__name__
    text = f"'1' is a {kind} (torch.jit.script or trace) with the parameters ['weight', 'bias']"
    for call in (fully_shard, lambda model: shard_model(model, {})):
        with pytest.raises(NotImplementedError, match=re.escape(text)):
            call(model)
        assert not is_sharded(model)
        assert type(model[0].weight) is nn.Parameter
        assert not model._forward_pre_hooks
    with pytest.raises(NotImplementedError, match=f"a {kind} .* can't be a unit"):
        fully_shard(model[1])
    ignored = set(model[1].parameters())
    square_mean(fully_shard(model, ignored_params=ignored)(rank_input(3, DIM))).backward()
    assert model[1].weight.grad is not None


@distributed(1)
def test_buffers_of_a_scripted_module_are_not_broadcast() -> None:
    """The option is refused by name."""
    model = nn.Sequential(nn.Linear(DIM, DIM), COMPILED["scripted with a buffer"]())
    with pytest.raises(NotImplementedError, match="can't find the buffers of a Recursive"):
        fully_shard(model, broadcast_buffers=True)
    assert not is_sharded(model)
