"""Small units next to one another become one: which ones, for `min_unit_nbytes`.

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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from composable_shard._module_tree import ModuleTree
from composable_shard._unit_choice import Unit

__all__ = ["Candidate", "cut_run", "merge_units"]


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
