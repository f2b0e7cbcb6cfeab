"""The graph-recording calls of a unit and of a tree, and those that wait for a backward."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, ref

from composable_shard.torch_private import next_sequence_nr

Unit = TypeVar("Unit")


def alive(refs: Iterable[ref[Unit]]) -> list[Unit]:
    """Return the objects that weak references refer to, without those that are gone."""
    return [unit for each in refs if (unit := each()) is not None]


class Region(Generic[Unit]):
    """A region of non-reentrant checkpointing, or a call under other saved-tensor hooks.

    Regions inside a region belong to the outermost, which runs all of their units again.

    Attributes:
        units: Units that checkpointing runs again, in order; empty under other hooks.
        end: Number of the first call that began after all calls inside; -1 under other hooks.
    """

    __slots__ = ("end", "units")

    def __init__(self) -> None:
        self.units: list[ref[Unit]] = []
        self.end = -1


class UnitCall:
    """One graph-recording call of a unit, [Note: End of a unit].

    Attributes:
        number: Its number among the calls of all units of the tree.
        sequence_nr: Number of the next autograd node when it began.
        end: Number of the first call that began after it had ended; -1 while it runs.
        region: Where saved-tensor hooks were in force, which may run the call again, or None.
    """

    __slots__ = ("end", "number", "region", "sequence_nr")

    def __init__(self, number: int = -1, end: int = -1) -> None:
        self.number, self.end = number, end
        self.sequence_nr = next_sequence_nr()
        self.region: Region[Any] | None = None


class OpenGraphs(Generic[Unit]):
    """The graphs of a tree's calls that a backward may reach.

    Attributes:
        num_calls: Number that the next graph-recording call of a unit gets.
        start: `num_calls` when the tree's last graph-recording call began.
        num_open: Number of the tree's graph-recording calls since a backward; `most_open`: maximum.
        spans_calls: The last backward also reached an earlier call, so the next one may too.
        first_calls: Number of each unit's first call that the next backward may reach.
        armed: Units whose outputs wait for a backward, in the order of their last forward.
        may_recompute: Units whose forward may run again in a nested backward (reentrant
            checkpoints); `has_regions`: such units have existed.
        regions: Of non-reentrant checkpointing, by what their graphs keep alive.
        last_backward_id: Number of the last known backward; `probed_backward_id`: of the last
            empty one.
    """

    def __init__(self) -> None:
        self.num_calls = self.start = 0
        self.num_open, self.most_open = 0, 1
        self.spans_calls = self.has_regions = False
        self.first_calls: dict[ref[Unit], int] = {}
        self.armed: dict[ref[Unit], None] = {}
        self.may_recompute: set[ref[Unit]] = set()
        self.regions: WeakKeyDictionary[Any, Region[Unit]] = WeakKeyDictionary()
        self.last_backward_id = self.probed_backward_id = -1

    def forget(self) -> None:
        """Note that the graphs of all calls so far were used up or dropped."""
        self.armed.clear()
        self.first_calls.clear()

    def enter_region(self, key: Any, unit: ref[Unit]) -> Region[Unit]:
        """Return the region that `key` stands for, if any, with the tree's last call entered."""
        region: Region[Unit] = Region()
        if key is not None:
            region = self.regions.setdefault(key, region)
            region.units.append(unit)
            region.end = self.num_calls
        return region

    def within(self, units: Collection[ref[Unit]]) -> OpenGraphs[Unit]:
        """Return the graphs as a tree has them that consists of some of the units."""
        found, own = copy.copy(self), set(units)
        found.armed = {unit: None for unit in self.armed if unit in own}
        found.first_calls = dict(self.first_calls)
        found.may_recompute = self.may_recompute & own
        return found
