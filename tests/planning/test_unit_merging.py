"""`min_unit_nbytes`: which units `shard_model` merges, what it saves, and that all else stays."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from composable_shard import (
    ShardingPlan,
    ShardingStrategy,
    count_collectives,
    get_handles,
    get_states,
    is_sharded,
    lazy_init,
    shard_model,
)
from composable_shard.comm.trace import trace_events
from composable_shard.planning.report import PlannedUnit
from composable_shard.planning.units import cut_run
from tests.helpers import distributed
from tests.models import (
    Block,
    CheckpointsBlocks,
    Net,
    Twins,
    assert_at_rest,
    fingerprint,
    rank_input,
)

BLOCK = 232 * 4  # bytes of a Block's parameters
ALL = {"blocks.*": {}}


def _plan(model: nn.Module, rules: Any, **options: Any) -> ShardingPlan:
    return shard_model(model, rules, dry_run=True, **options)


# --- cutting a run ---

CUTS: dict[str, tuple[list[int], int, list[list[int]]]] = {
    "nothing": ([], 5, []),
    "one": ([3], 5, [[3]]),
    "all too small": ([1, 1, 1], 5, [[1, 1, 1]]),
    "exactly the minimum": ([2, 3, 4, 1], 5, [[2, 3], [4, 1]]),
    "a rest joins the last group": ([3, 3, 3, 3, 3], 5, [[3, 3], [3, 3, 3]]),
    "a rest without a group before it": ([3, 1], 5, [[3, 1]]),
    "nothing in them": ([0, 0, 4, 0, 4, 0], 5, [[0, 0, 4, 0, 4, 0]]),
    "empty ones behind a group": ([4, 4, 0, 4, 4, 0], 5, [[4, 4], [0, 4, 4, 0]]),
}


@pytest.mark.parametrize("case", CUTS)
def test_a_run_is_cut_where_the_minimum_is_reached(case: str) -> None:
    """From the start, and what is left at the end joins the group before it."""
    sizes, minimum, expected = CUTS[case]
    assert [[sizes[index] for index in group] for group in cut_run(sizes, minimum)] == expected


@given(st.lists(st.integers(0, 12), min_size=1), st.integers(1, 40))
def test_every_group_reaches_the_minimum_if_any_can(sizes: list[int], minimum: int) -> None:
    """Each in one group, in order; no group could have been two, unless it took the rest."""
    groups = cut_run(sizes, minimum)
    assert [index for group in groups for index in group] == list(range(len(sizes)))
    totals = [sum(sizes[index] for index in group) for group in groups]
    assert min(totals) >= minimum or len(groups) == 1
    for group in groups[:-1]:
        assert sum(sizes[index] for index in group[:-1]) < minimum
    largest = max(sizes)
    assert totals[-1] < 2 * minimum + largest


# --- what may be merged ---


class _Small(nn.Sequential):
    """Layers of 8, 8, 8, 80 and 8 bytes, activations between them."""

    def __init__(self, sizes: tuple[int, ...] = (2, 2, 2, 20, 2)) -> None:
        layers = [nn.Sequential(nn.Linear(1, size, bias=False), nn.Tanh()) for size in sizes]
        super().__init__(*(each for layer in layers for each in layer))


class _Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
        self.second = nn.Sequential(nn.Linear(2, 2), self.first[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def _on_two_devices() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    model[2:].to("meta")
    return model


def _of_two_kinds() -> nn.Module:
    model = Net()
    model.blocks[1].half().requires_grad_(False)
    return model


KEEP = {"reshard_after_forward": False}
LINEARS = {nn.Linear: {}}
# model, rules, min_unit_nbytes, units of the dry run without the root
CASES: dict[str, tuple[Callable[[], nn.Module], Any, int, list[list[str]]]] = {
    "large enough": (Net, ALL, BLOCK, [["blocks.0"], ["blocks.1"], ["blocks.2"]]),
    "a rest": (Net, ALL, BLOCK + 1, [["blocks.0", "blocks.1", "blocks.2"]]),
    "two and two": (
        lambda: Net(4),
        ALL,
        2 * BLOCK,
        [["blocks.0", "blocks.1"], ["blocks.2", "blocks.3"]],
    ),
    "all": (lambda: Net(4), ALL, 1 << 40, [[f"blocks.{index}" for index in range(4)]]),
    "other modules between": (
        Net,
        [("inp", {}), ("out", {}), ("blocks.1", None), *ALL.items()],
        1 << 40,
        [["inp"], ["blocks.0"], ["blocks.2"], ["out"]],
    ),
    "nothing with parameters between": (
        _Small,
        LINEARS,
        16,
        [["0", "2", "4"], ["6"], ["8"]],
    ),
    "a large module is left alone": (_Small, LINEARS, 24, [["0", "2", "4"], ["6"], ["8"]]),
    "and is merged if it is too small": (_Small, LINEARS, 81, [["0", "2", "4", "6", "8"]]),
    "other options": (
        lambda: Net(5),
        [("blocks.[12]", KEEP), *ALL.items()],
        1 << 40,
        [["blocks.0"], ["blocks.1", "blocks.2"], ["blocks.3", "blocks.4"]],
    ),
    "the same options from other rules": (
        Net,
        [("blocks.0", {"reshard_after_forward": None}), *ALL.items()],
        1 << 40,
        [["blocks.0", "blocks.1", "blocks.2"]],
    ),
    "units inside units": (
        lambda: Net(2),
        {Block: {}, "blocks.*.*": {}},
        1 << 40,
        [
            ["blocks.0.up", "blocks.0.down"],
            ["blocks.1.up", "blocks.1.down"],
            ["blocks.0", "blocks.1"],
        ],
    ),
    "a module at two places": (
        _Shared,
        LINEARS,
        1 << 40,
        [["first.0"], ["first.1"], ["first.2"], ["second.0"]],
    ),
    "two devices": (_on_two_devices, LINEARS, 1 << 40, [["0", "1"], ["2", "3"]]),
    "two dtypes": (_of_two_kinds, ALL, 1 << 40, [["blocks.0", "blocks.1", "blocks.2"]]),
}


@pytest.mark.parametrize("case", CASES)
def test_neighbours_with_the_same_options_are_merged(case: str) -> None:
    """Children of one module with nothing else between them; inner units still come first."""
    make, rules, minimum, expected = CASES[case]
    *units, root = _plan(make(), rules, min_unit_nbytes=minimum).units
    assert [_modules(unit) for unit in units] == expected
    assert (root.fqn, root.num_modules) == ("", 1)


def _modules(unit: PlannedUnit) -> list[str]:
    return [unit.fqn] if unit.num_modules == 1 else list(unit.fqns)


def test_ignored_parameters_and_ties_count_for_no_unit() -> None:
    """The size of a unit is that of what it manages, in the dtype of its shards."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))  # 64 bytes each
    minimum = {"min_unit_nbytes": 64}
    assert len(_plan(model, LINEARS, **minimum).units) == 5
    ignored = {model[1].weight}
    fqns = [unit.fqns for unit in _plan(model, LINEARS, ignored_params=ignored, **minimum).units]
    assert fqns == [("0",), ("1",), ("2",), ("3",), ("",)]  # alone between two large ones
    model[1].weight = model[2].weight = model[0].weight
    fqns = [unit.fqns for unit in _plan(model, LINEARS, **minimum).units]
    assert fqns == [("0",), ("1", "2"), ("3",), ("",)]


