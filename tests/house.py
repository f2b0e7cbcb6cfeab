"""How much of the package a reader has to hold in mind, counted; `python -m tests.house` prints it.

Steps, as `tests/house_steps.py` runs and counts them:

- *warm step*: the fifth step of a small model, on rank 0 of 2 (gloo): files entered, functions
  entered, calls from a function of one file to a function of another. The same of FSDP2's own
  folder on the same model.
- *set-up and first step*: files entered by `fully_shard` of all units and by the first step.

Source, as `tests/house_source.py` reads it:

- *modules*: files without the `__init__`s, which are counted apart; lines of all files.
- *levels*: the longest chain of imports, counted in modules; between packages, in packages; inside
  a package, the longest chain of its modules. A file directly in the folder is a package of its
  own. Beside it the number of layers that import-linter's contracts list: in the first contract,
  and the most in another one.
- *upward imports*: imports of a package that `PACKAGES` lists later, or doesn't list.
- *methods* of a class: functions in its body and in the bodies of its bases within the package, by
  name, properties, static and class methods included. `FSDPModule` has torch's and is left out.
- *foreign writes*: assignments to attributes of classes of another package, see
  `Tree.foreign_writes`.
- *files to touch*: what a contributor has to edit, beside tests and docs, by the names that are
  spelled in code. Defaults of parameters and fields, annotations and imports don't count.
  For a strategy: files that spell a member of `ShardingStrategy` or define it. For a granularity:
  files that spell one of the literals of `Granularity`, or a class of that union. For a collective
  algorithm: files that name or define a class derived from one called `...Algorithm`. For an op
  rule: files
  that name an op as `aten.op` in a statement of the module, as tables of rules do; the figure is of
  the op that is named in most files. An op that a function uses is no rule.
- *functions*: lines without decorators and docstring.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import composable_shard
from tests import helpers
from tests.house_source import Source, Tree, longest_chain
from tests.house_steps import count_steps

__all__ = [
    "GOALS",
    "PACKAGES",
    "REACHED",
    "TABLE",
    "House",
    "measure_source",
    "measure_steps",
    "missed",
    "render",
]

TABLE = "the house"  # the property of a test that measured: what `render` returned

# Bottom first: a package imports only from packages before it.
PACKAGES = (
    "torch_private",
    "options",
    "layout",
    "comm",
    "tensor",
    "flat_param",
    "runtime",
    "module_api",
    "optim",
    "state_dict",
    "construct",
    "planning",
    "checkpoint",
    "huggingface",
    "pipelining",
    "__main__",
)

# The most that each figure should be.
GOALS = {
    "warm step: files": 16,
    "warm step: calls between files": 200,
    "set-up and first step: files": 30,
    "modules": 75,
    "lines": 18_600,
    "levels between packages, longest chain": 13,
    "levels between packages, contract": 13,
    "upward imports": 0,
    "methods of a class, most": 25,
    "foreign writes": 0,
    "files to touch: strategy": 1,
    "files to touch: collective algorithm": 2,
    "files to touch: granularity": 2,
    "files to touch: op rule": 1,
}

# The most that each figure may be where its goal is missed: lower it when a change gets nearer.
REACHED = {
    "lines": 32_471,
}

_TORCHS_OWN = "FSDPModule"  # has as many methods as torch's class of that name
_MAX_METHODS = GOALS["methods of a class, most"]
_LONG_FUNCTION = 60
_STRATEGY, _GRANULARITY, _ALGORITHM = "ShardingStrategy", "Granularity", "Algorithm"
_ROOT = Path(composable_shard.__file__).parent


@dataclass(frozen=True)
class House:
    """Figures by name, and for some of them what they count, one line each."""

    figures: dict[str, float]
    details: dict[str, list[str]]

    def __or__(self, other: House) -> House:
        """Join the figures of two."""
        return House(self.figures | other.figures, self.details | other.details)


def measure_steps() -> House:
    """Run the steps in two fresh processes."""
    steps = count_steps()
    figures: dict[str, float] = {}
    for name, key in (("warm step", "warm"), ("FSDP2's warm step", "fsdp2")):
        entered = steps[key]
        figures[f"{name}: files"] = len(entered.files)
        figures[f"{name}: functions"] = entered.num_functions
        figures[f"{name}: calls between files"] = entered.num_calls_between_files
    figures["set-up and first step: files"] = len(steps["first"].files)
    details = {
        "warm step: files": sorted(steps["warm"].files),
        "set-up and first step: files": sorted(steps["first"].files),
    }
    return House(figures, details)


def measure_source(root: Path = _ROOT) -> House:
    """Read the package in a folder, and the `pyproject.toml` beside it."""
    tree = Tree(root)
    found = (
        _sizes_of_files(tree) | _levels(tree) | _classes(tree) | _touched(tree) | _functions(tree)
    )
    return found | _contract_levels(root.parent / "pyproject.toml")


def _sizes_of_files(tree: Tree) -> House:
    longest = max(tree.sources.values(), key=lambda source: source.num_lines)
    figures = {
        "modules": len(tree.modules),
        "modules and __init__s": len(tree.sources),
        "lines": sum(source.num_lines for source in tree.sources.values()),
        "lines of the longest module": longest.num_lines,
    }
    return House(dict(figures), {"lines of the longest module": [longest.path]})


def _levels(tree: Tree) -> House:
    imports = tree.imports()
    chains = {
        "levels between modules, longest chain": longest_chain(imports),
        "levels between packages, longest chain": longest_chain(tree.package_imports()),
        "levels inside a package, longest chain": max(
            (longest_chain(part) for part in _inside(tree, imports)), key=len, default=[]
        ),
    }
    found = House({name: len(chain) for name, chain in chains.items()}, dict(chains))
    if not {source.package for source in tree.modules} & set(PACKAGES):
        return found  # one folder of files: nothing is up or down
    upward = tree.upward_imports(PACKAGES)
    return found | House({"upward imports": len(upward)}, {"upward imports": upward})


def _inside(tree: Tree, imports: dict[str, set[str]]) -> list[dict[str, set[str]]]:
    """Return the imports among the modules of each package."""
    members: dict[str, set[str]] = {}
    for source in tree.modules:
        members.setdefault(source.package, set()).add(source.module)
    return [{each: imports[each] & modules for each in modules} for modules in members.values()]


def _contract_levels(pyproject: Path) -> House:
    """Count the layers of import-linter's contracts; nothing where there is no such file."""
    text = pyproject.read_text() if pyproject.exists() else ""
    counts = [
        len(re.findall(r'^\s*(?:"|\{)', layers, re.MULTILINE))
        for layers in re.findall(r"^layers = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    ]
    if not counts:
        return House({}, {})
    between = {"levels between packages, contract": counts[0]}
    inside = {"levels inside a package, contract": max(counts[1:])} if counts[1:] else {}
    return House({**between, **inside}, {})


def _classes(tree: Tree) -> House:
    classes = [each for each in tree.classes.values() if each.name != _TORCHS_OWN]
    counts = {each: len(each.all_methods()) for each in classes}
    wide = sorted(
        ((count, each) for each, count in counts.items() if count > _MAX_METHODS),
        key=lambda pair: (-pair[0], pair[1].name),
    )
    writes = tree.foreign_writes()
    figures = {
        "methods of a class, most": max(counts.values(), default=0),
        f"classes of over {_MAX_METHODS} methods": len(wide),
        "foreign writes": len(writes),
    }
    names = [f"{each.name} ({each.source.path}): {count}" for count, each in wide]
    return House(dict(figures), {"methods of a class, most": names, "foreign writes": writes})


def _touched(tree: Tree) -> House:
    files = {
        "strategy": _spelling_members(tree, _STRATEGY),
        "collective algorithm": _spelling_algorithms(tree),
        "granularity": _spelling_members(tree, _GRANULARITY),
        "op rule": _spelling_ops(tree),
    }
    return House(
        {f"files to touch: {what}": len(found) for what, found in files.items()},
        {f"files to touch: {what}": found for what, found in files.items()},
    )


def _spelling_members(tree: Tree, name: str) -> list[str]:
    """Return files that spell a member of an enum, or a value of an alias of literals."""
    enums = [each for each in tree.classes.values() if each.name == name]
    members = set[str]().union(*(each.members for each in enums))
    strings, classes = tree.alternatives(name)

    def is_spelled(node: ast.AST) -> bool:
        if isinstance(node, ast.Constant):
            return isinstance(node.value, str) and node.value in strings
        if isinstance(node, ast.Name):
            return node.id in classes
        return isinstance(node, ast.Attribute) and node.attr in members

    return sorted({*tree.spelling(is_spelled), *(each.source.path for each in enums)})


def _spelling_algorithms(tree: Tree) -> list[str]:
    classes = tree.subclasses(_ALGORITHM)
    names = {each.name for each in classes}

    def is_spelled(node: ast.AST) -> bool:
        if isinstance(node, ast.FunctionDef):
            return node.name in names
        return (node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")) in names

    return sorted({*tree.spelling(is_spelled), *(each.source.path for each in classes)})


def _spelling_ops(tree: Tree) -> list[str]:
    """Return the files that name the op which is named in most files."""
    files: dict[str, set[str]] = {}
    for source in tree.sources.values():
        for op in _ops(source):
            files.setdefault(op, set()).add(source.path)
    most = max(files, key=lambda op: (len(files[op]), op), default=None)
    return [] if most is None else [f"{path} (aten.{most})" for path in sorted(files[most])]


def _ops(source: Source) -> set[str]:
    """Return the ops that are named outside functions and classes, in-place variants as one."""
    return {
        node.attr.rstrip("_")
        for statement in source.tree.body
        if not isinstance(statement, (ast.FunctionDef, ast.ClassDef))
        for node in ast.walk(statement)
        if isinstance(node, ast.Attribute)
        and (getattr(node.value, "id", "") == "aten" or getattr(node.value, "attr", "") == "aten")
    }


def _functions(tree: Tree) -> House:
    lengths = tree.function_lengths()
    figures = {
        "functions": len(lengths),
        "lines of a function, median": statistics.median(lengths),
        "lines of a function, 90th percentile": lengths[len(lengths) * 9 // 10],
        f"functions of over {_LONG_FUNCTION} lines": sum(n > _LONG_FUNCTION for n in lengths),
    }
    return House(figures, {})


def missed(house: House) -> dict[str, tuple[float, int]]:
    """Return the figures that exceed their goals, with both numbers."""
    return {
        name: (value, GOALS[name])
        for name, value in house.figures.items()
        if name in GOALS and value > GOALS[name]
    }


def render(house: House) -> str:
    """Return the figures as a table; a star marks those that exceed their goals."""
    exceeded = missed(house)
    rows = [("", "is", "goal", "")]
    for name, value in house.figures.items():
        goal = f"{GOALS[name]:,}" if name in GOALS else ""
        rows.append((name, f"{value:,}", goal, "*" if name in exceeded else ""))
    return "\n".join(
        f"{name:<40}{is_:>8}{goal:>9} {mark}".rstrip() for name, is_, goal, mark in rows
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and what the figures that miss their goals count."""
    parser = argparse.ArgumentParser(prog="python -m tests.house", description=__doc__)
    parser.add_argument("--json", type=Path, help="also write figures and details to this file")
    parser.add_argument("--details", action="store_true", help="also print what is counted")
    options = parser.parse_args(arguments)
    try:
        house = measure_steps() | measure_source()
    finally:
        helpers.shut_down_workers()
    print(render(house))
    if options.details:
        for name, lines in house.details.items():
            print(f"\n{name}:", *lines, sep="\n    ")
    if options.json:
        content = {"figures": house.figures, "goals": GOALS, "details": house.details}
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
