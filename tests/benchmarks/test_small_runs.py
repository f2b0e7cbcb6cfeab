"""Each benchmark runs to its table, as small as it goes: what else would see that one is broken?

Not those that have a test of their own here, and not those that need a GPU, root or other packages.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 230.0
SHORT = (
    "checkpoints writers --every 400",
    "communication counts --models micro --peers fsdp2,ours",
    "communication even --ranks 2 --sizes 16 --rounds 1",
    "communication uneven --ranks 2 --kib 16 --rounds 1",
    "host_time device --rounds 1 --steps 1 --units 2 --params 1",
    "host_time lockstep --layers 1 --dim 8 --rounds 1",
    "host_time optimizer --rounds 1 --steps 1",
    "host_time units --rounds 1 --steps 1 --units 2 --params 1",
    "memory padding",
    "memory step --model micro --steps 1 --peers bare,ours",
    "optimizers clip --rounds 1 --calls 1",
    "optimizers muon --model micro --rounds 1",
    "step_time gloo --model micro --rounds 1 --steps 1 --peers bare,ours --references ours",
)
LONG = (
    "checkpoints background --model micro --rounds 1",
    "checkpoints background --model micro --rounds 1 --peers ours",
    "full_params hand_over --model micro --rounds 1",
    "full_params unshard --model micro --rounds 1",
    "optimizers step --model micro --rounds 1 --names AdamW",
    "step_time compiled --model micro --rounds 1 --steps 1 --backend eager",
    "step_time loop --model micro --rounds 1 --steps 2 --peers ddp,ours --variants plain",
)


@pytest.mark.deadline(240)
@pytest.mark.parametrize(
    "command", [*SHORT, *(pytest.param(each, marks=pytest.mark.long) for each in LONG)]
)
def test_a_small_run_prints_its_table(command: str) -> None:
    """And ends with 0."""
    name, *arguments = shlex.split(command)
    run = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert not run.returncode, run.stderr[-2000:]
    assert "| --- |" in run.stdout
