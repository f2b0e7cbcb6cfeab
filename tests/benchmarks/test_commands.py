"""Each `python -m benchmarks...` that a page, a result or a docstring names can be typed."""

from __future__ import annotations

import argparse
import importlib
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(
    r"(?:python|bin/python\)?) -m (benchmarks\.[a-z_.]*[a-z])\b(?!\.)((?: [^`|#\n;\"{]*)?)(?!{)"
)
# What stands for a value; `make` replaces the last.
PLACES = {"FILE": "out", "N": "2", "FOLDER": "/tmp", "COMMIT": "HEAD", "$(ARGS)": ""}


def _pages_and_sources() -> Iterator[str]:
    for folder in ("docs", "benchmarks", "tutorials", "tests", ".github"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".md", ".py", ".yml") and "generated" not in path.parts:
                yield path.read_text()
    for name in ("README.md", "CONTRIBUTING.md", "Makefile"):
        yield (ROOT / name).read_text()


def _benchmark_commands() -> list[str]:
    """Return the modules with their arguments, without what the text says after them."""
    found = set()
    for text in _pages_and_sources():
        for module, rest in COMMAND.findall(text):
            words = re.split(r"  |, | - ", rest)[0].split()
            kept = [PLACES.get(word, word) for word in words]
            found.add(" ".join([module, *filter(None, kept)]))
    return sorted(found)


@pytest.mark.parametrize("command", _benchmark_commands())
def test_a_command_that_is_named_is_understood(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The module is there, and so are its case and its options."""
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: Any, *args: Any) -> None:
        parse(parser, *args)
        sys.exit(0)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    module, *arguments = shlex.split(command)
    if not any(each.startswith("-") for each in arguments):
        arguments.append("--help")  # what it needs is not said here
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    for name in (f"{module}.__main__", module):
        if not hasattr(sys.modules.get(name), "__path__"):  # as in a new process
            monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert not ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    "folder", sorted(ROOT.glob("benchmarks/*/__main__.py")), ids=lambda p: p.parent.name
)
def test_each_case_is_a_module_with_a_question(folder: Path) -> None:
    """And each module with a `main` is a case."""
    package = f"benchmarks.{folder.parent.name}"
    cases = importlib.import_module(f"{package}.__main__").CASES
    paths = [path for path in folder.parent.glob("*.py") if "\ndef main(" in path.read_text()]
    assert sorted(cases) == sorted(path.stem for path in paths)
