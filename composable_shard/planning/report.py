"""What `shard_model` is going to do, as plain data and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from typing import Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from composable_shard.planning.costs import Cost, RankCounts

__all__ = ["Call", "PlannedUnit", "ShardingPlan", "most_held"]


_LABELS = ("unit", "class", "rule", "parameters", "numel", "ranks")
_COSTS = ("params", "grads", "AdamW", "on host", "gathered", "calls", "sent")
_HEADINGS = (*_LABELS, *_COSTS, "options")
_LEGEND = (
    "bytes of the first rank: parameters at rest, gradients after a backward, AdamW's state; how "
    "much of that is offloaded to the host; full parameters while gathered, in total the most at "
    "once in a forward; gathers and reductions per step, and bytes sent"
)
_NUMBERS = range(3, 13)  # columns that are aligned to the right
_MAX_VALUE_LENGTH = 60


@dataclass(frozen=True)
class PlannedUnit:
    """One unit that `shard_model` is going to form.

    Attributes:
        fqns: The FQNs of the unit's module, several where it is shared; `("",)` for the root. Where
            several modules were merged, one FQN of each.
        class_name: The name of its class; where several were merged, the names of theirs.
        rule: The rule that took it; "defaults" for a root that no rule took.
        num_params: Parameters that the unit will manage: none of units inside it, none ignored.
        numel: Elements of these parameters.
        ranks: How many ranks will share them, and how many will hold copies.
        cost: What the unit costs a rank.
        options: The options of `fully_shard` that the rule and the defaults give.
        num_modules: How many modules share the unit.
    """

    fqns: tuple[str, ...]
    class_name: str
    rule: str
    num_params: int
    numel: int
    ranks: RankCounts
    cost: Cost
    options: Mapping[str, Any]
    num_modules: int = 1

    @property
    def fqn(self) -> str:
        """The first FQN of the unit's module; "" for the root."""
        return self.fqns[0]

    @property
    def world_size(self) -> int:
        """Ranks that will share the unit's parameters."""
        return self.ranks.shard


@dataclass(frozen=True)
class ShardingPlan:
    """The units of a model, in the order in which they will be formed, the root last.

    `str(plan)` is a table. A parameter of several modules counts in the first unit that has it.
    What is sent is for a step with one forward and one backward that reach every unit once.

    Attributes:
        model_name: The name of the model's class.
        units: The units.
        peak_gathered_nbytes: The most full parameters, beyond those at rest, that a rank holds at
            once in a forward that runs the units in the order of the modules: of the unit that
            computes, of those around it, of what is gathered ahead, and of those that are kept.
    """

    model_name: str
    units: tuple[PlannedUnit, ...]
    peak_gathered_nbytes: int = 0

    def __str__(self) -> str:
        rows = [_HEADINGS, *(_row(unit) for unit in self.units), self._total()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
        lines = [_align(row, widths) for row in rows]
        rule = "-" * max(len(line) for line in lines)
        title = f"{self.model_name}: {len(self.units)} units; {_LEGEND}"
        return "\n".join([title, lines[0], rule, *lines[1:-1], rule, lines[-1]])

    @property
    def cost(self) -> Cost:
        """What all units together cost a rank."""
        return sum((unit.cost for unit in self.units), Cost())

    def _total(self) -> tuple[str, ...]:
        num_params = sum(unit.num_params for unit in self.units)
        numel = sum(unit.numel for unit in self.units)
        cells = _cells(replace(self.cost, gathered_nbytes=self.peak_gathered_nbytes))
        return ("total", "", "", f"{num_params}", f"{numel:,}", "", *cells, "")


class Call(NamedTuple):
    """A module of a unit, in the order in which a forward calls them."""

    fqn: str
    unit: int  # its position


def most_held(
    calls: Sequence[Call], sizes: Sequence[int], frees: Sequence[bool], limits: Sequence[int]
) -> int:
    """Return the most that is held at once of units that are gathered for their modules.

    Each is gathered when the first of its modules is called, or while one before that runs, and
    freed when the last one has returned.

    Args:
        calls: The modules, outer ones before what is inside them.
        sizes: Bytes that the units hold while they are gathered.
        frees: Whether each is freed at all.
        limits: Of each, `prefetch_nbytes`.
    """
    to_return = Counter(call.unit for call in calls)
    order = [unit for unit, _ in groupby(call.unit for call in calls)]
    begun = 0  # how many of them
    running: list[Call] = []
    held: set[int] = set()
    ahead: set[int] = set()
    total = most = 0
    for call in calls:
        while running and not _is_inside(call, running[-1]):
            unit = running.pop().unit
            to_return[unit] -= 1
            if not to_return[unit] and frees[unit]:
                held.remove(unit)
                total -= sizes[unit]
        running.append(call)
        if begun and order[begun - 1] == call.unit:
            continue
        begun += 1
        ahead.discard(call.unit)
        batch = _gathered_along(order, begun, ahead, sizes, limits[call.unit])
        ahead.update(batch)
        total += sum(sizes[unit] for unit in {call.unit, *batch} - held)
        held.update((call.unit, *batch))
        most = max(most, total)
    return most


def _gathered_along(
    order: Sequence[int], begun: int, ahead: Container[int], sizes: Sequence[int], limit: int
) -> list[int]:
    """Return the units whose gathers start with a call, see [Note: Gathers of small units]."""
    batch: list[int] = []
    nbytes = 0
    for place in range(begun, len(order)):
        unit = order[place]
        if unit == order[begun - 1] or (not batch and unit in ahead):
            break
        nbytes += sizes[unit]
        if batch and nbytes > limit:
            break
        batch.append(unit)
    return batch


def _is_inside(call: Call, outer: Call) -> bool:
    return not outer.fqn or call.fqn.startswith(f"{outer.fqn}.")


def _row(unit: PlannedUnit) -> tuple[str, ...]:
    options = [f"{name}={_short(value)}" for name, value in unit.options.items()]
    return (
        _name(unit),
        unit.class_name,
        unit.rule,
        f"{unit.num_params}",
        f"{unit.numel:,}",
        f"{unit.ranks}",
        *_cells(unit.cost),
        ", ".join(options),
    )


def _name(unit: PlannedUnit) -> str:
    if unit.num_modules > 1:
        return f"{unit.fqns[0]} to {unit.fqns[-1]} ({unit.num_modules} modules)"
    return ", ".join(unit.fqns) or "(root)"


def _cells(cost: Cost) -> tuple[str, ...]:
    held = (cost.param_nbytes, cost.grad_nbytes, cost.optimizer_nbytes, cost.host_nbytes)
    on_the_way = (cost.gathered_nbytes, cost.num_collectives, cost.sent_nbytes)
    return tuple(f"{number:,}" for number in (*held, *on_the_way))


def _align(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        cell.rjust(width) if column in _NUMBERS else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def _short(value: Any) -> str:
    """Return a few words for an option's value, without addresses or the order of a set."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, DeviceMesh):
        return f"mesh{tuple(value.shape)}"
    if isinstance(value, Collection) and not isinstance(value, str):
        return f"<{len(value)}>"
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[: _MAX_VALUE_LENGTH - 3]}..."
