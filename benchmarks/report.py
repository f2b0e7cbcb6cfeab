"""What every result says about itself: when, on what, with which command."""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path

import torch


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows the script's docstring and knows `--output`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the Markdown here too")
    return parser


def hardware() -> str:
    """Return the number of cores and the CPU's model name."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{os.cpu_count()} cores, {names[0] if names else 'unknown CPU'}"


def header(title: str, *notes: str) -> str:
    """Return the title, the circumstances as a list, and the notes."""
    spec = sys.modules["__main__"].__spec__
    name = "" if spec is None else spec.name.removesuffix(".__main__")
    command = shlex.join(["python", "-m", name, *sys.argv[1:]])
    lines = [
        f"# {title}",
        "",
        f"- date: {date.today().isoformat()}",
        f"- hardware: {hardware()}; load average {os.getloadavg()[0]:.1f} at the end",
        f"- torch {torch.__version__}, Python {sys.version.split()[0]}",
        f"- command: `{command}`",
        *(f"- {note}" for note in notes),
    ]
    return "\n".join(lines) + "\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    rule = ["---"] * len(columns)
    return "".join(f"| {' | '.join(row)} |\n" for row in (columns, rule, *rows))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return `median (lower quartile-upper quartile)`."""
    low, middle, high = quartiles(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def emit(markdown: str, output: Path | None) -> None:
    """Print the result and write it where `--output` says."""
    print(markdown)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(markdown + "\n")
