"""What the package asks of a reader, against goals; and that `tests.house` counts what it says."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

import composable_shard
from tests.house import figures as house
from tests.house import reading
from tests.house.source import Tree, num_statements


@pytest.fixture(scope="module")
def measured() -> house.House:
    """Count once."""
    return house.count_house()


@pytest.fixture
def figures(measured: house.House) -> dict[str, int]:
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
def test_figure_is_within_its_goal_or_what_was_reached(figures: dict[str, int], name: str) -> None:
    """Where a goal is missed, `python -m tests.house --details` lists what is counted."""
    assert figures[name] <= house.REACHED.get(name, house.GOALS[name])


def test_programs_enter_something(figures: dict[str, int]) -> None:
    """A goal is not met by counting in the wrong place: nor is FSDP2's step free."""
    assert figures["FSDP2's warm step: functions"] > 50
    assert figures["warm step: functions"] > 50
    assert figures["quick start: functions"] > figures["warm step: functions"]
    assert figures["quick start: statements"] > figures["quick start: functions"]


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


def test_imports_follow_names_to_where_they_are_defined(tmp_path: Path) -> None:
    """An `__init__` is nothing itself, and an import of a later package is upward."""
    _tree(
        tmp_path,
        low__a="",
        low__b="from house.low import a",
        high__c="from house.low import thing",
    )
    (tmp_path / "house" / "low" / "__init__.py").write_text("from house.low.b import thing")
    tree = Tree(tmp_path / "house")
    assert tree.upward_imports(["low", "high"]) == []
    assert tree.upward_imports(["high", "low"]) == ["house.high.c -> house.low.b"]


@pytest.mark.parametrize("annotation", ["Any", "HasOpen", "object"])
def test_call_of_a_later_package_is_found_whatever_the_type_says(
    tmp_path: Path, annotation: str
) -> None:
    """Not one of a method that a tensor has, that a package below has, or of an own attribute."""
    body = f"def run(unit: {annotation}):\n    unit.open_all(); unit.is_open; unit.to(); unit.low()"
    tree = _tree(
        tmp_path,
        low__protocol="class HasOpen(Protocol):\n    def open_all(self): ...\n",
        low__user=f"class Low:\n    def low(self): self.is_open\n{body}\n",
        high__unit=_UNIT + "    def open_all(self): ...\n        def to(self): self.low()\n",
    )
    assert sorted(tree.upward_calls(["low", "high"])) == [
        "low/user.py:4 unit.is_open of high",
        "low/user.py:4 unit.open_all of high",
    ]


def test_statements_leave_out_docstrings_and_inner_functions() -> None:
    """An inner function is one statement, and counts by itself if it is entered."""
    text = """
def outer():
    "Docstring."
    if x:
        def inner():
            return 1
        with y:
            return inner
"""
    [outer] = ast.parse(text).body
    assert isinstance(outer, ast.FunctionDef)
    assert sum(map(num_statements, outer.body)) == 4


def test_stack_reads_and_reference_counts_are_found_by_name(tmp_path: Path) -> None:
    """Called or handed on, and in a step where the function is entered."""
    reads = """
        import sys
        def near():
            return sys._getframe(1).f_code
        def far():
            return [map(sys.getrefcount, []), traceback.extract_stack()]
        """
    tree = _tree(tmp_path, low__reads=reads)
    found = house.measure_source(tree, {("low/reads.py", "near", 3)}).details
    assert found["stack reads"] == ["low/reads.py:4 _getframe", "low/reads.py:6 extract_stack"]
    assert found["stack reads in a warm step"] == ["low/reads.py:4 _getframe"]
    assert found["reference counts"] == ["low/reads.py:6 getrefcount"]


def test_code_lines_leave_out_docstrings_comments_and_empty_lines(tmp_path: Path) -> None:
    """A text that is a value counts by its lines."""
    text = """
        'The module.'

        # why
        def run(x):
            '''Run
            it.'''
            return (  # because
                x
            )

        TEXT = '''
        a line
        '''
        """
    [source] = _tree(tmp_path, low__a=text).modules
    assert reading.num_code_lines(source) == 7


