"""Which modules become units.

[Note: Merging]
A collective costs time however little it sends, so units far below a few MiB pay mostly for their
number. Candidates for one unit are modules that

- are children of one module, with nothing that has parameters between them, so that they run one
  after another where children run in the order in which they are registered,
- have the same options, and parameters on one device,
- are each smaller than the minimum, and at one place of the tree only.

They may hold other units, with which they are never merged.

Each such run of modules is cut from its start into groups that reach the minimum; a rest that does
not joins the group before it. So a merged unit is smaller than three times the minimum, whatever
else the model holds, and a unit stays below the minimum only if its whole run does.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from composable_shard.construct import check_options, fully_shard
from composable_shard.planning.rules import Rule, Scope
from composable_shard.runtime import ModuleTree, has_forward

__all__ = ["Candidate", "Unit", "choose_units", "cut_run", "listed", "merge_units"]


_MAX_NAMES = 10  # in a message


@dataclass(frozen=True)
class Unit:
    """Modules that become a unit, the rules that took them, and the options that were given."""

    modules: tuple[nn.Module, ...]
    rule: str
    options: dict[str, Any]

    @property
    def module(self) -> nn.Module:
        """The module of the unit; the first where several were merged."""
        return self.modules[0]

    @property
    def all_options(self) -> dict[str, Any]:
        """All options of `fully_shard`, its defaults filled in."""
        return {**_option_defaults(), **self.options}


def _option_defaults() -> dict[str, Any]:
    parameters = inspect.signature(fully_shard).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


@dataclass(frozen=True)
class _Taken:
    """A module that a rule took; options None leave it in the unit around it."""

    rule: str
    options: dict[str, Any] | None


def choose_units(
    tree: ModuleTree, rules: Sequence[Rule], defaults: Mapping[str, Any]
) -> list[Unit]:
    """Let the first rule about a module take it; return the units, inner ones first, root last.

    Raises:
        ValueError: For options that `fully_shard` does not have or take, for a rule that takes no
            module, and for one that makes a container a unit.
    """
    _check_options("the defaults", defaults)
    for rule in rules:
        _check_options(rule.label, {**defaults, **(rule.options or {})})
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
            units.append(Unit((module,), entry.rule, {**defaults, **entry.options}))
            _check_forward(tree, units[-1])
    return units


def _find(
    tree: ModuleTree,
    rule: Rule,
    defaults: Mapping[str, Any],
    taken: Mapping[nn.Module, _Taken],
) -> dict[nn.Module, _Taken]:
    """Return what `rule` takes of what no rule has taken yet."""
    options = {**_option_defaults(), **defaults, **(rule.options or {})}
    is_unit = {module: entry.options is not None for module, entry in taken.items()}
    scope = Scope(tree, frozenset(options["ignored_params"] or ()), is_unit)
    found: dict[nn.Module, _Taken] = {}
    for module, extra in rule.selector.find(scope):
        # The root has no unit around it that it could stay in.
        if module in taken or (rule.options is None and module is tree.root):
            continue
        merged = None if rule.options is None else {**rule.options, **extra}
        if extra:
            _check_options(f"{rule.label}, {tree.describe(module)}", {**defaults, **(merged or {})})
        found[module] = _Taken(rule.label, merged)
    return found


def _why_idle(
    tree: ModuleTree,
    rule: Rule,
    alone: Mapping[nn.Module, _Taken],
    taken: Mapping[nn.Module, _Taken],
) -> str:
    """Return the text for a rule that takes nothing, given what it would take alone."""
    shadowing = dict.fromkeys(taken[module].rule for module in alone if module in taken)
    if shadowing:
        return (
            f"{rule.label} takes no module: all it is about, "
            f"{listed([tree.fqn(module) for module in alone])}, was taken by "
            f"{' and '.join(shadowing)} before it. Remove it, or move it to the front."
        )
    if alone:
        # by_size and the like count what is left.
        return (
            f"{rule.label} takes no module: the rules before it left too few parameters for it. "
            "Remove it, or move it to the front."
        )
    names = [name for name, _ in tree.root.named_children()]
    classes = dict.fromkeys(type(module).__name__ for module in tree.root.modules())
    return (
        f"{rule.label} takes no module of {type(tree.root).__name__}, which holds "
        f"{listed(names)} and has the classes {listed(list(classes))}. Correct or remove it."
    )


def listed(names: Sequence[str]) -> str:
    """Return the names for a message, at most ten of them."""
    shown = ", ".join(repr(name) for name in names[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown}, ... ({len(names)} in all)"


def _check_options(owner: str, options: Mapping[Any, Any]) -> None:
    """Check names and values of options, and say whose they are."""
    known = _option_defaults()
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(str(name), list(known), 1)
            hint = f"Did you mean {close[0]!r}?" if close else f"It has {', '.join(known)}."
            raise ValueError(f"{owner}: fully_shard has no option {name!r}. {hint}")
    try:
        check_options({**known, **options})
    except (ValueError, NotImplementedError) as error:
        raise type(error)(f"{owner}: {error}") from error


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
        f"{unit.rule} takes '{fqn}', a {kind}, which has no forward, so its unit would never be "
        f"gathered. Take the modules in it ('{fqn}.*'), or leave it out by a rule before this one "
        f"(('{fqn}', None))."
    )


@dataclass(frozen=True)
class Candidate:
    """A unit of one module, the bytes of the parameters that it would manage, and their devices."""

    unit: Unit
    nbytes: int
    devices: frozenset[torch.device]


def merge_units(
    tree: ModuleTree, candidates: Sequence[Candidate], min_unit_nbytes: int
) -> list[Unit]:
    """Return the units, small ones merged, inner ones first; a merged one is where its last was."""
    by_module = {each.unit.module: each for each in candidates if each.nbytes < min_unit_nbytes}
    merged: dict[nn.Module, Unit | None] = {}  # by module; None: a unit of a later one has it
    for run in _runs(tree, by_module):
        for group in cut_run([each.nbytes for each in run], min_unit_nbytes):
            units = [run[index].unit for index in group]
            merged.update(dict.fromkeys((unit.module for unit in units), None))
            merged[units[-1].module] = _join(units)
    found = (merged.get(each.unit.module, each.unit) for each in candidates)
    return [unit for unit in found if unit is not None]


def cut_run(sizes: Sequence[int], minimum: int) -> list[range]:
    """Return groups of neighbours that reach the minimum; all of them if even those do not.

    Example: sizes 3, 3, 3, 3, 3 with minimum 5 give the groups 0-1 and 2-4.
    """
    if not sizes:
        return []
    ends, total = [0], 0
    for end, size in enumerate(sizes, 1):
        total += size
        if total >= minimum:
            ends.append(end)
            total = 0
    # The last group that is large enough also takes what is left; without one it is a group alone.
    ends[max(1, len(ends) - 1) :] = [len(sizes)]
    return [range(*pair) for pair in pairwise(ends)]


def _runs(tree: ModuleTree, candidates: Mapping[nn.Module, Candidate]) -> Iterator[list[Candidate]]:
    """Yield neighbours that may become one unit, as many as possible at a time."""
    for parent, (fqn, *_) in tree.fqns.items():
        run = _Run()
        for name, child in parent.named_children():
            candidate = candidates.get(child)
            # A module that is somewhere else too has more names, or another one.
            is_here_alone = tree.fqns[child] == [f"{fqn}.{name}".lstrip(".")]
            if candidate is not None and is_here_alone:
                if not run.takes(candidate):
                    yield run.members
                    run = _Run()
                run.add(candidate)
            elif next(child.parameters(), None) is not None:
                yield run.members
                run = _Run()
        yield run.members


class _Run:
    """Neighbours that may become one unit."""

    def __init__(self) -> None:
        self.members: list[Candidate] = []
        self._devices: frozenset[torch.device] = frozenset()
        self._options: dict[str, Any] = {}

    def takes(self, candidate: Candidate) -> bool:
        """Return whether a candidate may be in one unit with the members."""
        has_one_device = len(self._devices | candidate.devices) <= 1
        has_options = not self.members or self._options == _comparable(candidate.unit)
        return has_one_device and has_options

    def add(self, candidate: Candidate) -> None:
        """Make it a member."""
        self.members.append(candidate)
        self._devices |= candidate.devices
        self._options = _comparable(candidate.unit)


def _comparable(unit: Unit) -> dict[str, Any]:
    options = unit.all_options
    # Tensors are told apart by identity.
    ignored = options["ignored_params"] or ()
    return {**options, "ignored_params": frozenset(map(id, ignored))}


def _join(units: Sequence[Unit]) -> Unit:
    modules = tuple(unit.module for unit in units)
    rules = dict.fromkeys(unit.rule for unit in units)
    return Unit(modules, " and ".join(rules), units[0].options)
