"""Questions with several cases: `python -m benchmarks.QUESTION CASE`, each case a module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence


def run_case(package: str, cases: Sequence[str]) -> int:
    """Run the case that the first argument names, or the first case; return its exit status."""
    arguments = sys.argv[1:]
    if arguments in (["-h"], ["--help"]):
        print(f"Cases, each with a --help of its own; {cases[0]} where none is named:\n")
        for case in cases:
            question = str(importlib.import_module(f"{package}.{case}").__doc__).splitlines()[0]
            print(f"  {case:<16}{question}")
        return 0
    is_named = bool(arguments) and not arguments[0].startswith("-")
    name = arguments.pop(0) if is_named else cases[0]
    if name not in cases:
        print(f"expected one of the cases {', '.join(cases)}, got {name!r}", file=sys.stderr)
        return 2
    return importlib.import_module(f"{package}.{name}").main(arguments) or 0
