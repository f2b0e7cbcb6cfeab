"""Where the gradients of a handle are: the states of a round, and the moves that programs make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_shard import fully_shard, get_handles, no_sync
from composable_shard.flat_param.gradients import FlatGradients
from composable_shard.flat_param.round import ROUND_MOVES, Round
from tests.harness.ranks import distributed

pytestmark = pytest.mark.fast

NONE, IN_BUFFER, IN_VALUES, REDUCING = Round
Move = tuple[Round, Round]
X = torch.ones(2, 4)


@contextmanager
def recorded_moves() -> Iterator[set[Move]]:
    """Collect the moves that methods of gradients make inside the block, inner calls too."""
    moves: set[Move] = set()
    last: dict[FlatGradients, Round] = {}

    def recording(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(self: FlatGradients, *args: Any, **kwargs: Any) -> Any:
            look(self)
            try:
                return method(self, *args, **kwargs)
            finally:
                look(self)

        return run

    def look(grads: FlatGradients) -> None:
        now = grads.round
        if (before := last.get(grads, NONE)) is not now:
            moves.add((before, now))
        last[grads] = now

    with pytest.MonkeyPatch.context() as patch:
        for name, method in vars(FlatGradients).items():
            if callable(method) and name != "__init__":
                patch.setattr(FlatGradients, name, recording(method))
        yield moves


class _LayersWithHook(nn.Module):
    """Two layers of one unit; a hook runs between their backwards, when one gradient has come."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.hook: Callable[[Tensor], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x)
        if self.hook is not None:
            hidden.register_hook(self.hook)
        return self.second(hidden)  # type: ignore[no-any-return]


def _run_one_step(model: _LayersWithHook) -> None:
    model(X).sum().backward()
    model.zero_grad()


def _wait_and_reduce(model: _LayersWithHook) -> None:
    with no_sync(model):
        model(X).sum().backward()
    _run_one_step(model)


def _wait_and_drop(model: _LayersWithHook) -> None:
    with no_sync(model):
        model(X).sum().backward()
    model.zero_grad()
    _run_one_step(model)


def _need_the_values_again(model: _LayersWithHook) -> None:
    """As a forward that runs again does, when a gradient has come."""
    [handle] = get_handles(model)

    def gather(_: Tensor) -> None:
        handle.unshard()
        handle.full.wait()

    _run_one_step(model)
    model.hook = gather
    _run_one_step(model)
    model.hook = None


def _fail_between(model: _LayersWithHook) -> None:
    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    _run_one_step(model)
    model.hook = fail
    with pytest.raises(ZeroDivisionError):
        _run_one_step(model)
    model.hook = None


PROGRAMS = [_run_one_step, _wait_and_reduce, _wait_and_drop, _need_the_values_again, _fail_between]


@distributed(2)
def test_programs_make_the_moves_of_the_table_and_no_others() -> None:
    """Each move of the table is made, too."""
    with recorded_moves() as moves:
        for program in PROGRAMS:
            model = fully_shard(_LayersWithHook())
            for _ in range(3):
                program(model)
            _run_one_step(model)
    assert moves == {(old, new) for old, found in ROUND_MOVES.items() for new in found}
