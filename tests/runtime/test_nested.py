"""Tensors are found, and replaced, in every container that a module's forward may return."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, deque, namedtuple
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from composable_shard.runtime.containers import iter_tensors, map_tensors

pytestmark = pytest.mark.fast

Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class _Plain:
    value: Any
    note: str = "kept"


@dataclasses.dataclass(frozen=True)
class _Frozen:
    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class _Slotted:
    value: Any


class _OutputWithAttributes(OrderedDict[str, Any]):
    """Keeps its items as attributes too, as the outputs of some model libraries do."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def _ones() -> Tensor:
    return torch.ones(2)


def _make_nested(kind: str) -> Any:
    made: dict[str, Any] = {
        "tensor": _ones(),
        "tuple": (_ones(), "text", None, 3),
        "named tuple": Pair(_ones(), 1.5),
        "torch named tuple": torch.return_types.max((_ones(), _ones())),
        "list": [_ones(), b"bytes"],
        "dict": {"a": _ones(), "b": True},
        "ordered dict": OrderedDict(a=_ones()),
        "user dict": UserDict(a=_ones()),
        "model output": _OutputWithAttributes(a=_ones()),
        "dataclass": _Plain(_ones()),
        "frozen dataclass": _Frozen(_ones()),
        "slotted dataclass": _Slotted(_ones()),
        "object": SimpleNamespace(a=_ones(), b="text"),
        "read-only mapping": MappingProxyType({"a": _ones()}),
        "set": {_ones()},
        "frozen set": frozenset([_ones()]),
        "deque": deque([_ones(), "text"]),
        "object with a deque": SimpleNamespace(a=deque([_ones()])),
        "deep": [({"a": _Plain((_ones(), [_ones()]))}, None), SimpleNamespace(a=[_ones()])],
    }
    return made[kind]


KINDS = [
    "tensor",
    "tuple",
    "named tuple",
    "torch named tuple",
    "list",
    "dict",
    "ordered dict",
    "user dict",
    "model output",
    "dataclass",
    "frozen dataclass",
    "slotted dataclass",
    "object",
    "read-only mapping",
    "set",
    "frozen set",
    "deque",
    "object with a deque",
    "deep",
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_container_yields_its_tensors(kind: str) -> None:
    """No output hides a tensor whose backward must gather the unit."""
    num_tensors = {"torch named tuple": 2, "deep": 3}.get(kind, 1)
    assert len(list(iter_tensors(_make_nested(kind)))) == num_tensors


@pytest.mark.parametrize("kind", KINDS)
def test_map_replaces_every_tensor_and_keeps_the_type(kind: str) -> None:
    """What the caller gets back differs in the tensors only."""
    value = _make_nested(kind)
    mapped = map_tensors(value, lambda tensor: tensor * 3)
    assert type(mapped) is type(value)
    assert [tensor.sum().item() for tensor in iter_tensors(mapped)] == [
        6.0 for _ in iter_tensors(_make_nested(kind))
    ]


@pytest.mark.parametrize("value", [None, "text", 1, 2.5, b"", int, _Plain, object(), range(3)])
def test_values_without_tensors_yield_none_and_stay(value: Any) -> None:
    """Classes and foreign objects are left alone."""
    assert list(iter_tensors(value)) == []
    assert map_tensors(value, torch.neg) is value


def test_tensors_come_in_order() -> None:
    """The order is that of the containers' items."""
    tensors = [torch.tensor(index) for index in range(5)]
    value = {"b": tensors[0], "a": [tensors[1], (tensors[2],)], "c": _Frozen(tensors[3:])}
    assert [tensor.item() for tensor in iter_tensors(value)] == [0, 1, 2, 3, 4]


def test_a_deque_keeps_its_limit() -> None:
    """What the caller appends later pushes out the oldest, as in the model's own."""
    value = deque([_ones(), _ones()], maxlen=2)
    mapped = map_tensors(value, torch.neg)
    assert (mapped.maxlen, len(value), mapped[0].sum()) == (2, 2, -2.0)


def test_other_items_survive_a_map() -> None:
    """Strings, numbers and further attributes are kept."""
    output = _OutputWithAttributes(a=_ones(), b="text")
    mapped = map_tensors([output, _Plain(_ones()), Pair(_ones(), 7)], torch.neg)
    assert mapped[0] == {"a": mapped[0].a, "b": "text"}
    assert (mapped[1].note, mapped[2].second) == ("kept", 7)


def test_deleted_field_of_a_dataclass_is_skipped() -> None:
    """A dataclass need not have all its fields."""
    value = _Plain(_ones())
    del value.value
    assert list(iter_tensors(value)) == []
    assert map_tensors(value, torch.neg) is value
    assert not hasattr(value, "value")