def test_features_are_found_by_their_words(tmp_path: Path) -> None:
    """In code, not in comments, texts or imports; a word with a dot is one of an attribute."""
    tree = _tree(
        tmp_path,
        low__argument="run(bucket_cap_mb=1)\n",
        low__attribute="grads.deferred = None\n",
        low__others="from functools import partial\npartial('scope')  # is_deferred\n",
        high__far="run(bucket_cap_mb=1)\n",
    )
    found = reading.files_of_features(tree, {"low"})
    assert found.pop("buckets") == ["low/argument.py: bucket_cap_mb"]
    assert found.pop("second stage") == ["low/attribute.py: .deferred"]
    assert not any(found.values())


def test_every_feature_is_found_somewhere(measured: house.House) -> None:
    """A pattern of no file would hold nothing."""
    for name in reading.FEATURES:
        assert measured.figures[f"files of {name}"] > 0, name


def test_the_reading_path_names_no_further_feature() -> None:
    """What has left a file leaves the list in `tests/house/reading.py`, and does not come back."""
    tree = Tree(Path(composable_shard.__file__).parent)
    assert reading.named_on_the_path(tree, house.CORE) == reading.READING_PATH


def test_the_reading_path_imports_no_further_option() -> None:
    """Nor, as with the words, does the list have an import that has gone."""
    tree = Tree(Path(composable_shard.__file__).parent)
    paths = {source.path.removesuffix(".py").replace("/", ".") for source in tree.modules}
    assert paths >= reading.OPTION_MODULES
    found = reading.imported_options(tree, reading.READING_PATH, reading.OPTION_MODULES)
    assert found == reading.IMPORTED_OPTIONS


def test_an_option_is_imported_also_through_an_init(tmp_path: Path) -> None:
    """By any of its names, or as a module; not what another file imports."""
    option = "def run(): ..."
    _tree(
        tmp_path,
        low__option=option,
        low__other=option,
        high__by_name="from house.low import run as go",
        high__by_module="from house.low import option",
        high__none="from house.low.other import run",
    )
    (tmp_path / "house" / "low" / "__init__.py").write_text("from house.low.option import run")
    tree = Tree(tmp_path / "house")
    paths = [f"high/{name}.py" for name in ("by_name", "by_module", "none")]
    found = reading.imported_options(tree, paths, {"low.option"})
    assert found == {path: {"low.option"} for path in paths[:2]}


def test_the_architecture_begins_with_the_reading_path() -> None:
    """Its first table has the files in their order."""
    text = (Path(__file__).parents[2] / "docs/architecture.md").read_text()
    table = text.partition("## Read these files in this order")[2].partition("\n## ")[0]
    links = re.findall(r"^\| \d+ \| \[([a-z_/]+\.py)\]", table, re.MULTILINE)
    assert links == [*reading.READING_PATH]


def test_branchy_functions_are_bare_without_a_comment(tmp_path: Path) -> None:
    """One for a tool is none; branches of inner functions are theirs."""
    branches = "".join(f"    if {each}: pass\n" for each in range(reading.MANY_BRANCHES - 1))
    inner = "    def inner():\n        if x: pass\n"
    tree = _tree(
        tmp_path,
        low__bare=f"def bare():\n{branches}    return 1 if x else 2  # noqa: E701\n",
        low__fewer=f"def fewer():\n{branches}{inner}",
        low__said=f"def said():\n    # first, because\n{branches}    for x in y: pass\n",
    )
    assert reading.bare_branchy_functions(tree, {"low"}) == ["low/bare.py:1 bare: 6"]


def test_plain_path_has_the_files_of_the_core_that_run(tmp_path: Path) -> None:
    """Not a file of another package, nor one that nothing enters."""
    body = "def run(): ..."
    tree = _tree(tmp_path, low__a=body, low__b=body, high__c=body)
    entered = {("low/a.py", "run", 1), ("high/c.py", "run", 1)}
    assert [each.path for each in reading.plain_path(tree, {"low"}, entered)] == ["low/a.py"]
