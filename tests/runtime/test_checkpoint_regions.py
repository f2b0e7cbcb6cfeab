"""Forwards that a backward runs again, in part or nested, beside retained and crossing graphs."""

from __future__ import annotations

import pickle
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from composable_shard import ShardingStrategy, fully_shard, set_backward_prefetch
from composable_shard.comm.trace import trace_events
from composable_shard.runtime.tree import read_state
from tests.harness.pairs import pairwise
from tests.harness.ranks import distributed
from tests.programs import claims
from tests.programs.models import rank_input, seeded, shard_children, shard_layers, square_mean


def _save_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


Region = Callable[..., Any]
again: Region = partial(checkpoint, use_reentrant=False)
again_nested: Region = partial(checkpoint, use_reentrant=True)
selectively: Region = partial(
    again, context_fn=partial(create_selective_checkpoint_contexts, _save_products)
)


def _as_it_is(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


#: How a region of two units is run, and each unit inside it.
KINDS: dict[str, tuple[Region, Region]] = {
    "non-reentrant": (again, _as_it_is),
    "reentrant": (again_nested, _as_it_is),
    "non-reentrant in itself": (again, again),
    "reentrant in itself": (again_nested, again_nested),
    "non-reentrant in reentrant": (again_nested, again),
    "to the end": (again, again),
    "selective": (selectively, _as_it_is),
    "selective units": (_as_it_is, selectively),
}


class _WithSideLoss(nn.Module):
    """Returns a loss beside its output, of which its last weight is read alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.up(x))
        side = square_mean(self.down(hidden * 2))
        return x + self.down(hidden), side


class _Regions(nn.Module):
    """Two regions of two units each, and a unit between."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(_WithSideLoss() for _ in range(5))

    def _region(self, first: int, x: Tensor) -> tuple[Tensor, Tensor]:
        run, sides = KINDS[self.kind][1], []
        for block in self.blocks[first : first + 2]:
            x, side = run(block, x)
            sides.append(side)
        return x, torch.stack(sides).sum()

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the side losses and of the output's."""
        run = KINDS[self.kind][0]
        x, first = run(self._region, 0, x)
        x, between = self.blocks[4](x)
        x, second = run(self._region, 2, x)
        return square_mean(x) + first + between + second


#: The forwards whose backwards run in turn; all but the last of each retain their graphs.
ORDERS = {
    "twice": [0, 0, 1, 1, 2, 2],
    "there and back": [0, 1, 2, 2, 1, 0],
    "last first": [2, 1, 0],
    "middle first": [1, 0, 2],
    "together": [],
}


def _backward_in_order(order: str, losses: list[Tensor], *, can_repeat: bool) -> None:
    numbers = ORDERS[order] if can_repeat else list(dict.fromkeys(ORDERS[order]))
    for place, number in enumerate(numbers):
        losses[number].backward(retain_graph=number in numbers[place + 1 :])
    if not numbers:
        torch.stack(losses).sum().backward()


@pytest.mark.parametrize(
    *pairwise(
        kind=list(KINDS),
        order=["there and back", "middle first", "together"],  # `ORDERS` has two more
        strategy=list(ShardingStrategy),
        use_orig_params=[True, False],
        accumulates=[False, True],
    )
)
@distributed(2, on_device=True)
def test_c17_forwards_that_run_again_stay_right(
    kind: str, order: str, strategy: ShardingStrategy, use_orig_params: bool, accumulates: bool
) -> None:
    """C17: three forwards with side losses inside, then their backwards in any order."""

    def program(model: nn.Module, number: int) -> None:
        inputs = [
            rank_input(3, 6, step=3 * number + i, dtype=torch.float64).requires_grad_()
            for i in range(3)
        ]
        stops: AbstractContextManager[Any] = nullcontext()
        if kind == "to the end":
            stops = set_checkpoint_early_stop(False)
        with stops, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
            losses = [model(x) for x in inputs]
            # Torch goes through a selective region once only.
            _backward_in_order(order, losses, can_repeat="selective" not in kind)

    def shard(model: nn.Module, **options: Any) -> None:
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)

    claims.assert_right(
        lambda: _Regions(kind),
        program,
        shard=shard,
        accumulates=accumulates,
        steps=2,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


class _WithExtra(nn.Module):
    """Uses its first parameter on the first rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.randn(6))
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the weight, and perhaps by the other parameter."""
        y: Tensor = self.layer(x)
        uses_extra = not dist.is_initialized() or dist.get_rank() == 0
        return y * self.extra if uses_extra else y


class _RunsAgainBefore(nn.Module):
    """A region of the root's, with a unit inside; then a unit with buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.last = _WithExtra()

    def forward(self, x: Tensor) -> Tensor:
        """Run the region, then the unit."""
        y: Tensor = self.last(again(self.first, x))
        return y


@claims.strategies
@distributed(2)
def test_c17_region_that_runs_again_ends_the_units_after_it(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """C17: a rank without a gradient of a bucket reduces it before the region gathers units."""

    def shard(model: nn.Module, **options: Any) -> None:
        fully_shard(model.first[0], **options)
        fully_shard(model.last, bucket_cap_mb=1e-6, **options)
        fully_shard(model, **options)

    def program(model: nn.Module, number: int) -> None:
        square_mean(model(rank_input(3, 6, step=number, dtype=torch.float64))).backward()

    claims.assert_right(
        _RunsAgainBefore,
        program,
        shard=shard,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


class _Tied(nn.Module):
    """A unit whose weight another one uses too, run twice; all in reentrant regions but one."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6))
        self.borrower = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6))
        self.last = nn.Linear(6, 6, bias=False)
        self.borrower[0].weight = self.last.weight = self.owner[0].weight

    def forward(self, x: Tensor) -> Tensor:
        """Run all in turn."""
        for _ in range(2):
            x = again_nested(self.owner, x)
        y: Tensor = self.last(again_nested(self.borrower, x))
        return y


