"""What the package asks of a reader, against goals; and that `tests.house` counts what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from tests import house
from tests.house_source import Tree, longest_chain


@pytest.fixture(scope="module")
def measured() -> house.House:
    """Count once."""
    return house.measure_steps() | house.measure_source()


@pytest.fixture
def figures(measured: house.House) -> dict[str, float]:
    """Return the figures by name."""
    return measured.figures


def test_the_table_is_printed(
    measured: house.House, record_property: Callable[[str, object], None]
) -> None:
    """In CI the session's summary shows what this test records."""
    table = house.render(measured)
    record_property(house.TABLE, table)
    assert all(name in table for name in house.GOALS)


@pytest.mark.counts
@pytest.mark.parametrize("name", house.GOALS)
def test_figure_is_within_its_goal_or_what_was_reached(
    figures: dict[str, float], name: str
) -> None:
    """Where a goal is missed, `python -m tests.house --details` lists what is counted."""
    assert name in figures  # upward imports are counted once there are packages
    assert figures[name] <= house.REACHED.get(name, house.GOALS[name])


def test_step_enters_something(figures: dict[str, float]) -> None:
    """A goal is not met by counting in the wrong place: nor is FSDP2's step free."""
    for step in ("warm step", "FSDP2's warm step"):
        assert figures[f"{step}: files"] >= 3
        assert figures[f"{step}: functions"] > figures[f"{step}: files"]
        assert figures[f"{step}: calls between files"] > 0


def _tree(folder: Path, **files: str) -> Tree:
    """Write files, `a__b` standing for `a/b.py`, and read them as the package `house`."""
    for name, text in files.items():
        path = folder / "house" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
        (path.parent / "__init__.py").touch()
    return Tree(folder / "house")


def test_inherited_methods_count_once(tmp_path: Path) -> None:
    """Through an `__init__` that passes the base on, and not those of a base elsewhere."""
    _tree(
        tmp_path,
        low__base="""
            class Base:
                def one(self): ...
                @property
                def two(self): ...
            """,
        high__user="""
            from torch import Tensor
            from house.low import Base
            class User(Base, Tensor):
                def one(self): ...
                @staticmethod
                def three(): ...
            """,
    )
    (tmp_path / "house" / "low" / "__init__.py").write_text("from house.low.base import Base")
    tree = Tree(tmp_path / "house")
    assert tree.classes["house.high.user", "User"].all_methods() == {"one", "two", "three"}


_UNIT = """
    class Unit:
        size: int
        def __init__(self):
            self.is_open = False
            self.parts = {}
    """


@pytest.mark.parametrize(
    "statement",
    ["unit.is_open = True", "unit.size += 1", "del unit.is_open", "unit.size, x = 1, 2"],
)
def test_write_from_another_package_is_found(tmp_path: Path, statement: str) -> None:
    """Whatever the statement, by the annotation of its base or by the attribute's name."""
    annotated = f"from house.low.unit import Unit\ndef run(unit: Unit):\n    {statement}\n"
    tree = _tree(
        tmp_path,
        low__unit=_UNIT,
        high__annotated=annotated,
        high__plain=f"def run(unit):\n    {statement}\n",
    )
    places = [write.split()[0] for write in tree.foreign_writes()]
    assert places == ["high/annotated.py:3", "high/plain.py:2"]


@pytest.mark.parametrize(
    "statement",
    [
        "unit.parts[0] = 1",  # changes a container
        "unit.grad = None",  # no attribute of the tree
        "self.is_open = True",
        "other.is_open = True",  # annotated as another class
        "print(unit.is_open)",
    ],
)
def test_what_is_no_write_to_another_package_is_not_found(tmp_path: Path, statement: str) -> None:
    """Nor is a write within the package of the class."""
    tree = _tree(
        tmp_path,
        low__unit=_UNIT,
        low__near="def run(unit):\n    unit.is_open = True\n",
        high__far=f"def run(self, unit, other: int):\n    {statement}\n",
    )
    assert tree.foreign_writes() == []


def test_levels_follow_names_to_where_they_are_defined(tmp_path: Path) -> None:
    """An `__init__` is no level, and an import of a later package is upward."""
    _tree(
        tmp_path,
        low__a="",
        low__b="from house.low import a",
        high__c="from house.low import thing",
    )
    (tmp_path / "house" / "low" / "__init__.py").write_text("from house.low.b import thing")
    tree = Tree(tmp_path / "house")
    assert longest_chain(tree.imports()) == ["house.high.c", "house.low.b", "house.low.a"]
    assert longest_chain(tree.package_imports()) == ["high", "low"]
    assert tree.upward_imports(["low", "high"]) == []
    assert tree.upward_imports(["high", "low"]) == ["house.high.c -> house.low.b"]


def test_files_to_touch_are_those_that_tell_values_apart(tmp_path: Path) -> None:
    """Not those that name one as a default, in an annotation or in a docstring."""
    _tree(
        tmp_path,
        low__api="""
            from enum import Enum
            from typing import Literal
            class ShardingStrategy(Enum):
                FULL = 1
            Granularity = Literal["row"]
            """,
        low__facts="""
            from house.low.api import ShardingStrategy
            def frees(strategy, granularity):
                return strategy is ShardingStrategy.FULL or granularity == "row"
            """,
        low__user="""
            from house.low.api import ShardingStrategy
            def run(strategy=ShardingStrategy.FULL, granularity: Literal["row"] = "row"):
                "row"
            """,
    )
    details = house.measure_source(tmp_path / "house").details
    assert details["files to touch: strategy"] == ["low/api.py", "low/facts.py"]
    assert details["files to touch: granularity"] == ["low/api.py", "low/facts.py"]


def test_algorithms_are_counted_by_their_classes(tmp_path: Path) -> None:
    """Of the files that name one, once there are classes for them."""
    _tree(
        tmp_path,
        low__api="class Algorithm: ...\n",
        low__ring="from house.low.api import Algorithm\nclass Ring(Algorithm): ...\n",
        low__choice="from house.low.ring import Ring\nALL = [Ring()]\n",
        low__user="from house.low.choice import ALL\ndef run(): return ALL[0]\n",
    )
    details = house.measure_source(tmp_path / "house").details
    assert details["files to touch: collective algorithm"] == ["low/choice.py", "low/ring.py"]


def test_an_op_is_counted_where_a_table_names_it(tmp_path: Path) -> None:
    """An op that a function calls is no rule."""
    _tree(
        tmp_path,
        low__rules="RULES = {aten.lerp.Scalar: 1, aten.lerp_.Scalar: 1}",
        low__more="RULES = {torch.ops.aten.lerp.Tensor: 1}",
        low__user="def run(): return aten.lerp(1)",
    )
    details = house.measure_source(tmp_path / "house").details
    assert details["files to touch: op rule"] == [
        "low/more.py (aten.lerp)",
        "low/rules.py (aten.lerp)",
    ]
