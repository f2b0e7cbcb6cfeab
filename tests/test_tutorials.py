"""The tutorials run, as a user would start them."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "tutorials" / "train_language_model.py"
SMALL = ["--layers", "2", "--dim", "64", "--check-steps", "2"]


def _start(num_ranks: int, *options: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[1])}
    command = [sys.executable, str(SCRIPT), "--ranks", str(num_ranks), *SMALL, *options]
    return subprocess.Popen(
        command,
        env=environment,
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
