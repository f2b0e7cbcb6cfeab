"""Random trees of units, used at random: equal gradients, and nobody hangs."""

from __future__ import annotations

from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard import ShardingStrategy, fully_shard
from tests.harness.ranks import distributed
from tests.programs.models import Twins, rank_input

_STRATEGIES = [ShardingStrategy.FULL_SHARD, *ShardingStrategy]  # half of the units, almost


def _mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


class _RandomUnit(nn.Module):
    """A tree of modules with matrices that each rank uses or not, as it is told."""

    def __init__(self, random: Random, depth: int) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(
            nn.Parameter(torch.randn(6, 6) / 3, requires_grad=random.random() > 0.2)
            for _ in range(random.randint(0, 3))
        )
        num_children = random.randint(0, 3) if depth else 0
        self.inner = nn.ModuleList(_RandomUnit(random, depth - 1) for _ in range(num_children))
        self.operations = [(0, i) for i in range(len(self.matrices))]
        self.operations += [(1, i) for i in range(num_children)]
        if self.operations:
            self.operations += random.choices(self.operations, k=random.randint(0, 2))
        random.shuffle(self.operations)
        self.key = random.randint(0, 30)
        self.is_unit = random.random() < 0.7
        self.options: dict[str, object] = {"strategy": random.choice(_STRATEGIES)}
        if self.options["strategy"] is ShardingStrategy.FULL_SHARD:
            self.options["reshard_after_forward"] = random.choice([None, True, False])
        self.options["bucket_cap_mb"] = random.choice([None, 1e-6, 3e-4])  # one or two matrices

    def forward(self, x: Tensor, uses: list[bool]) -> Tensor:
        for position, (is_inner, index) in enumerate(self.operations):
            if is_inner:
                x = self.inner[index](x, uses)
            elif uses[self.key + position]:
                x = torch.tanh(x @ self.matrices[index])
        return x


class _RandomTree(nn.Module):
    """A random tree between two matrices that all ranks use."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.tree = _RandomUnit(random, depth=2)
        self.last = nn.Linear(6, 6)

    def forward(self, x: Tensor, uses: list[bool]) -> Tensor:
        return self.last(self.tree(torch.tanh(self.first(x)), uses))


def _shard_random_tree(model: nn.Module) -> None:
    for module in reversed(list(model.modules())):
        if isinstance(module, _RandomUnit) and module.is_unit:
            fully_shard(module, **module.options)
    fully_shard(model)


def _run_backwards(twins: Twins, model: nn.Module, losses: list[Tensor], order: str) -> None:
    if order == "sum":
        twins.backward(model, torch.stack(losses).sum())
    elif order == "twice":
        for loss in losses + losses:
            twins.backward(model, loss, retain_graph=True)
    else:
        for loss in losses if order == "each" else reversed(losses):
            twins.backward(model, loss)


@pytest.mark.parametrize("seed", range(8))
@distributed(2, 3)
def test_random_trees_with_parameters_used_on_some_ranks_only(seed: int) -> None:
    """Whatever is nested, repeated, shared or unused: equal gradients, and nobody hangs."""
    random, own_random = Random(seed), Random(100 * seed + dist.get_rank())
    twins = Twins(lambda: _RandomTree(random), _shard_random_tree)
    for step in range(3):
        order = random.choice(["sum", "each", "reversed", "twice"])
        num_forwards = random.choice([1, 1, 2])
        uses = [own_random.choices([True, False], k=50) for _ in range(num_forwards)]
        for model in twins:
            losses = [
                _mean_square(model(rank_input(3, 6, step=10 * step + i), uses[i]))
                for i in range(num_forwards)
            ]
            _run_backwards(twins, model, losses, order)
        twins.assert_equal_gradients()
        for model in twins:
            model.zero_grad()
