"""Units that a program takes out of its model, which ranks let go of at different moments."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_shard import (
    ShardingStrategy,
    fully_shard,
    set_forward_prefetch,
)
from tests.harness.pairs import pairwise
from tests.harness.ranks import distributed
from tests.programs.models import (
    Layer,
    Net,
    Twins,
    assert_at_rest,
    loss_of,
    rank_input,
    shard_blocks,
)


def _step_twins(twins: Twins, step: int) -> None:
    x = rank_input(4, 5, step=step)
    twins.step(lambda model: model(x).square().mean())
    for model, optimizer in zip(twins, twins.optimizers(torch.optim.SGD), strict=True):
        optimizer.step()
        model.zero_grad()


def _shard_without_root(model: nn.Module, **options: Any) -> None:
    for layer in (model.inp, *model.blocks, model.out):
        fully_shard(layer, **options)


def _new_blocks(**options: Any) -> Sequence[nn.Module]:
    """Return two equal blocks, of which the second is sharded."""
    plain, sharded = Layer(), Layer()
    sharded.load_state_dict(plain.state_dict())
    fully_shard(sharded, **options)
    return plain, sharded


def _take_out(model: nn.Module, new: nn.Module | None) -> nn.Module:
    """Take a unit out of a model, or put another module in its place; return it."""
    block: nn.Module = model.blocks[1]
    if new is None:
        del model.blocks[1]
    else:
        model.blocks[1] = new
    return block


def _run_waiting(twins: Twins, losses: list[Any], *, is_evaluated: bool) -> None:
    """Run backwards that have waited while units were taken out, perhaps after a call that saw it.

    Their gradients are dropped.
    """
    for model in twins if is_evaluated else ():
        with torch.no_grad():
            loss_of(model)
    while losses:
        losses.pop().backward()
    for model in twins:
        model.zero_grad()


@pytest.mark.parametrize(
    *pairwise(
        strategy=list(ShardingStrategy),
        how=["out", "replaced", "back", "waiting"],
        cap=[None, 0.0001],
        has_root=[True, False],
    )
)
@distributed(2)
def test_a_unit_that_is_taken_out_while_one_rank_still_has_it(
    strategy: ShardingStrategy, how: str, cap: float | None, has_root: bool
) -> None:
    """As garbage, say. Or it is put back, or its graph waits for a backward meanwhile."""
    options = {"strategy": strategy, "bucket_cap_mb": cap}
    twins = Twins(Net, partial(shard_blocks if has_root else _shard_without_root, **options))
    set_forward_prefetch(twins.sharded.blocks[0], [twins.sharded.blocks[1]])
    for step in range(3):
        _step_twins(twins, step)
    losses = [loss_of(model) for model in twins] if how == "waiting" else []
    new: Sequence[nn.Module | None] = (None, None)
    if how == "replaced":
        new = _new_blocks(**options)
    kept = [_take_out(*each) for each in zip(twins, new, strict=True)]
    if dist.get_rank() == 0 and how != "back":
        kept.clear()
    _run_waiting(twins, losses, is_evaluated=cap is None)
    for step in range(3, 6):
        _step_twins(twins, step)
    if how == "back":
        for model, block in zip(twins, kept, strict=True):
            model.blocks.insert(1, block)
        for step in range(6, 9):
            _step_twins(twins, step)
    assert_at_rest(twins.sharded)


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@distributed(2)
def test_a_tree_that_is_replaced_while_one_rank_still_has_it(strategy: ShardingStrategy) -> None:
    """Here the trees are blocks without a unit around them."""

    def shard(model: nn.Module) -> None:
        fully_shard(model.inp, strategy=strategy)
        fully_shard(model.out, strategy=strategy)
        for block in model.blocks:
            for part in block.children():
                fully_shard(part, strategy=strategy)
            fully_shard(block, strategy=strategy)

    twins = Twins(Net, shard)
    for step in range(3):
        _step_twins(twins, step)
    new = _new_blocks(strategy=strategy)
    kept = [_take_out(*each) for each in zip(twins, new, strict=True)]
    for model in twins:
        kept.append(model.blocks[0].up)
        model.blocks[0].up = nn.Identity()
        model.blocks[0].down = nn.Identity()
    if dist.get_rank() == 0:
        kept.clear()
    for step in range(3, 7):
        _step_twins(twins, step)
    assert_at_rest(twins.sharded)


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@distributed(2)
def test_a_unit_inside_another_one_that_is_taken_out(strategy: ShardingStrategy) -> None:
    """The call of the outermost unit sees it, before it gathers ahead."""

    def shard(model: nn.Module) -> None:
        for part in (part for block in model.blocks for part in block.children()):
            fully_shard(part, strategy=strategy)
        shard_blocks(model, strategy=strategy)

    twins = Twins(Net, shard)
    for step in range(3):
        _step_twins(twins, step)
    losses = [loss_of(model) for model in twins]
    kept = [model.blocks[1] for model in twins]
    kept = [part for block in kept for part in block.children()] if dist.get_rank() == 0 else []
    for model in twins:
        model.blocks[1].up, model.blocks[1].down = nn.Identity(), nn.Identity()
    _run_waiting(twins, losses, is_evaluated=True)
    for step in range(3, 6):
        _step_twins(twins, step)
    assert_at_rest(twins.sharded)
    assert len(kept) == (4 if dist.get_rank() == 0 else 0)


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@distributed(2)
def test_a_tree_is_made_anew_between_calls_of_another(strategy: ShardingStrategy) -> None:
    """Both are reached by the same backward."""

    def shard(pair: nn.Module) -> None:
        fully_shard(pair[0], strategy=strategy)
        shard_blocks(pair[1], strategy=strategy)

    twins = Twins(lambda: nn.ModuleList([nn.Linear(5, 5), Net()]), shard)
    kept: list[nn.Module] = []
    for step in range(5):
        x = rank_input(4, 5, step=step)
        twins.step(lambda pair, x=x: pair[0](x).square().mean() + pair[1](x).square().mean())
        for model, optimizer in zip(twins, twins.optimizers(torch.optim.SGD), strict=True):
            optimizer.step()
            model.zero_grad()
        if step == 0:
            kept = [_take_out(pair[1], None) for pair in twins]
            if dist.get_rank() == 0:
                kept.clear()
    assert_at_rest(twins.sharded)
