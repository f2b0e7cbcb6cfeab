"""The plan of `shard_model`, unit by unit, as a table."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from composable_shard.planning.costs import Cost, RankCounts

_LABELS = ("unit", "class", "rule", "parameters", "numel", "ranks")
_COSTS = ("params", "grads", "AdamW", "on host", "gathered", "calls", "sent")
_PLAN_HEADINGS = (*_LABELS, *_COSTS, "options")
_LEGEND = (
    "bytes of the first rank: parameters at rest, gradients after a backward, AdamW's state; how "
    "much of that is offloaded to the host; full parameters while gathered, in total the most at "
    "once in a forward; gathers and reductions per step, and bytes sent"
)
_PLAN_NUMBERS = range(3, 13)  # columns that are aligned to the right
_MAX_VALUE_LENGTH = 60
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class PlannedUnit:
    """One unit that `shard_model` will form.

    Attributes:
        fqns: The FQNs of the unit's module, several where it is shared; `("",)` for the root.
        class_name: The name of its class.
        rule: The rule that selected it; "defaults" for a root that no rule selected.
        num_params: Parameters that the unit will manage, without units inside it and ignored
            parameters.
        numel: Elements of these parameters.
        ranks: How many ranks will share them, and how many will hold copies.
        cost: The cost of the unit for a rank.
        options: The options of `fully_shard` that the rule and the defaults give.
    """

    fqns: tuple[str, ...]
    class_name: str
    rule: str
    num_params: int
    numel: int
    ranks: RankCounts
    cost: Cost
    options: Mapping[str, Any]

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
    Bytes sent are for a step in which one forward and one backward reach every unit once.

    Attributes:
        model_name: The name of the model's class.
        units: The units.
        peak_gathered_nbytes: The most full parameters, beyond those at rest, that a rank holds at
            once in a forward that runs the units in the order of the modules. This counts the unit
            that computes, the units around it, units gathered ahead, and units that are kept.
    """

    model_name: str
    units: tuple[PlannedUnit, ...]
    peak_gathered_nbytes: int = 0

    def __str__(self) -> str:
        title = f"{self.model_name}: {len(self.units)} units; {_LEGEND}"
        rows = [_PLAN_HEADINGS, *(_plan_row(unit) for unit in self.units), self._total()]
        return f"{title}\n{format_table(rows, _PLAN_NUMBERS)}"

    @property
    def cost(self) -> Cost:
        """The cost of all units together."""
        return sum((unit.cost for unit in self.units), Cost())

    def _total(self) -> tuple[str, ...]:
        num_params = sum(unit.num_params for unit in self.units)
        numel = sum(unit.numel for unit in self.units)
        cells = _cells(replace(self.cost, gathered_nbytes=self.peak_gathered_nbytes))
        return ("total", "", "", f"{num_params}", f"{numel:,}", "", *cells, "")


def _plan_row(unit: PlannedUnit) -> tuple[str, ...]:
    options = [f"{name}={_short(value)}" for name, value in unit.options.items()]
    return (
        ", ".join(unit.fqns) or "(root)",
        unit.class_name,
        unit.rule,
        f"{unit.num_params}",
        f"{unit.numel:,}",
        f"{unit.ranks}",
        *_cells(unit.cost),
        ", ".join(options),
    )


def _cells(cost: Cost) -> tuple[str, ...]:
    held = (cost.param_nbytes, cost.grad_nbytes, cost.optimizer_nbytes, cost.host_nbytes)
    on_the_way = (cost.gathered_nbytes, cost.num_collectives, cost.sent_nbytes)
    return tuple(f"{number:,}" for number in (*held, *on_the_way))


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


def format_table(
    rows: Sequence[Sequence[str]], numbers: Container[int], *, has_total: bool = True
) -> str:
    """Return rows as aligned text, with rules below the headings and above the total.

    The columns of numbers are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    rule = "-" * max(map(len, lines))
    if not has_total:
        return "\n".join([lines[0], rule, *lines[1:]])
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def format_nbytes(nbytes: float) -> str:
    """Return bytes with a binary prefix: "512 B", "1.5 MiB"."""
    power = min(max(int(nbytes).bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{nbytes:.0f} B" if power == 0 else f"{nbytes / 1024**power:.1f} {_UNITS[power]}"
