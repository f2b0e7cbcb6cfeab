"""`ForwardCall`: what one call of a tree knows. To drop the object is to reset it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Generic
from weakref import ref

from composable_shard.runtime.open_graphs import Unit


class ForwardCall(Generic[Unit]):
    """One call of a tree, from the pre-forward of the unit that leads it to its post-forward.

    Attributes:
        leader: The outermost unit that this call runs.
        order: The units that have run, in order; weakly, so that a deleted module is freed at once.
        last_order: The units of the leader's last call, while `order` is as it was; then empty.
        output_sequence_nr: Number of the next autograd node when a unit last returned.
        prefetched: Units that were gathered ahead and have not run; True if the user chose the
            unit.
        prepared: Units that have done in this call what an option lets them do before forwards.
        innermost: `CallReached` of the innermost running call that records a graph, or None.
    """

    __slots__ = (
        *("innermost", "last_order", "leader", "order"),
        *("output_sequence_nr", "prefetched", "prepared", "__weakref__"),
    )

    def __init__(self, leader: ref[Unit], last_order: list[ref[Unit]]) -> None:
        self.leader = leader
        self.order: list[ref[Unit]] = []
        self.last_order = last_order
        self.output_sequence_nr = 0
        self.prefetched: dict[Unit, bool] = {}
        self.prepared: set[Unit] = set()
        self.innermost: Any = None  # its module is above this one

    def advance(self, unit: ref[Unit]) -> Iterator[Unit | None]:
        """Note that a unit runs now; return the units expected after it, if the order held.

        None stands for a deleted unit. A unit that runs several times in a row, for each of its
        modules, counts once.
        """
        if self.order and self.order[-1] is unit:
            return iter(())
        position = len(self.order)
        self.order.append(unit)
        if position >= len(self.last_order) or self.last_order[position] is not unit:
            self.last_order = []
        return map(ref.__call__, islice(self.last_order, position + 1, None))
