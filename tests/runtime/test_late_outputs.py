"""Forwards that return what runs later: generators, closures, partials, maps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composable_shard import ShardingStrategy, fully_shard, is_sharded, reshard, unshard
from tests.harness.pairs import pairwise
from tests.harness.ranks import distributed
from tests.programs.claims import assert_right
from tests.programs.models import rank_input, shard_children, square_mean

Make = Callable[["LateHead", Tensor], Any]


@dataclass
class _RunsLater:
    run: Any


class LateHead(nn.Module):
    """Its forward returns what `kind` makes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.kind = kind

    def go(self, x: Tensor) -> list[Tensor]:
        return [torch.tanh(self.layer(row)) for row in x]

    def forward(self, x: Tensor) -> Any:
        return KINDS[self.kind](self, x)


class LateModel(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), LateHead(kind)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.first(x)))


def _holds_weight(head: LateHead, x: Tensor) -> Any:
    weight = head.layer.weight
    return lambda: [torch.tanh(weight @ row) for row in x]


def _nested(head: LateHead, x: Tensor) -> Any:
    weight, bias = head.layer.weight, head.layer.bias

    def score(row: Tensor) -> Tensor:
        return weight @ row + bias

    return {"scores": [_RunsLater(lambda: [torch.tanh(score(row)) for row in x])]}


def _started(head: LateHead, x: Tensor) -> Any:
    def rows() -> Any:
        weight = head.layer.weight
        yield torch.zeros(1)
        for row in x:
            yield torch.tanh(weight @ row)

    generator = rows()
    next(generator)
    return generator


def _default(head: LateHead, x: Tensor) -> Any:
    def run(weight: Tensor = head.layer.weight) -> Tensor:
        return torch.tanh(x @ weight)

    return run


# What holds full parameters.
HOLDING: dict[str, Make] = {
    "closure": _holds_weight,
    "closure in containers": _nested,
    "default": _default,
    "partial": lambda head, x: functools.partial(F.linear, x, head.layer.weight, head.layer.bias),
    "map": lambda head, x: map(head.layer.weight.mv, x),
    "method of a weight": lambda head, x: (head.layer.weight.matmul, x.t()),
    "started generator": _started,
}
# What reads the parameters of a module.
READING: dict[str, Make] = {
    "generator": lambda head, x: (torch.tanh(head.layer(row)) for row in x),
    "closure on a module": lambda head, x: lambda: head.go(x),
    "partial of a module": lambda head, x: functools.partial(head.layer, x),
    "map of a module": lambda head, x: map(head.layer, x),
    "zip": lambda head, x: zip(map(head.layer, x), x, strict=True),
    "method": lambda head, x: (head.go, x),
}
KINDS = HOLDING | READING


def _results(output: Any) -> list[Tensor]:
    """Return the tensors that an output of any kind has."""
    while not isinstance(output, Tensor | list):
        if isinstance(output, dict):
            output = output["scores"][0].run
        elif isinstance(output, tuple):
            output = output[0](output[1])
        elif callable(output):
            output = output()
        else:
            assert isinstance(output, Iterable)
            output = [each[0] if isinstance(each, tuple) else each for each in output]
    return list(output)


def runs_late(model: nn.Module, number: int) -> None:
    """Run what the forward returned, and a backward of it."""
    output = model(rank_input(3, 4, step=number, dtype=torch.float64))
    square_mean(torch.cat([each.flatten() for each in _results(output)])).backward()


def runs_between_unshard_and_reshard(model: nn.Module, number: int) -> None:
    """The remedy that the error names."""
    if is_sharded(model):
        unshard(model, recurse=True)
    runs_late(model, number)
    if is_sharded(model):
        reshard(model, recurse=True)


@pytest.mark.parametrize(
    *pairwise(
        kind=list(HOLDING),
        strategy=list(ShardingStrategy),
        use_orig_params=[True, False],
        accumulates=[True, False],
        shard=[shard_children, fully_shard],
    )
)
@distributed(1, 2, 3)
def test_held_parameters_are_right_later(
    kind: str,
    strategy: ShardingStrategy,
    use_orig_params: bool,
    accumulates: bool,
    shard: Any,
) -> None:
    """Values and gradients are those of a plain model, wherever the unit is in the tree."""
    assert_right(
        lambda: LateModel(kind),
        runs_late,
        shard=shard,
        accumulates=accumulates,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


@pytest.mark.parametrize(
    *pairwise(
        kind=list(READING),
        strategy=list(ShardingStrategy),
        use_orig_params=[True, False],
        shard=[shard_children, fully_shard],
    )
)
@distributed(1, 2, 3)
def test_parameters_of_modules_are_refused_by_name(
    kind: str, strategy: ShardingStrategy, use_orig_params: bool, shard: Any
) -> None:
    """Training raises and names what was returned; its remedy is right, and no_grad gathers."""
    options = {"strategy": strategy, "use_orig_params": use_orig_params}
    model = LateModel(kind).double()
    shard(model, **options)
    name = r"a (generator|function \(|partial|map|zip|method \(go\))"
    with pytest.raises(RuntimeError, match=f"returned {name}.*return results instead"):
        runs_late(model, 0)
    assert_right(
        lambda: LateModel(kind),
        runs_between_unshard_and_reshard,
        shard=shard,
        **options,
    )


@pytest.mark.parametrize("kind", READING)
@pytest.mark.parametrize("strategy", ShardingStrategy)
@distributed(1, 2, 3)
def test_parameters_of_modules_are_gathered_without_a_graph(
    kind: str, strategy: ShardingStrategy
) -> None:
    """What runs later gives a plain model's values."""
    torch.manual_seed(0)
    plain = LateModel(kind).double()
    model = LateModel(kind).double()
    model.load_state_dict(plain.state_dict())
    shard_children(model, strategy=strategy)
    x = rank_input(3, 4, dtype=torch.float64)
    with torch.no_grad():
        for found, expected in zip(_results(model(x)), _results(plain(x)), strict=True):
            torch.testing.assert_close(found, expected)


@distributed(1, 2, 3)
def test_the_cause_is_forgotten_with_the_next_forward() -> None:
    """An output of results alone is not blamed for a layer outside of its unit."""
    model = LateModel("generator")
    fully_shard(model)
    model(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="The last forward of its unit returned a generator"):
        model.first(torch.ones(2, 4))
    model.head.forward = model.head.go
    model(torch.ones(2, 4))
    with pytest.raises(RuntimeError) as error:
        model.first(torch.ones(2, 4))
    assert "returned" not in str(error.value)


@distributed(2)
def test_values_for_a_holds_weight_are_freed_by_the_next_step() -> None:
    """They stay as long as parameters do: an output of results keeps none."""
    model = LateModel("closure")
    shard_children(model)
    [handle] = fully_shard.state(model.head).handles
    output = model(torch.ones(2, 4))
    assert handle.full.has_values
    square_mean(torch.stack(_results(output))).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.head.forward = model.head.go
    square_mean(torch.stack(model(torch.ones(2, 4)))).backward()
    assert not handle.full.has_values