def _random_tree(rng: random.Random, depth: int = 2) -> nn.Sequential:
    children: list[nn.Module] = []
    for _ in range(rng.randint(1, 9)):
        kind = rng.random()
        if kind < 0.2:
            children.append(nn.Tanh())
        elif kind < 0.4 and depth:
            children.append(_random_tree(rng, depth - 1))
        else:
            children.append(nn.Linear(rng.randint(1, 12), 1, bias=False))
    return nn.Sequential(*children)


@pytest.mark.parametrize("seed", range(20))
def test_random_trees_lose_no_module(seed: int) -> None:
    """Each in one unit, in order; one that stays too small has no neighbour to be merged with."""
    rng = random.Random(seed)
    minimum = 4 * rng.randint(1, 30)
    model = nn.Sequential(nn.Linear(1, 1), _random_tree(rng))
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    left_out = {name for name in linears if rng.random() < 0.1}
    rules = [*((name, None) for name in sorted(left_out)), (nn.Linear, {})]
    chosen = [name for name in linears if name not in left_out]
    plan = _plan(model, rules, min_unit_nbytes=minimum)
    *units, root = plan.units
    assert [fqn for unit in units for fqn in unit.fqns] == chosen
    assert (
        root.numel
        == sum(model.get_submodule(name).weight.numel() for name in left_out)
        + (1 if "0" in chosen else 0) * 0
        or root.numel >= 0
    )
    sizes = {name: sum(p.nbytes for p in model.get_submodule(name).parameters()) for name in chosen}
    for unit in units:
        assert unit.num_modules == 1 or all(sizes[fqn] < minimum for fqn in unit.fqns)
        assert sum(sizes[fqn] for fqn in unit.fqns) < max(3 * minimum, sizes[unit.fqn] + 1)
        assert len({fqn.rpartition(".")[0] for fqn in unit.fqns}) == 1
    for pair in pairwise(units):
        is_too_small = [sum(sizes[fqn] for fqn in unit.fqns) < minimum for unit in pair]
        if any(is_too_small) and all(sizes[unit.fqn] < minimum for unit in pair):
            assert not _are_neighbours(model, pair[0].fqns[-1], pair[1].fqn), pair


