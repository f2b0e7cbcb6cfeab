"""Whatever a unit takes and returns: containers, None, keywords, its own input or parameter."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard import ShardingStrategy, fully_shard
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed
from tests.programs.models import (
    Layer,
    Twins,
    assert_at_rest,
    loss_of_shape,
    rank_input,
    shard_children,
    shard_layers,
    shard_root,
    square_mean,
    train_by,
)


@dataclass
class _DataclassOutput:
    hidden: Tensor
    extra: dict[str, Tensor | None]


@dataclass(frozen=True)
class _FrozenOutput:
    hidden: Tensor
    loss: Tensor | None = None


class _NamedOutput(NamedTuple):
    hidden: Tensor
    number: int


class _ModelOutput(OrderedDict[str, Any]):
    """Keys are attributes too, as in the outputs of Hugging Face's models."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__.update(items)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.__dict__[key] = value

    def __getitem__(self, key: str | int) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else list(self.values())[key]


class _Result:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden
        self.name = "plain object"


_FORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda x: x, lambda out: out),
    "tuple": (lambda x: (None, x, 3), lambda out: out[1]),
    "list": (lambda x: [x, "text"], lambda out: out[0]),
    "dict": (lambda x: {"a": None, "b": x}, lambda out: out["b"]),
    "nested": (lambda x: ({"a": [x, {"b": (x.sin(),)}]},), lambda out: out[0]["a"][1]["b"][0]),
    "namedtuple": (lambda x: _NamedOutput(x, 3), lambda out: out.hidden),
    "dataclass": (lambda x: _DataclassOutput(x, {"none": None}), lambda out: out.hidden),
    "dataclass_field": (
        lambda x: _DataclassOutput(x.detach(), {"x": x}),
        lambda out: out.extra["x"],
    ),
    "frozen_dataclass": (lambda x: _FrozenOutput(x), lambda out: out.hidden),
    "model_output": (lambda x: _ModelOutput(loss=x.sum(), hidden=x), lambda out: out.hidden),
    "object": (lambda x: _Result(x), lambda out: out.hidden),
}


class _Wrapping(nn.Module):
    """A block that returns its output in some form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.block = Layer()
        self.form = form

    def forward(self, x: Tensor) -> Any:
        return _FORMS[self.form][0](self.block(x))


class _Unwrapping(nn.Module):
    """Three units that return their output in some form, under a root that does too."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Wrapping(form) for _ in range(3))
        self.form = form

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = _FORMS[self.form][1](layer(x))
        return _FORMS[self.form][0](x)


@pytest.mark.parametrize("form", _FORMS)
@distributed(2)
def test_forms_of_outputs(form: str) -> None:
    """Whatever holds the output tensors comes through unchanged, and backward finds them."""
    twins = Twins(lambda: _Unwrapping(form), shard_layers)
    get = _FORMS[form][1]
    outputs = [model(rank_input(4, 15)) for model in twins]
    assert type(outputs[1]) is type(outputs[0])
    train_by(
        twins, lambda step: lambda model: square_mean(get(model(rank_input(4, 15, step=step))))
    )
    assert_at_rest(twins.sharded)


class _InNone(nn.Module):
    """Units that return None in some of their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_NoneOrSum() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        assert self.layers[1](None) is None
        total = x
        for layer in self.layers:
            total = layer(total)
        assert self.layers[0](None) is None
        return total


class _NoneOrSum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(15, 15)

    def forward(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.tanh(self.linear(x))


@pytest.mark.fast
@distributed(2)
def test_output_none() -> None:
    """A call without output is gathered and freed like any other."""
    twins = Twins(_InNone, shard_layers)
    train_by(twins, lambda step: loss_of_shape(4, 15, step=step))
    assert_at_rest(twins.sharded)


class _Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_ScaledByOption() for _ in range(2))

    def forward(self, *, x: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x, options={"scale": scale})
        return {"x": x}


class _ScaledByOption(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(15, 15)

    def forward(self, x: Tensor, *, options: dict[str, Tensor | None]) -> Tensor:
        scale = options["scale"]
        return torch.tanh(self.linear(x if scale is None else x * scale))


@distributed(2)
def test_keyword_arguments() -> None:
    """They reach the module as they are."""
    twins = Twins(_Keywords, shard_layers)
    scale = rank_input(15)
    twins.step(lambda model: square_mean(model(x=rank_input(4, 15), scale=scale)["x"]))
    assert_at_rest(twins.sharded)


class _InPlace(nn.Module):
    """Changes the output of a unit in place: the tensor, or a view that the unit returned."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_MaybeView(kind) for _ in range(3))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.kind == "slice":
                x[:, :3].add_(1)
                x.mul_(0.5)
            else:
                x.add_(1).mul_(0.5)
        return x


