"""Which parameters modules show: the states, and the moves that programs make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_shard import (
    fully_shard,
    get_handles,
    register_flat_param,
    register_orig_params,
    reshard,
    unshard,
    unshard_params,
)
from composable_shard.flat_param.shown import SHOWN_MOVES, ShownParams
from tests.common.changes import recorded_changes
from tests.harness.ranks import distributed

pytestmark = pytest.mark.fast

X = torch.ones(2, 4)


def _train_shown(model: nn.Module) -> None:
    model(X).sum().backward()


def _open_a_scope(model: nn.Module) -> None:
    with unshard_params(model), torch.no_grad():
        model(X)


def _open_a_scope_while_unsharded(model: nn.Module) -> None:
    unshard(model)
    _open_a_scope(model)
    reshard(model)


def _toggle_in_a_scope(model: nn.Module) -> None:
    with unshard_params(model), torch.no_grad():
        register_flat_param(model)
        model(X)
        register_orig_params(model)
        register_flat_param(model)


def _toggle_while_unsharded(model: nn.Module) -> None:
    unshard(model)
    register_flat_param(model)
    _open_a_scope(model)
    register_orig_params(model)
    register_flat_param(model)
    _train_shown(model)
    reshard(model)
    register_orig_params(model)


class _Interrupting:
    """Parameters of a module, of which the next one to be shown is not."""

    def __init__(self, container: Any) -> None:
        self._container = container

    def __getitem__(self, name: str) -> Any:
        return self._container[name]

    def __setitem__(self, name: str, param: Tensor | None) -> None:
        raise KeyboardInterrupt


def _interrupt_reshard(model: nn.Module) -> None:
    unshard(model)
    [handle] = get_handles(model)
    places = handle.shown._places
    handle.shown._places = [(_Interrupting(container), *rest) for container, *rest in places]
    with pytest.raises(KeyboardInterrupt):
        reshard(model)
    handle.shown._places = places


def _open_a_scope_after_an_interrupt(model: nn.Module) -> None:
    _interrupt_reshard(model)
    _open_a_scope(model)


def _toggle_after_an_interrupt(model: nn.Module) -> None:
    _interrupt_reshard(model)
    register_flat_param(model)
    _train_shown(model)


PROGRAMS = [
    *(_train_shown, _open_a_scope, _open_a_scope_while_unsharded, _toggle_in_a_scope),
    *(_toggle_while_unsharded, _open_a_scope_after_an_interrupt, _toggle_after_an_interrupt),
]


@distributed(2)
def test_programs_make_the_moves_of_the_table_and_no_others() -> None:
    """Each move of the table is made, too; a state of a form's own or of a scope has its kind's."""
    with recorded_changes(ShownParams, "state") as changes:
        for use_orig_params in (True, False):
            for program in PROGRAMS:
                model = fully_shard(nn.Linear(4, 4), use_orig_params=use_orig_params)
                _train_shown(model)
                program(model)
                _train_shown(model)
    kinds = {(old.kind, new.kind) for old, new in changes if old.kind is not new.kind}
    assert kinds == {(old, new) for old, found in SHOWN_MOVES.items() for new in found}
