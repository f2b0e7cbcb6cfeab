"""How far the gradients of a handle are in a backward: the moves that programs make."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from composable_shard import ShardingStrategy, fully_shard, no_sync
from composable_shard.runtime.reduction_queue import Item
from composable_shard.runtime.stage import STAGE_MOVES
from composable_shard.runtime.unit import trees
from tests.common.changes import recorded_changes
from tests.harness.ranks import distributed

pytestmark = pytest.mark.fast

X = torch.ones(2, 4)


class _LayersOrRegions(nn.Module):
    """Two layers; or one of them in two reentrant regions."""

    def __init__(self, *, are_regions: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.are_regions = are_regions

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2 * self.are_regions):
            x = checkpoint(self.first, x, use_reentrant=True)
        return x if self.are_regions else self.second(self.first(x))


def _shard_each(**options: Any) -> _LayersOrRegions:
    model = _LayersOrRegions()
    for layer in model.children():
        fully_shard(layer, **options)
    return fully_shard(model)


def _hook(layer: nn.Module) -> None:
    for param in layer.parameters():
        param.register_post_accumulate_grad_hook(lambda _: None)


def _reduce_at_once() -> None:
    _shard_each()(X).sum().backward()


def _reduce_in_the_agreed_order() -> None:
    _shard_each(strategy=ShardingStrategy.SHARD_OPTIM)(X).sum().backward()


def _run_hooks_early() -> None:
    model = _shard_each()
    _hook(model)
    model(X).sum().backward()


def _reach_a_unit_again() -> None:
    model = _shard_each()
    (model(X) + model(X)).sum().backward()


def _reach_a_unit_again_whose_flags_are_in_flight() -> None:
    model = _shard_each()
    _hook(model.first)
    model.first.requires_grad_(False)
    output = model(X.clone().requires_grad_())
    model.first.requires_grad_(True)
    (output + model(X)).sum().backward()


def _postpone_buckets_of_two_regions() -> None:
    model = _LayersOrRegions(are_regions=True)
    fully_shard(model.first, bucket_cap_mb=1e-5)
    fully_shard(model)
    with no_sync(model):
        model(X.clone().requires_grad_()).sum().backward()


PROGRAMS = [
    *(_reduce_at_once, _reduce_in_the_agreed_order, _run_hooks_early, _reach_a_unit_again),
    *(_reach_a_unit_again_whose_flags_are_in_flight, _postpone_buckets_of_two_regions),
]


@distributed(2)
def test_programs_make_the_moves_of_the_table_and_no_others() -> None:
    """Each move of the table is made, too."""
    with recorded_changes(Item, "stage") as moves:
        for program in PROGRAMS:
            program()
    assert moves == {(old, new) for old, found in STAGE_MOVES.items() for new in found}


@distributed(2)
def test_what_a_backward_has_made_is_in_no_cycle() -> None:
    """So trees go with their models, whichever orders their handles had."""
    for program in PROGRAMS:
        gc.collect()
        before = len(trees)
        gc.disable()
        try:
            program()
            assert len(trees) == before, program.__name__
        finally:
            gc.enable()
