"""What was sent in a block of code: each collective's kind and bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from composable_shard import _trace
from composable_shard._trace import Event

__all__ = ["CollectiveLog", "count_collectives"]

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
    with _trace.trace_events() as log:
        yield CollectiveLog(log)
