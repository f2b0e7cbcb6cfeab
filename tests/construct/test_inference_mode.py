"""Models made, sharded or initialised under `torch.inference_mode`, as by a decorated loader."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_shard import (
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    is_sharded,
    shard_model,
    unshard_params,
)
from tests.harness.pairs import pairwise
from tests.harness.ranks import distributed
from tests.programs.claims import assert_close, unsharded_gradients, unsharded_values
from tests.programs.models import average_gradients, rank_input, square_mean

DIM = 4


class _Loaded(nn.Module):
    """With a tie, a frozen layer, and buffers that a training forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.last.weight = self.first.weight
        self.norm = nn.BatchNorm1d(DIM)
        self.frozen = nn.Linear(DIM, DIM).requires_grad_(False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        result: Tensor = self.last(self.frozen(x)) * self.scale
        return result


def _loaded() -> _Loaded:
    torch.manual_seed(0)
    return _Loaded().double()


def made(options: dict[str, Any]) -> nn.Module:
    """The loader alone ran in it."""
    with torch.inference_mode():
        model = _loaded()
    return fully_shard(model, **options)


def made_and_sharded(options: dict[str, Any]) -> nn.Module:
    """Both."""
    with torch.inference_mode():
        return fully_shard(_loaded(), **options)


def sharded(options: dict[str, Any]) -> nn.Module:
    """An ordinary model is sharded in it."""
    model = _loaded()
    with torch.inference_mode():
        return fully_shard(model, **options)


def sharded_by_units(options: dict[str, Any]) -> nn.Module:
    """An inner unit, and the rest by `shard_model`."""
    with torch.inference_mode():
        model = _loaded()
    return shard_model(model, {"first": {}}, **options)


def initialised(options: dict[str, Any]) -> nn.Module:
    """Made on the meta device; values are loaded in it."""
    with torch.device("meta"), torch.inference_mode():
        model = _Loaded().double()
    fully_shard(model, **options).to_empty(device="cpu")
    values = _loaded().state_dict()
    with torch.inference_mode(), unshard_params(model):
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.copy_(values[name])
    return model


WAYS = [made, made_and_sharded, sharded, sharded_by_units, initialised]


@pytest.mark.parametrize(
    *pairwise(way=WAYS, strategy=list(ShardingStrategy), use_orig_params=[True, False])
)
@distributed(1, 2, 3)
def test_model_of_inference_mode_trains(
    way: Any, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """Gradients, values and buffers of three steps are those of an ordinary plain model."""
    plain = _loaded()
    model = way({"strategy": strategy, "use_orig_params": use_orig_params})
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        x = rank_input(3, DIM, step=step).double()
        for each in (plain, model):
            each.zero_grad()
            square_mean(each(x)).backward()
        average_gradients(plain.parameters())
        found = unsharded_gradients(model)
        for name, param in plain.named_parameters():
            assert_close(found[name], param.grad, f"step {step}: {name}")
        for optimizer in optimizers:
            optimizer.step()
    values = unsharded_values(copy.deepcopy(model))
    for name, param in plain.named_parameters():
        assert_close(values[name], param.detach(), name)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer)


@pytest.mark.parametrize(
    "options",
    [
        {"mp_policy": MixedPrecisionPolicy(main_dtype=torch.float64)},
        {"sync_module_states": True},
        {"granularity": "param"},
        {"bucket_cap_mb": 0.0001},
        {"broadcast_buffers": True},
    ],
    ids=lambda options: next(iter(options)),
)
@distributed(1, 2, 3)
def test_options_take_a_model_of_inference_mode(options: dict[str, Any]) -> None:
    """With each of them its gradients are those of the same model made outside of it."""
    gradients = []
    for way in (made, lambda options: fully_shard(_loaded(), **options)):
        model = way(options)
        square_mean(model(rank_input(3, DIM).double())).backward()
        gradients.append(unsharded_gradients(model))
    for name, expected in gradients[1].items():
        assert_close(gradients[0][name], expected, name)


@distributed(1, 2, 3)
def test_failed_call_gives_a_model_of_inference_mode_back() -> None:
    """Its parameters are again those that it had, and a corrected call is right."""
    with torch.inference_mode():
        model = _loaded()

    class _Refuses(nn.Module):
        def register_state_dict_post_hook(self, hook: Any) -> Any:
            raise LookupError("no hooks")

    model.extra = _Refuses()
    with suppress(LookupError):
        fully_shard(model)
    assert not is_sharded(model)
    assert all(type(param) is nn.Parameter and param.is_inference() for param in model.parameters())
    del model.extra
    x = rank_input(3, DIM).double()
    torch.testing.assert_close(fully_shard(model)(x), _loaded()(x))


@distributed(1)
def test_buffer_made_in_inference_mode_after_the_call_is_used() -> None:
    """The first forward looks at buffers: one without a version is right too."""
    model = fully_shard(_loaded())
    with torch.inference_mode():
        model.scale = torch.full((DIM,), 2.0, dtype=torch.float64)
    plain = _loaded()
    plain.scale = torch.full((DIM,), 2.0, dtype=torch.float64)
    x = rank_input(3, DIM).double()
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), plain.eval()(x))
