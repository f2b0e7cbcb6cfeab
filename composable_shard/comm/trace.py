"""A log of events for tests and benchmarks; costs one check when nobody observes.

Each call of a tree looks for a profiler, see `flat_param.profiler_ranges`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from composable_shard.torch_private import is_profiling


class Event(NamedTuple):
    """One action of the library.

    `kind` is `issue_gather`, `wait_gather`, `free`, `compute`, `issue_reduce`, `wait_reduce`,
    `gradient_hooks` (with the name of a unit), or `all_gather`, `reduce_scatter`, `all_reduce`,
    `broadcast` (with the name of the process group and the bytes of the full-size payload), or
    `launch` (with their number) before collectives that are issued as one. [Note: Launches]
    """

    kind: str
    name: str
    nbytes: int = 0


logs: list[list[Event]] = []  # one for each open `trace_events` block; usually none


class Profiling:
    """Whether a profiler runs."""

    def __init__(self) -> None:
        self.asks = is_profiling  # whether one runs now; a function of C
        self.is_found = False
        self.switches: list[Callable[[bool], Any]] = []  # called with the new value when it changes

    def change(self) -> None:
        """Note that a profiler has started or stopped."""
        self.is_found = not self.is_found
        for switch in self.switches:
            switch(self.is_found)


profiling = Profiling()


def record(kind: str, name: str, nbytes: int = 0) -> None:
    """Append an event to every open log; does nothing when none is open."""
    for log in logs:
        log.append(Event(kind, name, nbytes))


@contextmanager
def trace_events() -> Iterator[list[Event]]:
    """Collect the events of the enclosed block, of all units of this process, in order."""
    log: list[Event] = []
    logs.append(log)
    try:
        yield log
    finally:
        # By identity: two open logs may be equal, and list.remove compares by value.
        logs[:] = [other for other in logs if other is not log]


_KINDS = frozenset({"all_gather", "reduce_scatter", "all_reduce", "broadcast"})


@dataclass
class CollectiveLog:
    """The collectives issued in a `count_collectives` block."""

    log: list[Event] = field(default_factory=list)

    @property
    def events(self) -> list[Event]:
        """All collectives in order, each with its kind and the bytes of its full-size payload."""
        return [event for event in self.log if event.kind in _KINDS]

    def count(self, kind: str) -> int:
        """Return how many collectives of this kind were issued."""
        return sum(event.kind == kind for event in self.log)

    def nbytes(self, kind: str) -> int:
        """Return the full-size payload of all collectives of this kind, in bytes."""
        return sum(event.nbytes for event in self.log if event.kind == kind)


@contextmanager
def count_collectives() -> Iterator[CollectiveLog]:
    """Count the collectives issued by this process in the enclosed block."""
    with trace_events() as log:
        yield CollectiveLog(log)
