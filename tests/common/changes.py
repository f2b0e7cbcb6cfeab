"""The changes of an attribute, collected while programs run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

__all__ = ["recorded_changes"]


@contextmanager
def recorded_changes(owner: type, name: str) -> Iterator[set[tuple[Any, Any]]]:
    """Collect pairs of values, before and after, of what objects made in the block write."""
    changes: set[tuple[Any, Any]] = set()
    slot: Any = vars(owner).get(name)  # None: the objects have it in their dicts
    known: set[object] = set()  # a first value is no change

    def read(each: object) -> Any:
        return vars(each)[name] if slot is None else slot.__get__(each)

    def write(each: object, value: Any) -> None:
        if each in known and read(each) is not value:
            changes.add((read(each), value))
        known.add(each)
        if slot is None:
            vars(each)[name] = value
        else:
            slot.__set__(each, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, property(read, write), raising=False)
        yield changes
