"""Rules of the package's files that neither ruff nor import-linter holds."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import composable_shard

pytestmark = pytest.mark.fast

ROOT = Path(composable_shard.__file__).parent
PACKAGES = [path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()]
MAX_NUM_LINES = 820
TESTS = Path(__file__).parent


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_no_file_is_long() -> None:
    """A file that passes this has more than one responsibility."""
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in ROOT.rglob("*.py")
    }
    assert {name: length for name, length in lengths.items() if length > MAX_NUM_LINES} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_uses_of_others_what_they_export(package: str) -> None:
    """A module imports from another package by its `__init__`, which says what may be used."""
    inside = []
    for path in (ROOT / package).glob("*.py"):
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.ImportFrom) and node.module:
                root, *rest = node.module.split(".")
                is_ours = root == "composable_shard" and rest and rest[0] in PACKAGES
                if is_ours and rest[0] != package and len(rest) > 1:
                    inside.append(f"{path.name}:{node.lineno} {node.module}")
    assert inside == []


def test_what_a_package_exports_is_used() -> None:
    """Its `__init__` imports what users find there alone, and what other packages import."""
    imported: dict[str, set[str]] = defaultdict(set)
    exported: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.ImportFrom):
                package = (node.module or "").removeprefix("composable_shard.").partition(".")[0]
                names = {alias.name for alias in node.names}
                if path.parent.name != package:
                    imported[package] |= names
                elif path.stem == "__init__":
                    exported[package] = exported.get(package, set()) | names
    for package, names in exported.items():
        module = importlib.import_module(f"composable_shard.{package}")
        assert names - imported[package] <= {*getattr(module, "__all__", ())}, package


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_is_shadowed(package: str) -> None:
    """A package's attribute with the name of one of its modules is that module."""
    for path in (ROOT / package).glob("*.py"):
        name = f"composable_shard.{package}.{path.stem}"
        if path.stem != "__init__":
            module = importlib.import_module(name)
            parent = importlib.import_module(f"composable_shard.{package}")
            assert getattr(parent, path.stem) is module


def test_only_the_runtime_writes_units_and_trees() -> None:
    """Other packages call their methods, so that a reader finds every change in one package."""
    found = []
    for path in ROOT.rglob("*.py"):
        if path.parent.name == "runtime":
            continue
        for node in ast.walk(_parsed(path)):
            is_written = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if is_written and ast.unparse(node.value) in ("state", "unit", "context", "tree"):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
    assert found == []


def _declared(tree: ast.AST) -> set[str]:
    """Return the names that a module defines: of functions, classes, fields and attributes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


def _private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the private names that a module reads of objects, or imports from torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            owner = ast.unparse(node.value)
            if not node.attr.startswith("__") and not owner.startswith("aten"):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            path = (node.module or "").split(".")
            names = [alias.name for alias in node.names]
            yield from ((node.lineno, name) for name in (*path, *names) if name.startswith("_"))


def test_private_names_of_torch_are_spelled_in_one_module() -> None:
    """An attribute with a leading underscore is one that a module of the package defines."""
    trees = {path: _parsed(path) for path in ROOT.rglob("*.py")}
    private = trees.pop(ROOT / "torch_private.py")
    ours = set().union(*map(_declared, trees.values())) | {"_replace", "_getframe"}
    foreign = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path, tree in trees.items()
        for line, name in _private_names(tree)
        if name not in ours
    ]
    assert foreign == []
    assert len(list(_private_names(private))) > 30  # they are there


def test_the_package_takes_no_shard_as_a_program_does() -> None:
    """A read of `handle.local_shard` lets later saves in the background copy the unit at once."""
    package = Path(__file__).parents[1] / "composable_shard"
    found = [
        f"{path.name}:{node.lineno}"
        for path in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "local_shard"
    ]
    assert found == []


def test_a_helper_of_the_tests_is_defined_once() -> None:
    """A name at the top of two test files is one helper written twice, or two for one name."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[:5] != "test_":
                places[node.name].append(path.name)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_a_note_that_is_cited_is_there() -> None:
    """`[Note: X]` within a line cites the note of which it is the heading elsewhere."""
    text = "\n".join(path.read_text() for path in ROOT.rglob("*.py"))
    cited = set(re.findall(r"\[Note: ([^\]]+)\]", text))
    defined = set(re.findall(r'(?m)^\s*(?:""")?\[Note: ([^\]]+)\]$', text))
    assert cited - defined == set()
    assert len(defined) > 10


def test_each_numbered_claim_stands_for_a_test() -> None:
    """Numbers in docstrings and names of tests are those of the list, and none is without one."""
    listed = re.findall(r"^\| (S\d\.\d+) \|", (TESTS / "CLAIMS.md").read_text(), re.MULTILINE)
    text = "\n".join(path.read_text() for path in TESTS.rglob("*.py"))
    named = {f"S{first}.{second}" for first, second in re.findall(r"test_s(\d)_(\d+)", text)}
    assert {*re.findall(r"\bS\d\.\d+\b", text)} | named == set(listed)
    assert len(listed) == len(set(listed))


def _imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_tests_and_benchmarks_share_one_folder() -> None:
    """`tests/common`, which imports nothing of either; `tests/benchmarks` tests the benchmarks."""
    allowed = {
        "tests/common": ("tests.common",),
        "tests/benchmarks": ("tests", "benchmarks"),
        "tests": ("tests",),
        "benchmarks": ("benchmarks", "tests.common"),
    }
    root = TESTS.parent
    wrong = []
    for path in (*TESTS.rglob("*.py"), *(root / "benchmarks").rglob("*.py")):
        name = path.relative_to(root).as_posix()
        may = next(allowed[folder] for folder in allowed if name.startswith(f"{folder}/"))
        for module in _imported_modules(path):
            is_ours = module.split(".")[0] in ("tests", "benchmarks")
            if is_ours and not any(f"{module}.".startswith(f"{each}.") for each in may):
                wrong.append(f"{name} {module}")
    assert wrong == []


def test_index_of_tests_names_what_exists() -> None:
    """Files by their path, or by their name after their folder's; folders by their path."""
    text = (TESTS / "README.md").read_text()
    named = re.findall(r"`([\w/]+(?:\.py|/))`", text)
    assert [each for each in named if not list(TESTS.rglob(each.rstrip("/")))] == []
    assert len(named) > 40


def test_index_of_benchmarks_names_each() -> None:
    """And nothing else."""
    folder = TESTS.parent / "benchmarks"
    text = (folder / "README.md").read_text()
    names = {path.stem for path in folder.rglob("*.py")} - {"__init__", "__main__"}
    names |= {path.parent.name for path in folder.glob("*/__main__.py")}
    words = {word for word in re.findall(r"`([a-z_]+)`", text)}
    assert names == words