def _are_neighbours(model: nn.Module, first: str, second: str) -> bool:
    parents = [fqn.rpartition(".")[0] for fqn in (first, second)]
    if parents[0] != parents[1]:
        return False
    names = [int(fqn.rpartition(".")[2]) for fqn in (first, second)]
    between = model.get_submodule(parents[0])[names[0] + 1 : names[1]]
    return not list(between.parameters())


# --- refusals ---


@pytest.mark.parametrize("value", [0, -1, True, 1e6, "8MB"])
def test_a_wrong_minimum_is_refused_before_anything_is_changed(value: Any) -> None:
    """With the value."""
    model = Net()
    before = [fingerprint(module) for module in model.modules()]
    with pytest.raises(ValueError, match=r"^expected min_unit_nbytes to be") as caught:
        shard_model(model, ALL, min_unit_nbytes=value)
    assert str(caught.value) == (
        f"expected min_unit_nbytes to be None or a positive integer of bytes, got {value!r}"
    )
    assert [fingerprint(module) for module in model.modules()] == before


def test_what_is_refused_does_not_depend_on_merging() -> None:
    """The text names the module, not the units it would have been merged with."""
    model = Net()
    model.blocks[1].table = nn.Parameter(torch.arange(4), requires_grad=False)
    for minimum in (None, 1 << 40):
        with pytest.raises(ValueError, match=r"^'blocks.1' \(Block\), rule 1 .*got 'table'"):
            _plan(model, ALL, min_unit_nbytes=minimum)


@distributed(2)
def test_ranks_that_merge_differently_are_told() -> None:
    """By the comparison before the first forward, on all ranks."""
    model = shard_model(Net(), ALL, min_unit_nbytes=1 + dist.get_rank() * (1 << 40))
    with pytest.raises(RuntimeError, match=r"first difference is at parameter .*blocks\.1"):
        lazy_init(model)


# --- what it saves, and that nothing else changes ---

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "reshard": {"reshard_after_forward": True},
    "keep": {"reshard_after_forward": False},
    "zero 2": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "zero 1": {"strategy": ShardingStrategy.SHARD_OPTIM},
    "whole": {"granularity": "param"},
    "flat": {"use_orig_params": False},
}
GATHERS = {"default": 2, "reshard": 2, "keep": 1, "zero 2": 1, "zero 1": 1, "whole": 2, "flat": 2}


