"""`shard_model`: choose the units of a whole model, and their options, by rules."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar, overload

import torch.distributed as dist
from torch import nn
from typing_extensions import Unpack

from composable_shard.comm import ShardGroup
from composable_shard.construct import Plan, find_shard_group, form_unit, plan_unit
from composable_shard.layout import balance
from composable_shard.options import OptionsDict, UnitOptions
from composable_shard.planning.costs import RankCounts, unit_cost
from composable_shard.planning.description import listed
from composable_shard.planning.fake_run import StepMemory, find_peaks, moments_of
from composable_shard.planning.module_tree import ModuleTree
from composable_shard.planning.rules import Rule, Rules, parse_rules, transformer_blocks
from composable_shard.planning.sharding_plan import PlannedUnit, ShardingPlan
from composable_shard.runtime import is_sharded

_MAX_NAMES = 10  # in a message


@dataclass(frozen=True)
class Unit:
    """A module that becomes a unit, the rule that selected it, and its options."""

    module: nn.Module
    rule: str  # the rule's name in messages
    given: dict[str, Any]  # the options that the rule and the defaults gave by name
    options: UnitOptions


@dataclass(frozen=True)
class _Taken:
    """A module that a rule selected; options None leave it in the unit around it."""

    rule: str
    options: Mapping[str, Any] | None


def choose_units(
    tree: ModuleTree, rules: Sequence[Rule], defaults: Mapping[str, Any]
) -> list[Unit]:
    """Choose units: the first rule that selects a module decides. Return inner units first."""
    _merge("the defaults", defaults)
    for rule in rules:
        _merge(rule.label, {**defaults, **(rule.options or {})})
    # Wrong options are named first, also of a rule that selects nothing. An earlier rule keeps its
    # modules, so the order of the rules is that of this loop.
    taken: dict[nn.Module, _Taken] = {}
    for rule in rules:
        new = _find(tree, rule, taken)
        if not new:
            raise ValueError(_why_idle(tree, rule, _find(tree, rule, {})))
        taken.update(new)
    units = []
    for module in tree.fqns:
        entry = taken.get(module) or _Taken("defaults", {} if module is tree.root else None)
        if entry.options is not None:
            given = {**defaults, **entry.options}
            units.append(Unit(module, entry.rule, given, _merge(entry.rule, given)))
    return units


def _find(
    tree: ModuleTree, rule: Rule, taken: Mapping[nn.Module, _Taken]
) -> dict[nn.Module, _Taken]:
    """Return the modules that `rule` selects and no earlier rule has selected."""
    return {
        module: _Taken(rule.label, rule.options)
        for module, fqns in tree.fqns.items()
        # The root has no unit around it that it could stay in.
        if module not in taken and not (rule.options is None and module is tree.root)
        if any(rule.is_match(fqn, module) for fqn in fqns)
    }


def _why_idle(tree: ModuleTree, rule: Rule, alone: Mapping[nn.Module, _Taken]) -> str:
    """Return the error text for a rule that selects nothing, given what it would select alone."""
    if alone:
        return (
            f"{rule.label} selects only what earlier rules have selected. Remove it, or move it to "
            "the front."
        )
    kinds = dict.fromkeys(type(module).__name__ for module in tree.root.modules())
    return (
        f"{rule.label} selects no module of {type(tree.root).__name__}, which has the classes "
        f"{listed([*kinds], _MAX_NAMES)}. Correct or remove it."
    )


def _merge(owner: str, given: Mapping[Any, Any]) -> UnitOptions:
    """Return the defaults of `fully_shard` with these options; `owner` names them in errors."""
    try:
        return UnitOptions().override(given)
    except ValueError as error:
        raise ValueError(f"{owner}: {error}") from error


_M = TypeVar("_M", bound=nn.Module)


@overload
def shard_model(
    model: nn.Module,
    rules: Rules | None = None,
    *,
    dry_run: Literal[True],
    world_size: int | None = None,
    **defaults: Unpack[OptionsDict],
) -> ShardingPlan: ...


@overload
def shard_model(
    model: _M,
    rules: Rules | None = None,
    *,
    dry_run: Literal[False] = False,
    world_size: None = None,
    **defaults: Unpack[OptionsDict],
) -> _M: ...


def shard_model(
    model: _M,
    rules: Rules | None = None,
    *,
    dry_run: bool = False,
    world_size: int | None = None,
    **defaults: Unpack[OptionsDict],
) -> _M | ShardingPlan:
    """Apply `fully_shard` to the modules that `rules` select, inner ones first, and to `model`.

    A rule is `(selector, options)`. The options override the defaults; `None` means "not a unit of
    its own". A selector is

    - a module class or a tuple of classes, subclasses included;
    - an FQN glob: `*`, `?` and `[ab]` stay within one component, `**` goes across, so `"layers.*"`
      selects the layers, `"layers.**"` also everything in them, `"**.mlp"` every mlp;
    - a predicate, called with an FQN and a module.

    `by_class` and `transformer_blocks` make rules. The first rule that selects a module
    decides; units may lie in units. `model` is the root unit and manages all other parameters. It
    takes the defaults, or the options of a rule whose class or predicate selects it. A module with
    several FQNs forms one unit, and a rule for any of them selects it.

        shard_model(model, {Layer: {}, "head": {"reshard_after_forward": False}})
        shard_model(model, transformer_blocks(model), dry_run=True, world_size=64)

    All units are checked before the first one is formed, so a refused call leaves the model
    unchanged. If memory runs out, the units formed so far stay.

    Args:
        model: The model; no module in it is sharded yet.
        rules: A mapping or a sequence of pairs. Default: `transformer_blocks(model)`.
        dry_run: Change nothing. Rank 0 prints the table of units, with the bytes that a rank will
            hold and send; all ranks return it. Needs no process group; the model may be on the meta
            device.
        world_size: For a dry run, the number of ranks of every unit. Default: the size of the mesh
            or of the process group, or 1 without either.
        defaults: Options of `fully_shard` for all units.

    Returns:
        `model`; with `dry_run=True` the `ShardingPlan`.

    Raises:
        ValueError: If a rule or option is not valid, a rule selects no module or only ones that
            earlier rules selected, a unit would have no forward, or `fully_shard` refuses a unit;
            the text names the rule or the unit.
        RuntimeError, NotImplementedError: As `fully_shard`.
    """
    _check_call(model, dry_run, world_size)
    shape = None if world_size is None else (world_size,)
    rules = transformer_blocks(model) if rules is None else rules
    planned = plan_model(model, rules, defaults, shape, has_ranks=not dry_run)
    if dry_run:
        if not dist.is_initialized() or dist.get_rank() == 0:
            sys.stdout.write(f"{planned.report}\n")
        return planned.report
    units, owners = [each.unit for each in planned.checked], planned.owners
    # They hold the parameters as they are now.
    del planned
    for unit in units:
        form_unit([unit.module], unit.options, owners)
    return model


@dataclass(frozen=True)
class CheckedUnit:
    """A unit that can be formed; the shard group is None where the ranks don't exist."""

    unit: Unit
    plan: Plan
    shard_group: ShardGroup | None
    ranks: RankCounts


