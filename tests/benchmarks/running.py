"""Runs a benchmark or drill that ends with a line of JSON."""

from __future__ import annotations

import importlib
import io
import json
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

from tests.harness.ranks import run_processes


def run_benchmark(name: str, options: Sequence[str]) -> dict[str, Any]:
    """Run a benchmark that ends with a line of JSON, in a process of its own; return that."""
    [(code, output)] = run_processes([{}], _run_benchmark_here, name, list(options), timeout=110)
    assert code == 0, output
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def _run_benchmark_here(name: str, options: list[str]) -> tuple[int, str]:
    sys.argv = [name, *options, "--json"]
    with redirect_stdout(io.StringIO()) as output, warnings.catch_warnings():
        warnings.simplefilter("default")
        code = importlib.import_module(f"benchmarks.{name}").main()
    return code, output.getvalue()