@claims.strategies
@distributed(2)
def test_c17_tied_weight_that_reentrant_regions_read(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """C17: gradients of one region say nothing of whether another one's are complete."""

    def shard(model: nn.Module, **options: Any) -> None:
        for unit in (model.owner, model.borrower, model.last):
            fully_shard(unit, **options)
        fully_shard(model, **options)

    def program(model: nn.Module, number: int) -> None:
        inputs = [
            rank_input(3, 6, step=2 * number + i, dtype=torch.float64).requires_grad_()
            for i in range(2)
        ]
        for loss in reversed([square_mean(model(x)) for x in inputs]):
            loss.backward()

    claims.assert_right(
        _Tied, program, shard=shard, strategy=strategy, use_orig_params=use_orig_params
    )


class _ReadsTied(nn.Module):
    """Reads its weight, in a region or not, and runs the unit that owns it in a region."""

    def __init__(self, owner: nn.Module, run: Region) -> None:
        super().__init__()
        self.layer, self.run = nn.Linear(6, 6), run
        self.layer.weight = owner.layer.weight

    def forward(self, x: Tensor, owner: nn.Module) -> Tensor:
        """Use the weight before and after the region of its owner."""
        x = torch.tanh(self.run(self.layer, x))
        y: Tensor = self.run(self.layer, again_nested(owner, x, True))
        return y


class _Owner(nn.Module):
    """Owns a weight, and a parameter that not all of its calls use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.extra = nn.Linear(6, 6), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, uses_extra: bool) -> Tensor:
        """Use both, or the weight alone."""
        y = torch.tanh(self.layer(x))
        return y * self.extra if uses_extra else y


class _OwnsInRegions(nn.Module):
    """A unit runs in regions, before and inside the call of another that reads its weight."""

    def __init__(self, run: Region) -> None:
        super().__init__()
        self.first, self.owner, self.between = nn.Linear(6, 6), _Owner(), nn.Linear(6, 6)
        self.reader = _ReadsTied(self.owner, run)

    def forward(self, x: Tensor) -> Tensor:
        """Run the owner before the other unit and in its call."""
        x = self.between(again_nested(self.owner, torch.tanh(self.first(x)), False))
        y: Tensor = self.reader(x, self.owner)
        return y


@pytest.mark.parametrize("bucket_cap_mb", [None, 1e-6])
@pytest.mark.parametrize("run", [again_nested, _as_it_is], ids=["in regions", "as it is"])
@claims.strategies
@distributed(2)
def test_c17_tied_weight_stays_for_the_call_that_reads_it(
    strategy: ShardingStrategy, use_orig_params: bool, run: Region, bucket_cap_mb: float | None
) -> None:
    """C17: a region of its owner inside that call doesn't end it, whichever gradients have come."""

    def shard(model: nn.Module, **options: Any) -> None:
        fully_shard(model.owner, bucket_cap_mb=bucket_cap_mb, **options)
        for unit in (model.between, model.reader, model):
            fully_shard(unit, **options)

    def program(model: nn.Module, number: int) -> None:
        inputs = [rank_input(3, 6, step=2 * number + i, dtype=torch.float64) for i in range(2)]
        torch.stack([square_mean(model(x)) for x in inputs]).sum().backward()

    claims.assert_right(
        partial(_OwnsInRegions, run),
        program,
        shard=shard,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


class _InParts(nn.ModuleList):
    """Runs as many of its layers as it is told."""

    def forward(self, x: Tensor, num_layers: int) -> Tensor:
        """Run the first layers in turn."""
        for layer in self[:num_layers]:
            x = torch.tanh(layer(x))
        return x


class _RunsInParts(nn.Module):
    """Uses a unit in two reentrant regions, in the first one in part; one on one rank in part."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = _InParts([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.uneven = _WithExtra()

    def forward(self, x: Tensor) -> Tensor:
        """Run the regions."""
        for num_layers in (1, 2):
            x = again_nested(self.shared, x, num_layers)
        y: Tensor = again_nested(self.uneven, x)
        return y


@pytest.mark.parametrize("strategy", [ShardingStrategy.NO_SHARD, ShardingStrategy.SHARD_OPTIM])
@distributed(2)
def test_c17_gradient_that_comes_after_a_reduction_on_one_rank(strategy: ShardingStrategy) -> None:
    """C17: where one rank has reduced a unit before its last gradient, and the other has not."""

    def shard(model: nn.Module, **options: Any) -> None:
        for unit in (model.shared, model.uneven, model):
            fully_shard(unit, **options)

    def program(model: nn.Module, number: int) -> None:
        x = rank_input(3, 6, step=number, dtype=torch.float64).requires_grad_()
        square_mean(model(x)).backward()

    claims.assert_right(
        _RunsInParts, program, shard=shard, steps=2, strategy=strategy, use_orig_params=True
    )


class _Scaled(nn.Module):
    """Runs a layer and scales; or scales alone, on the first rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, is_whole: bool) -> Tensor:
        """Use both parameters, or perhaps one."""
        if is_whole:
            y: Tensor = self.layer(x)
            return y * self.scale
        uses_scale = not dist.is_initialized() or dist.get_rank() == 0
        return x * self.scale if uses_scale else x * 2


class _LateOnOneRank(nn.Module):
    """Uses a unit in a reentrant region, and outside after other units."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scaled = _Scaled()

    def forward(self, x: Tensor) -> Tensor:
        """Run all in turn."""
        x = again_nested(self.scaled, self.before(x), False)
        y: Tensor = self.scaled(self.between(x), True)
        return y


@claims.strategies
@distributed(2)
def test_c17_gradient_that_comes_on_one_rank_alone(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """C17: all ranks have reduced the unit then, and one has a gradient of a region after that."""

    def shard(model: nn.Module, **options: Any) -> None:
        for unit in (model.before, model.between, model.scaled, model):
            fully_shard(unit, **options)

    def program(model: nn.Module, number: int) -> None:
        square_mean(model(rank_input(3, 6, step=number, dtype=torch.float64))).backward()

    claims.assert_right(
        _LateOnOneRank,
        program,
        shard=shard,
        steps=2,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


class _RunsAgainTwice(nn.Module):
    """Uses a layer in two reentrant regions and outside of them, and a parameter on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = _WithExtra()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        """Run the regions, then the layer again."""
        for _ in range(2):
            x = again_nested(self.shared, x)
        y: Tensor = self.shared.layer(x) * self.scale
        return y


@claims.variants
@distributed(2)
def test_c17_parameter_inside_and_outside_of_reentrant_regions(
    strategy: ShardingStrategy, use_orig_params: bool, accumulates: bool
) -> None:
    """C17: its value stays until no region needs it, whichever ranks use it."""

    def program(model: nn.Module, number: int) -> None:
        x = rank_input(3, 6, step=number, dtype=torch.float64).requires_grad_()
        square_mean(model(x)).backward()

    for bucket_cap_mb in (None, 1e-6):
        claims.assert_right(
            _RunsAgainTwice,
            program,
            shard=fully_shard,
            accumulates=accumulates,
            steps=2,
            strategy=strategy,
            use_orig_params=use_orig_params,
            bucket_cap_mb=bucket_cap_mb,
        )


class _UnitsInRegion(nn.Module):
    """Two units in a region, whose last node saves a tensor on the first rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.extra = nn.Parameter(torch.randn(6))

    def _region(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.second(torch.tanh(self.first(x)))
        uses_extra = not dist.is_initialized() or dist.get_rank() == 0
        return y * self.extra if uses_extra else y

    def forward(self, x: Tensor) -> Tensor:
        """Run the region."""
        y: Tensor = again(self._region, x)
        return y


@claims.variants
@distributed(2)
def test_c17_units_of_a_region_are_reduced_once(
    strategy: ShardingStrategy, use_orig_params: bool, accumulates: bool
) -> None:
    """C17: also where a backward has reached one before the region runs again, on some ranks."""

    def shard(model: nn.Module, **options: Any) -> None:
        for unit in (model.first, model.second, model):
            fully_shard(unit, **options)

    def program(model: nn.Module, number: int) -> None:
        inputs = [rank_input(3, 6, step=2 * number + i, dtype=torch.float64) for i in range(2)]
        losses = [square_mean(model(x)) for x in inputs]
        is_reversed = number % 2 == 0
        for loss in reversed(losses) if is_reversed else losses:
            with trace_events() as events:
                loss.backward()
            reduced = Counter(event.name for event in events if event.kind == "issue_reduce")
            # No forward but the last is expected, until a backward has reached an earlier one.
            assert not is_reversed or set(reduced.values()) <= {1}, reduced

    claims.assert_right(
        _UnitsInRegion,
        program,
        shard=shard,
        accumulates=accumulates,
        steps=2,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


class _Adds(nn.Module):
    """A layer, and a parameter whose gradient needs no saved tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, bias=False)
        self.shift = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) + self.shift
        return y