@dataclass(frozen=True)
class ModelPlan:
    """The changes that one `shard_model` call will make; none has been made yet."""

    tree: ModuleTree
    checked: list[CheckedUnit]  # the units, inner ones first
    owners: dict[nn.Parameter, int]  # the ranks of the parameters that are owned whole

    @cached_property
    def report(self) -> ShardingPlan:
        """The plan as plain data."""
        units = _planned_units(self)
        memory = step_memory(self, units)
        peak, _ = find_peaks(memory, moments_of(self.tree.root, memory))
        return ShardingPlan(type(self.tree.root).__name__, units, peak)


def plan_model(
    model: nn.Module,
    rules: Rules,
    defaults: Mapping[str, Any],
    shape: Sequence[int] | None,
    *,
    has_ranks: bool = False,
) -> ModelPlan:
    """Choose and check the units of a model; changes nothing.

    Args:
        shape: The ranks, `(shard,)` or `(replicate, shard)`; None for the ranks of the mesh
            or of the process group, or one rank without either.
        has_ranks: Whether the ranks must exist, because they will form the units.
    """
    parsed = parse_rules(rules)
    tree = ModuleTree(model)
    _check_unsharded(tree)
    units = choose_units(tree, parsed, defaults)
    checked = _check_units(tree, units, shape, has_ranks=has_ranks)
    return ModelPlan(tree, checked, _plan_owners(checked))


def _find_ranks(
    options: UnitOptions, shape: Sequence[int] | None, *, must_exist: bool
) -> tuple[ShardGroup | None, RankCounts]:
    """Return the ranks that will share a unit; the group is None in a dry run without ranks."""
    is_known = shape is None and (options.mesh is not None or dist.is_initialized())
    if must_exist or is_known:
        group = find_shard_group(options)
        return group, RankCounts.of(group)
    return None, RankCounts.of_shape(shape or (1,), options.strategy.facts)


