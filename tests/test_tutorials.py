"""The tutorials run, as a user would start them."""

from __future__ import annotations

import ast
import csv
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parent.parent / "tutorials"
SCRIPT = TUTORIALS / "train_language_model.py"
SMALL = ["--layers", "2", "--dim", "64", "--check-steps", "2"]


def _start(num_ranks: int, *options: str) -> subprocess.Popen[str]:
    return _run([str(SCRIPT), "--ranks", str(num_ranks), *SMALL, *options])


def _run(arguments: list[str], folder: Path | None = None) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TUTORIALS.parent)}
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _finish(process: subprocess.Popen[str], timeout: float = 90) -> str:
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"the tutorial did not end:\n{process.communicate()[0]}")
    return output


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_language_model_trains_and_equals_one_process(num_ranks: int, tmp_path: Path) -> None:
    """A small run writes its losses and finds those of one process on the same batches."""
    process = _start(num_ranks, "--steps", "3", "--output", str(tmp_path))
    output = _finish(process)
    assert process.returncode == 0, output
    assert "largest difference" in output
    with (tmp_path / "loss.csv").open() as file:
        assert len(list(csv.reader(file))) == 4  # a header and three steps
    assert (tmp_path / "loss.png").stat().st_size > 0


def test_language_model_ends_cleanly_at_ctrl_c(tmp_path: Path) -> None:
    """All ranks stop, say so without a traceback, and leave the losses so far."""
    process = _start(2, "--steps", "100000", "--output", str(tmp_path))
    assert process.stdout is not None
    deadline = time.monotonic() + 80
    while not (tmp_path / "loss.csv").exists() and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.2)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    output = _finish(process)
    assert process.returncode == 130, output
    assert "stopped by a signal" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    "name", ["average_weights", "compare_strategies", "edit_weights", "train_with_muon"]
)
def test_tutorial_prints_what_its_text_says(name: str, num_ranks: int, tmp_path: Path) -> None:
    """All lines of the expected output come; the digits may differ, the words may not."""
    script = TUTORIALS / f"{name}.py"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    process = _run([*(launcher if num_ranks > 1 else []), str(script)], tmp_path)
    output = _finish(process)
    assert process.returncode == 0, output
    expected = (ast.get_docstring(ast.parse(script.read_text())) or "").partition("output")[2]
    lines = [line.strip() for line in expected.splitlines() if line.startswith("    ")]
    assert lines
    printed = [_without_digits(line) for line in output.splitlines()]
    assert [line for line in printed if line in map(_without_digits, lines)] == [
        _without_digits(line) for line in lines
    ]


def _without_digits(line: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "#", line)
