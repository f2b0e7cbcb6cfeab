"""In which order the units of a tree ran last time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar
from weakref import ref

__all__ = ["ExecutionOrder"]

Unit = TypeVar("Unit")


class ExecutionOrder(Generic[Unit]):
    """Remember the order in which units ran last time, to know which one comes next.

    Holds weak references, so that a deleted module is freed at once. Grows with one call only.
    """

    def __init__(self) -> None:
        self._previous: list[ref[Unit]] = []
        self._current: list[ref[Unit]] = []
        self._is_as_before = True

    def begin(self) -> None:
        """Start a new sequence."""
        self._current = []
        self._is_as_before = True

    def advance(self, unit: ref[Unit]) -> Iterator[Unit]:
        """Note that `unit` runs now; yield the ones expected after it, if the order held.

        Where a unit runs several times in a row, for each of its modules, only the first time.
        """
        if self._current and self._current[-1] is unit:
            return iter(())
        position = len(self._current)
        self._current.append(unit)
        previous = self._previous
        if not self._is_as_before or position >= len(previous) or previous[position] is not unit:
            self._is_as_before = False
            return iter(())
        return self._expected(position + 1)

    def end(self) -> None:
        """Make the sequence that just ended the expectation for the next one."""
        self._previous, self._current = self._current, []

    def _expected(self, position: int) -> Iterator[Unit]:
        while position < len(self._previous) and (unit := self._previous[position]()) is not None:
            yield unit
            position += 1