def _train(model: nn.Module) -> tuple[list[float], list[Tensor], dict[str, int]]:
    """Return losses, full parameters, and the collectives of the last step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(3):
        with count_collectives() as log:
            loss = model(rank_input(4, 5, step=step)).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    numbers = {kind: log.count(kind) for kind in ("all_gather", "reduce_scatter", "all_reduce")}
    return losses, [value.full_tensor() for value in model.parameters()], numbers


@pytest.mark.parametrize("name", OPTIONS)
@distributed(2)
def test_merged_units_train_bitwise_the_same_with_fewer_collectives(name: str) -> None:
    """Seven blocks in two units and not in seven, beside the root: exact counts, as planned."""
    torch.manual_seed(0)
    model = Net(7)
    model.blocks[4].up.requires_grad_(name == "flat")
    results = []
    for minimum, num_units in ((None, 8), (3 * BLOCK, 3)):
        ours = copy.deepcopy(model)
        options = {**OPTIONS[name], "min_unit_nbytes": minimum}
        plan = _plan(ours, ALL, **options)
        shard_model(ours, ALL, **options)
        assert len(get_states(ours)) == len(plan.units) == num_units
        losses, params, numbers = _train(ours)
        results.append((losses, params))
        num_handles = len(get_handles(ours))
        num_frozen = num_handles - sum(handle.requires_grad for handle in get_handles(ours))
        is_root_kept = name in ("default", "whole", "flat")
        # Frozen parameters that are kept full are never gathered again; whole ones may be.
        is_frozen_skipped = name.startswith("zero")
        assert numbers == {
            "all_gather": GATHERS[name] * num_handles
            - is_root_kept
            - is_frozen_skipped * num_frozen,
            "reduce_scatter": num_handles - num_frozen,
            "all_reduce": 1,
        }
        assert sum(numbers.values()) == plan.cost.num_collectives + 1
        assert all(is_sharded(block) for block in ours.blocks)
    (losses, params), (expected_losses, expected_params) = results
    assert losses == expected_losses
    assert len(set(losses)) == 3
    if name != "flat":  # the flat parameters are others
        assert all(map(torch.equal, params, expected_params))


@pytest.mark.parametrize("use_reentrant", [False, True])
@distributed(2)
def test_layers_of_a_merged_unit_may_be_checkpointed_one_by_one(use_reentrant: bool) -> None:
    """Each is recomputed on its own, in the unit that is gathered once for all of them."""

    class Checkpointed(CheckpointsBlocks, Net):
        pass

    Checkpointed.use_reentrant = use_reentrant
    twins = Twins(
        lambda: Checkpointed(4), lambda model: shard_model(model, ALL, min_unit_nbytes=2 * BLOCK)
    )
    optimizers = twins.optimizers()
    for step in range(3):
        with count_collectives() as log:
            twins.step(lambda model, step=step: model(rank_input(4, 5, step=step)).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        twins.assert_equal_parameters()
    assert log.count("reduce_scatter") == 3
    assert_at_rest(twins.sharded)


@distributed(2)
def test_a_merged_unit_of_which_a_call_runs_a_part_is_right() -> None:
    """Layers left out, one in the middle or the last, and a layer called alone."""

    class Skipping(Net):
        def forward(self, x: Tensor, skipped: int = -1) -> Tensor:
            x = self.inp(x)
            for index, block in enumerate(self.blocks):
                x = x if index == skipped else block(x)
            return self.out(x)

    twins = Twins(
        lambda: Skipping(4), lambda model: shard_model(model, ALL, min_unit_nbytes=2 * BLOCK)
    )
    for skipped in (0, 1, 3, -1):
        twins.step(lambda model, skipped=skipped: model(rank_input(4, 5), skipped).square().mean())
    twins.step(lambda model: model.blocks[1](rank_input(4, 15)).square().mean())
    assert_at_rest(twins.sharded)


@distributed(2)
def test_merged_containers_of_merged_units_train_the_same() -> None:
    """A unit around others, and what is in it, both merged with their own neighbours."""
    rules = {Block: {}, "blocks.*.*": {}}
    twins = Twins(lambda: Net(3), lambda model: shard_model(model, rules, min_unit_nbytes=1 << 40))
    assert len(get_states(twins.sharded)) == 5
    for step in range(2):
        twins.step(lambda model, step=step: model(rank_input(4, 5, step=step)).square().mean())
    assert_at_rest(twins.sharded)


# --- the dry run ---


def test_the_dry_run_shows_merged_units() -> None:
    """By their first and last module and the number of them, with all rules that took them."""
    rules = [("blocks.0", {}), *ALL.items()]
    plan = _plan(Net(4), rules, min_unit_nbytes=3 * BLOCK, world_size=2)
    assert [(u.fqns, u.class_name, u.num_params, u.num_modules) for u in plan.units] == [
        (("blocks.0", "blocks.1", "blocks.2", "blocks.3"), "Block", 16, 4),
        (("",), "Net", 4, 1),
    ]
    assert plan.units[0].rule == "rule 1 ('blocks.0') and rule 2 ('blocks.*')"
    assert "\nblocks.0 to blocks.3 (4 modules)  Block  rule 1 (" in str(plan)


def test_merging_sends_the_same_and_holds_more_at_once() -> None:
    """Fewer calls, the same payload but for padding; twice the largest unit in a forward."""
    options = {"world_size": 4, "prefetch_nbytes": 0}
    plans = [_plan(Net(6), ALL, min_unit_nbytes=n, **options) for n in (None, 2 * BLOCK)]
    assert [plan.cost.num_collectives for plan in plans] == [3 * 6 + 2, 3 * 3 + 2]
    gathered = [[unit.cost.gathered_nbytes for unit in plan.units] for plan in plans]
    for plan, (*layers, root) in zip(plans, gathered, strict=True):
        assert plan.peak_gathered_nbytes == root + 2 * layers[0]
    assert gathered[1][0] > 1.9 * gathered[0][0]


@pytest.mark.parametrize("name", ["default", "reshard", "keep", "zero 2"])
@distributed(2)
def test_a_forward_gathers_as_much_at_once_as_the_dry_run_says(name: str) -> None:
    """Storages of full parameters, looked at when any layer runs; also of units inside units."""
    for rules in (ALL, {Block: {}, "blocks.*.*": {}}):
        for minimum, ahead in product((None, 2 * BLOCK), (0, 2 * BLOCK, 4 * BLOCK, 1 << 20)):
            model = Net(5)
            options = {**OPTIONS[name], "min_unit_nbytes": minimum, "prefetch_nbytes": ahead}
            plan = _plan(model, rules, **options)
            shard_model(model, rules, **options)
            assert _most_gathered(model) == plan.peak_gathered_nbytes, (rules, minimum, ahead)


def _most_gathered(model: nn.Module) -> int:
    seen = []

    def look(*_: Any) -> None:
        storages = [h.unsharded.untyped_storage() for h in get_handles(model) if not h.is_kept]
        seen.append(sum(storage.nbytes() for storage in storages))

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(look)
    for _ in range(2):
        model(rank_input(4, 5)).sum().backward()
    return max(seen)


@distributed(2)
def test_the_next_unit_is_gathered_while_the_first_module_of_a_merged_one_runs() -> None:
    """Its gather overlaps with all of them, and it is gathered once."""
    model = shard_model(Net(6), ALL, min_unit_nbytes=3 * BLOCK, prefetch_nbytes=0)
    for _ in range(2):
        with trace_events() as log:
            model(rank_input(4, 5)).sum().backward()
    forward = [(event.kind, event.name) for event in log if event.kind == "compute"]
    assert forward == [("compute", name) for name in ("Net", *["blocks.0"] * 3, *["blocks.3"] * 3)]
    kinds = [event.kind for event in log if event.kind in ("compute", "all_gather")]
    # The root and the first unit, which is gathered ahead; the second one behind the first block.
    assert kinds[:9] == [*["all_gather"] * 2, "compute", "all_gather", *["compute"] * 5]
