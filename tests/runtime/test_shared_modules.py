"""Modules with several parents, and tied weights, whatever of it is a unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard import ShardingStrategy, fully_shard, get_states, reshard, unshard
from tests.harness.pairs import pairwise
from tests.harness.ranks import distributed
from tests.programs import claims
from tests.programs.models import rank_input, square_mean


class _Parent(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(7, 7)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shared(torch.tanh(self.own(x)))


class _Family(nn.Module):
    """Two parents of one module, which one of them uses twice; `own` ties weights too."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7))
        self.first, self.second = _Parent(shared), _Parent(shared)
        self.out = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.first(self.second(x))))


def _run_family(model: nn.Module, microbatch: int) -> None:
    square_mean(model(rank_input(4, 7, step=microbatch, dtype=torch.float64))).backward()


def _shard_first(model: nn.Module, **options: Any) -> None:
    fully_shard(model.first, **options)
    fully_shard(model, **options)


def _shard_second(model: nn.Module, **options: Any) -> None:
    fully_shard(model.second, **options)
    fully_shard(model, **options)


def _shard_both(model: nn.Module, **options: Any) -> None:
    fully_shard(model.first, **options)
    _shard_second(model, **options)


def _shard_without_a_root(model: nn.Module, **options: Any) -> None:
    for child in model.children():
        fully_shard(child, **options)


def _shard_shared(model: nn.Module, **options: Any) -> None:
    fully_shard(model.first.shared, **options)
    _shard_both(model, **options)


@pytest.mark.parametrize(
    *pairwise(
        shard=[_shard_first, _shard_second, _shard_both, _shard_without_a_root, _shard_shared],
        strategy=list(ShardingStrategy),
        use_orig_params=[True, False],
        accumulates=[True, False],
    )
)
@distributed(2)
def test_c12_module_of_two_parents(
    shard: Callable[..., object],
    strategy: ShardingStrategy,
    use_orig_params: bool,
    accumulates: bool,
) -> None:
    """Case 12 of the claims: the unit that does not manage its parameters borrows them."""
    claims.assert_right(
        _Family,
        _run_family,
        shard=shard,
        strategy=strategy,
        use_orig_params=use_orig_params,
        accumulates=accumulates,
    )


class _Words(nn.Module):
    """The matrix of the embedding is that of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 7)
        self.block = nn.Linear(7, 7)
        self.head = nn.Linear(7, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.block(self.embedding(tokens))))


def _run_words(model: nn.Module, microbatch: int) -> None:
    tokens = rank_input(4, 3, step=microbatch).abs().mul(3).long().clamp(max=8)
    square_mean(model(tokens)).backward()


@claims.variants
@distributed(2)
def test_c12_tied_weights_without_a_unit_around_them(
    strategy: ShardingStrategy, use_orig_params: bool, accumulates: bool
) -> None:
    """Case 12 of the claims: the units of both become one tree."""
    claims.assert_right(
        _Words,
        _run_words,
        shard=_shard_without_a_root,
        strategy=strategy,
        use_orig_params=use_orig_params,
        accumulates=accumulates,
    )


@pytest.mark.parametrize("use_orig_params", [True, False])
@distributed(2)
def test_c12_a_module_of_an_outer_unit_is_refused(use_orig_params: bool) -> None:
    """With both forms of parameters, whether the modules show them or not."""
    model = _Family()
    fully_shard(model.first, use_orig_params=use_orig_params)
    with pytest.raises(ValueError, match=r"'0\.weight' is already managed by the unit '_Parent'"):
        fully_shard(model.first.shared, use_orig_params=use_orig_params)


def _shard_all_but_the_second(model: nn.Module, **options: Any) -> None:
    for module in (model.first, model.second.own, model.out):
        fully_shard(module, **options)


def _run_at_rest(model: nn.Module, microbatch: int) -> None:
    """A penalty that is divided by numbers of this rank, and a gradient that is added by hand."""
    is_sharded = bool(get_states(model))
    if is_sharded:
        unshard(model, recurse=True)
    loss = square_mean(model(rank_input(4, 7, step=microbatch, dtype=torch.float64)))
    penalty = sum(param.square().sum() for param in model.parameters())
    penalty = penalty + (model.out.weight @ model.out.weight.t()).sum()
    ((loss + penalty) / (2 + dist.get_rank())).backward()
    if is_sharded:
        reshard(model, recurse=True)
    for param in model.parameters():
        param.grad.add_(param.detach(), alpha=0.1)


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@distributed(2)
def test_c12_weights_in_a_loss(strategy: ShardingStrategy) -> None:
    """As errors about losses at rest advise: between `unshard` and `reshard`, or by hand."""
    claims.assert_right(_Family, _run_at_rest, shard=_shard_first, strategy=strategy)