def _check_call(model: object, dry_run: bool, world_size: int | None) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected model to be an nn.Module, got {type(model).__name__}")
    if world_size is None:
        return
    if not dry_run:
        raise ValueError(
            "world_size is for dry_run=True; without it, units are shared by the ranks of `mesh`"
        )
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise ValueError(f"expected world_size to be a positive integer, got {world_size!r}")


def _check_unsharded(tree: ModuleTree) -> None:
    for module in tree.fqns:
        if is_sharded(module):
            raise ValueError(
                f"{tree.describe(module)} was already sharded by fully_shard or shard_model. Give "
                "shard_model a model of which nothing is sharded, and options of single modules "
                "as rules."
            )


def _check_units(
    tree: ModuleTree, units: Sequence[Unit], shape: Sequence[int] | None, *, has_ranks: bool
) -> list[CheckedUnit]:
    """Run all checks of `fully_shard` on every unit, as if the units before it existed."""
    checked: list[CheckedUnit] = []
    managed: set[int] = set()
    inner: set[nn.Module] = set()
    for unit in units:
        options = unit.options
        shard_group, ranks = _find_ranks(options, shape, must_exist=has_ranks)
        if not has_ranks:
            # In a dry run, a model on the meta device stands for a real one.
            options = replace(options, sync_module_states=False)
        try:
            plan = plan_unit([unit.module], options, ranks.shard, shard_group, inner, managed)
        except (ValueError, RuntimeError) as error:
            # The parameters in the text are named as seen from the unit.
            raise type(error)(f"{tree.describe(unit.module)}, {unit.rule}: {error}") from error
        managed.update(id(original.param) for original in plan.originals)
        inner.add(unit.module)
        checked.append(CheckedUnit(unit, plan, shard_group, ranks))
    return checked


def _plan_owners(checked: Sequence[CheckedUnit]) -> dict[nn.Parameter, int]:
    """Choose the owners of all parameters that will be owned whole, before any unit is formed."""
    pools: dict[object, list[CheckedUnit]] = {}
    for each in checked:
        group = each.shard_group
        key = each.ranks if group is None else group.sharing_ranks
        pools.setdefault(key, []).append(each)
    owners = {}
    for members in pools.values():
        whole = [item for each in members for item in each.plan.originals if item.is_owned]
        sizes = [original.nbytes for original in whole]
        found = balance(sizes, members[0].ranks.shard)
        for original, owner in zip(whole, found, strict=True):
            original.give_to(owner)
            owners[original.param] = owner
    return owners


def _planned_units(planned: ModelPlan) -> tuple[PlannedUnit, ...]:
    tree = planned.tree
    units = []
    for each in planned.checked:
        params = [original.param for original in each.plan.originals]
        unit = each.unit
        units.append(
            PlannedUnit(
                fqns=tuple(tree.fqns[unit.module]),
                class_name=type(unit.module).__name__,
                rule=unit.rule,
                num_params=len(params),
                numel=sum(param.numel() for param in params),
                ranks=each.ranks,
                cost=unit_cost(each.plan, each.ranks, reshard_after_forward=_frees(tree, each)),
                options=unit.given,
            )
        )
    return tuple(units)


def _frees(tree: ModuleTree, each: CheckedUnit) -> bool | int:
    """Return `reshard_after_forward`; None keeps the unit that leads the call: the model."""
    policy = each.plan.reshard_after_forward
    return each.unit.module is not tree.root if policy is None else policy


def step_memory(
    planned: ModelPlan,
    units: Sequence[PlannedUnit],
    *,
    is_cpu: bool = False,
    is_launched: bool = False,
) -> dict[nn.Module, StepMemory]:
    """Return the memory of each unit in a step, by its module.

    Args:
        is_cpu: Whether the ranks' terms of sums take memory.
        is_launched: Whether collectives of small units are issued together.
    """
    return {
        each.unit.module: StepMemory.of(
            unit.cost,
            unit.ranks,
            is_freed=_frees(planned.tree, each) is not False,
            prefetch_nbytes=each.unit.options.prefetch_nbytes,
            is_cpu=is_cpu,
            is_launched=is_launched,
        )
        for each, unit in zip(planned.checked, units, strict=True)
    }