class _RunsAgainInTurn(nn.Module):
    """A region whose last node saves a tensor on one rank, in turn; then another unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = _Adds(), _Adds(), _Adds()
        self.extra = nn.Parameter(torch.randn(6))
        self.number = 0

    def _region(self, x: Tensor, uses_extra: bool) -> Tensor:
        y: Tensor = x + self.second(torch.tanh(self.first(x)))
        return y * self.extra if uses_extra else y

    def forward(self, x: Tensor) -> Tensor:
        """Run the region, then the unit."""
        self.number += 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        y: Tensor = again(self._region, x, (self.number + rank) % 2 == 0)
        return y + self.last(torch.tanh(y))


@pytest.mark.parametrize("prefetches", [True, False])
@pytest.mark.parametrize("order", ["together", "last first", "first first"])
@claims.variants
@distributed(2)
def test_c17_regions_of_several_forwards(
    strategy: ShardingStrategy,
    use_orig_params: bool,
    accumulates: bool,
    order: str,
    prefetches: bool,
) -> None:
    """C17: each gathers its units once, in order, after what a backward no longer needs has ended.

    Which region runs again before a call of it is reached differs by rank and by forward.
    """

    def shard(model: nn.Module, **options: Any) -> None:
        units = (model.first, model.second, model.last, model)
        for unit in units:
            fully_shard(unit, **options)
        for unit in units if not prefetches else ():
            set_backward_prefetch(unit, ())

    def program(model: nn.Module, number: int) -> None:
        inputs = [rank_input(3, 6, step=2 * number + i, dtype=torch.float64) for i in range(2)]
        losses = [square_mean(model(x)) for x in inputs]
        if order == "together":
            losses = [torch.stack(losses).sum()]
        for loss in reversed(losses) if order == "last first" else losses:
            loss.backward()

    claims.assert_right(
        _RunsAgainInTurn,
        program,
        shard=shard,
        accumulates=accumulates,
        steps=2,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


class _RunsAgainThenOutside(nn.Module):
    """A unit in a region, whose last node saves a tensor on one rank, and outside after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = _Adds(), _Adds()
        self.extra = nn.Parameter(torch.randn(6))

    def _region(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.first(x)
        uses_extra = not dist.is_initialized() or dist.get_rank() == 0
        return y * self.extra if uses_extra else y

    def forward(self, x: Tensor) -> Tensor:
        """Run the region, then its unit again."""
        y = torch.tanh(self.first(torch.tanh(again(self._region, x))))
        return torch.tanh(self.last(y))


@claims.strategies
@distributed(2)
def test_c17_gradients_spare_values_that_a_region_reads_again(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """C17: also of a unit whose last call was outside of any region."""

    def shard(model: nn.Module, **options: Any) -> None:
        for unit in (model.first, model.last, model):
            fully_shard(unit, **options)

    def program(model: nn.Module, number: int) -> None:
        square_mean(model(rank_input(3, 6, step=number, dtype=torch.float64))).backward()

    claims.assert_right(
        _RunsAgainThenOutside,
        program,
        shard=shard,
        steps=2,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


@distributed(2)
def test_c17_a_region_has_its_own_units_alone() -> None:
    """C17: also where a freed region's hook had the address that the next one's has."""
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    shard_children(model)
    gathers = set()
    for step in range(20):
        with trace_events() as events:
            x = rank_input(3, 6, step=step)
            for layer in model:
                x = again(layer, x)
            square_mean(x).backward()
        if step > 1:
            gathers.add(sum(event.kind == "all_gather" for event in events))
        for layer in model:
            (unit,) = read_state(layer).last_call.region.units
            assert unit() is read_state(layer)
    assert len(gathers) == 1


class _InsideOthers(nn.Module):
    """A region of five units, three of which run in regions or under hooks of their own inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def _inner(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[2](torch.tanh(again(self.layers[1], x)))
        return y

    def _region(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        x = torch.tanh(again(self._inner, x))
        with save_on_cpu():
            x = torch.tanh(self.layers[3](x))
        y: Tensor = self.layers[4](x)
        return y

    def forward(self, x: Tensor) -> Tensor:
        """Run the region."""
        y: Tensor = again(self._region, x)
        return y


@claims.variants
@distributed(2)
def test_c17_units_of_regions_inside_a_region_are_reduced_once(
    strategy: ShardingStrategy, use_orig_params: bool, accumulates: bool
) -> None:
    """C17: also under saved-tensor hooks inside; a backward gathers each of them once."""

    def program(model: nn.Module, number: int) -> None:
        loss = square_mean(model(rank_input(3, 6, step=number, dtype=torch.float64)))
        with trace_events() as events:
            loss.backward()
        for kind in ("issue_reduce", "issue_gather"):
            issued = Counter(event.name for event in events if event.kind == kind)
            assert set(issued.values()) <= {1}, (kind, issued)

    claims.assert_right(
        _InsideOthers,
        program,
        shard=shard_layers,
        accumulates=accumulates,
        steps=2,
        strategy=strategy,
        use_orig_params=use_orig_params,
    )


class _Shift(nn.Module):
    """Saves nothing for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class _SavesNothingLast(nn.Module):
    """A region whose last two units are over before it runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), _Shift(), _Shift())

    def forward(self, x: Tensor) -> Tensor:
        """Run the region."""
        y: Tensor = again(self.layers, x)
        return y


@claims.strategies
@distributed(2)
def test_units_that_save_nothing_are_gathered_once_for_a_backward(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """A unit that has ended is not gathered with the rest of its region again."""
    model = seeded(_SavesNothingLast)
    shard_layers(model, strategy=strategy, use_orig_params=use_orig_params)
    for step in range(3):
        loss = square_mean(model(rank_input(3, 6, step=step)))
        with trace_events() as events:
            loss.backward()
        issued = Counter(event.name for event in events if event.kind == "issue_gather")
        assert set(issued.values()) <= {1}, issued


@distributed(2)
def test_a_model_that_ran_regions_is_refused_by_pickle_with_the_reason() -> None:
    """A unit's last call, which knows its region, does not come before the reason."""
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    shard_children(model)
    square_mean(again(model, rank_input(3, 6))).backward()
    with pytest.raises(RuntimeError, match="a sharded module can't be pickled"):
        pickle.dumps(model)
