"""Which modules become units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from composable_shard.options import UnitOptions
from composable_shard.planning.rules import Rule, Scope
from composable_shard.runtime import ModuleTree, has_forward

_MAX_NAMES = 10  # in a message


@dataclass(frozen=True)
class Unit:
    """A module that becomes a unit, the rule that selected it, and its options.

    Attributes:
        module: The module.
        rule: The rule's name in messages.
        given: The options that the rule and the defaults gave by name.
        options: All options.
    """

    module: nn.Module
    rule: str
    given: dict[str, Any]
    options: UnitOptions


@dataclass(frozen=True)
class _Taken:
    """A module that a rule selected; options None leave it in the unit around it."""

    rule: str
    options: dict[str, Any] | None


def choose_units(
    tree: ModuleTree, rules: Sequence[Rule], defaults: Mapping[str, Any]
) -> list[Unit]:
    """Let the first rule that selects a module decide; return the units, inner ones first.

    Raises:
        ValueError: For options that `fully_shard` does not have or take, for a rule that selects
            no module, and for one that makes a container a unit.
    """
    _merge("the defaults", defaults)
    for rule in rules:
        _merge(rule.label, {**defaults, **(rule.options or {})})
    taken: dict[nn.Module, _Taken] = {}
    for rule in rules:
        new = _find(tree, rule, defaults, taken)
        if not new:
            raise ValueError(_why_idle(tree, rule, _find(tree, rule, defaults, {}), taken))
        taken.update(new)
    units = []
    for module in tree.fqns:
        entry = taken.get(module) or _Taken("defaults", {} if module is tree.root else None)
        if entry.options is not None:
            given = {**defaults, **entry.options}
            units.append(Unit(module, entry.rule, given, _merge(entry.rule, given)))
            _check_forward(tree, units[-1])
    return units


def _find(
    tree: ModuleTree,
    rule: Rule,
    defaults: Mapping[str, Any],
    taken: Mapping[nn.Module, _Taken],
) -> dict[nn.Module, _Taken]:
    """Return the modules that `rule` selects of those that no rule has selected yet."""
    options = _merge(rule.label, {**defaults, **(rule.options or {})})
    is_unit = {module: entry.options is not None for module, entry in taken.items()}
    scope = Scope(tree, frozenset(options.ignored_params or ()), is_unit)
    found: dict[nn.Module, _Taken] = {}
    for module, extra in rule.selector.find(scope):
        # The root has no unit around it that it could stay in.
        if module in taken or (rule.options is None and module is tree.root):
            continue
        merged = None if rule.options is None else {**rule.options, **extra}
        if extra:
            _merge(f"{rule.label}, {tree.describe(module)}", {**defaults, **(merged or {})})
        found[module] = _Taken(rule.label, merged)
    return found


def _why_idle(
    tree: ModuleTree,
    rule: Rule,
    alone: Mapping[nn.Module, _Taken],
    taken: Mapping[nn.Module, _Taken],
) -> str:
    """Return the text for a rule that selects nothing, given what it would select alone."""
    shadowing = dict.fromkeys(taken[module].rule for module in alone if module in taken)
    if shadowing:
        return (
            f"{rule.label} selects no module, as earlier rules select all of "
            f"{listed([tree.fqn(module) for module in alone])}: {' and '.join(shadowing)}. "
            "Remove it, or move it to the front."
        )
    if alone:
        # by_size and the like count what is left.
        return (
            f"{rule.label} selects no module, as earlier rules leave too few parameters for it. "
            "Remove it, or move it to the front."
        )
    names = [name for name, _ in tree.root.named_children()]
    classes = dict.fromkeys(type(module).__name__ for module in tree.root.modules())
    return (
        f"{rule.label} selects no module of {type(tree.root).__name__}, which holds "
        f"{listed(names)} and has the classes {listed(list(classes))}. Correct or remove it."
    )


def listed(names: Sequence[str]) -> str:
    """Return the names for a message, at most ten of them."""
    shown = ", ".join(repr(name) for name in names[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown}, ... ({len(names)} in all)"


def _merge(owner: str, given: Mapping[Any, Any]) -> UnitOptions:
    """Return the defaults of `fully_shard` with these options, and say whose are not valid."""
    try:
        return UnitOptions().override(given)
    except ValueError as error:
        raise ValueError(f"{owner}: {error}") from error


def _check_forward(tree: ModuleTree, unit: Unit) -> None:
    if has_forward(unit.module):
        return
    kind = type(unit.module).__name__
    if unit.module is tree.root:
        raise ValueError(
            f"the model is a {kind}, which has no forward, so its unit would never be gathered. "
            "Call shard_model on each of the modules in it that has one."
        )
    fqn = tree.fqn(unit.module)
    raise ValueError(
        f"{unit.rule} selects '{fqn}', a {kind}, which has no forward, so its unit would never be "
        f"gathered. Select the modules in it ('{fqn}.*'), or leave it out by an earlier rule "
        f"(('{fqn}', None))."
    )