class _MaybeView(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(15, 16 if kind == "view" else 15)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(torch.tanh(x))
        return x[:, 1:] if self.kind == "view" else x


@pytest.mark.parametrize("kind", ["tensor", "slice", "view"])
@distributed(2)
def test_in_place_operations_on_outputs(kind: str) -> None:
    """They neither fail nor keep the backward from finding the unit."""
    twins = Twins(lambda: _InPlace(kind), shard_layers)
    train_by(twins, lambda step: loss_of_shape(4, 15, step=step))
    assert_at_rest(twins.sharded)


class _Positions(nn.Module):
    """Returns its parameter, or a view of it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.randn(7, 15))
        self.kind = kind

    def forward(self, length: int) -> Any:
        if self.kind == "whole":
            return self.pos
        if self.kind == "dict":
            return {"pos": self.pos[:length], "none": None}
        return self.pos[:length]


class _Positioned(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.positions = _Positions(kind)
        self.block = Layer()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        pos = self.positions(len(x))
        pos = pos["pos"] if isinstance(pos, dict) else pos[: len(x)]
        return self.block(x + pos), pos


@pytest.mark.parametrize("shard", [shard_root, shard_children])
@pytest.mark.parametrize("kind", ["whole", "view", "dict"])
@distributed(2, on_device=True)
def test_output_that_aliases_a_parameter(kind: str, shard: Callable[..., None]) -> None:
    """It may be read after the call and after the backward, and its gradient counts."""
    twins = Twins(lambda: _Positioned(kind), shard)
    x = rank_input(4, 15)
    with torch.no_grad():
        outputs = [model(x)[1] for model in twins]
        assert_equal(outputs[1], outputs[0])
    results = [model(x) for model in twins]
    for model, (hidden, pos) in zip(twins, results, strict=True):
        twins.backward(model, square_mean(hidden) + pos.sin().sum())
    assert_equal(results[1][1].detach(), results[0][1].detach(), "after the backward")
    assert_equal(outputs[1], outputs[0], "after the backward")
    twins.assert_equal_gradients()
    assert_at_rest(twins.sharded)


@distributed(2)
def test_inference_output_that_aliases_a_parameter() -> None:
    """In inference mode too."""
    twins = Twins(lambda: _Positions("view"), shard_root)
    with torch.inference_mode():
        outputs = [model(4) for model in twins]
    assert_equal(outputs[1].clone(), outputs[0].clone())
    assert_at_rest(twins.sharded)


class _Identity(nn.Module):
    """Returns its input, a view of it, or uses its parameters, on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(15, 15)

    def forward(self, x: Tensor, what: str) -> Tensor:
        return {"same": lambda: x, "view": lambda: x[:], "use": lambda: self.linear(x)}[what]()


class _Identities(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(15, 15)
        self.layers = nn.ModuleList(_Identity() for _ in range(3))

    def forward(self, x: Tensor, what: tuple[str, ...]) -> Tensor:
        x = torch.tanh(self.first(x))
        for layer, do in zip(self.layers, what, strict=True):
            x = layer(x, do)
        return torch.tanh(x)


@distributed(2)
def test_unit_that_returns_its_input() -> None:
    """As with stochastic depth: all of its parameters keep no gradient."""
    twins = Twins(_Identities, shard_layers)
    for what in (("same", "use", "view"), ("use",) * 3, ("same",) * 3, ("view", "view", "use")):
        twins.step(lambda model, what=what: square_mean(model(rank_input(4, 15), what)))
        twins.zero_grad()
    assert_at_rest(twins.sharded)


def _shard_layers_only(model: nn.Module) -> None:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model.first)


@pytest.mark.parametrize("shard", [shard_layers, _shard_layers_only])
@distributed(2)
def test_unit_that_returns_its_input_on_one_rank_only(shard: Callable[..., None]) -> None:
    """Ranks may skip different layers, the last one too."""
    twins = Twins(_Identities, shard)
    is_first = dist.get_rank() == 0
    for first, second in (("same", "use"), ("use", "use"), ("view", "same"), ("use", "same")):
        what = ("use", first, second) if is_first else (second, "use", first)
        twins.step(lambda model, what=what: square_mean(model(rank_input(4, 15), what)))
        twins.zero_grad()
    assert_at_rest(twins.sharded)


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@distributed(2)
def test_rank_whose_backward_brings_no_gradient(strategy: ShardingStrategy) -> None:
    """It takes part in what ends with the backward, and learns from the flags that it must.

    What the others reduce before that is an error on all ranks where it has no agreed order
    (`gradient_of_an_activation` of test_lockstep.py).
    """
    twins = Twins(_Identity, shard_root, strategy=strategy)
    for users in ((0, 1), (0,), (1,), (), (0,)):
        what = "use" if dist.get_rank() in users else "view"
        x = rank_input(4, 15).requires_grad_()
        twins.step(lambda model, what=what, x=x: square_mean(model(x, what)))
        twins.zero_grad()
    assert_at_rest(twins.sharded, kept=() if strategy.facts.frees_params else (twins.sharded,))
