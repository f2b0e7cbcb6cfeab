"""Finds the waits in the library's source, and leaves one of them out.

A wait is a call by one of the names in `_WAITS`. In the place of one that is left out stands what
it was called on and with, or an event that nobody has recorded. Memory that is kept until a wait is
no call: `REFERENCES` are such lines, and what stands there without.
"""

from __future__ import annotations

import ast
import importlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import composable_shard

_ROOT = Path(composable_shard.__file__).parent

_UNWAITED = "_unwaited"  # a global of the module: works that are dropped would be waited for
_RECORDS = ("record_event", "StreamPoint")
_ASKS = ("query", "is_done")
_WAITS = (
    *("wait", "wait_stream", "wait_event", "wait_on_device", "wait_on_host", "synchronize"),
    *("add_read", "wait_for_reads", "reuse_sources", "abandon"),
)


@dataclass(frozen=True)
class Site:
    """A wait in the library's source."""

    module: str  # without the package's name
    function: str  # or method, qualified
    text: str
    number: int = 0  # among those of the same text in the function
    without: str = field(default="", compare=False)  # what stands there when it is left out

    @property
    def of(self) -> str:
        """Function and text, by which tables name it."""
        number = f" ({self.number + 1})" if self.number else ""
        return f"{self.function}: {self.text}{number}"

    def __str__(self) -> str:
        return f"{self.module}: {self.of}"


def find_sites(module: str) -> list[Site]:
    """Return the waits of a module of the library."""
    found: list[Site] = []
    for name, function in _functions(_parse(module)):
        counts: Counter[str] = Counter()
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and (without := _without(node)):
                text = ast.unparse(node)
                found.append(Site(module, name, text, counts[text], without))
                counts[text] += 1
    return found


REFERENCES = [
    Site(
        "flat_param.gradient_reduction",
        "FlatReduction.start",
        "self._read = (stream, scratch, self.deferred)",
        without="self._read = (stream, None, None)",
    ),
    Site(
        "flat_param.host_gradient",
        "HostGradient.copy",
        "self._in_flight.append((self._copies.copy_to_host(target, source), source))",
        without="self._in_flight.append((self._copies.copy_to_host(target, source), None))",
    ),
]


@contextmanager
def left_out(site: Site) -> Iterator[None]:
    """Leave the wait out until the context ends."""
    tree = _parse(site.module)
    function = next(node for name, node in _functions(tree) if name == site.function)
    parts = ast.unparse(function).split(site.text)
    assert len(parts) > site.number + 1, f"{site} is not there"
    ends = site.number + 1
    source = site.text.join(parts[:ends]) + site.without + site.text.join(parts[ends:])
    function.body = ast.parse(source).body[0].body  # type: ignore[attr-defined]  # a function
    module = importlib.import_module(f"{composable_shard.__name__}.{site.module}")
    changed = compile(ast.fix_missing_locations(tree), str(module.__file__), "exec")
    owner: Any = module
    for name in site.function.split("."):
        owner = vars(owner)[name]
        is_named = (code for code in changed.co_consts if isinstance(code, CodeType))
        changed = next(code for code in is_named if code.co_name == name)
    owner = owner.fget if isinstance(owner, property) else owner
    before, owner.__code__ = owner.__code__, changed
    try:
        yield
    finally:
        owner.__code__ = before
        vars(module).pop(_UNWAITED, None)


def _without(call: ast.Call) -> str:
    """Return what stands in the place of a wait that is left out; nothing if it is none."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in _RECORDS:
        return "__import__('torch').Event('lag')"
    if name in _ASKS:
        return "True"
    if name not in _WAITS:
        return ""
    given = [function.value] if isinstance(function, ast.Attribute) else []
    values = ast.unparse(ast.Tuple([*given, *call.args], ast.Load()))
    return f"globals().setdefault('{_UNWAITED}', []).append({values})"


def _parse(module: str) -> ast.Module:
    return ast.parse(_ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text())


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef):
                prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
                yield prefix + inner.name, inner
