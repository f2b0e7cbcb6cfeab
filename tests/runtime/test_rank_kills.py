"""Real kills: the other ranks say which one is gone, and a restarted run has the same losses.

`python -m benchmarks.rank_kills` kills at every place of a step under every strategy, and with
`--random 30` under torchrun; `python -m benchmarks.cut_link` takes the network away.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_l_dies_the_others_say_who_is_gone_and_torchrun_resumes() -> None:
    """Dies: in a reduction, of three ranks; then torchrun's agent restarts two after a kill."""
    options = ["--place", "reduce", "--strategy", "FULL_SHARD"]
    options += ["--random", "1", "--steps", "8", "--in-process", "--json"]
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.rank_kills", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    [cell] = result["places"]
    assert cell["problem"] is None
    assert len(cell["texts"]) == 2
    assert all("rank 1 is gone" in text for text in cell["texts"])
    assert result["random"]["num_kills"] == 1
    assert result["random"]["steps_with_other_losses"] == []
