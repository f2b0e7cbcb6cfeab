"""A log of events for tests and benchmarks; costs one list check when nobody observes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple


class Event(NamedTuple):
    """One thing the engine did.

    `kind` is `issue_gather`, `wait_gather`, `free`, `compute`, `issue_reduce`, `wait_reduce`,
    `gradient_hooks` (with the name of a unit), or `all_gather`, `reduce_scatter`, `all_reduce`,
    `broadcast` (with the name of the process group and the bytes of the full-size payload).
    """

    kind: str
    name: str
    nbytes: int = 0


logs: list[list[Event]] = []  # of the `trace_events` blocks that are open; mostly none is


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


_KINDS = frozenset(
    {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "gather", "scatter"}
)


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
