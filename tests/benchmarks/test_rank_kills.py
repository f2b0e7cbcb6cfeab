"""Real kills: the other ranks say which one is gone, and a restarted run has the same losses.

`python -m benchmarks.drills rank_kills` kills at every place of a step under every strategy, and
with `--random 30` under torchrun; `python -m benchmarks.drills cut_link` takes the network away.
"""

from __future__ import annotations

import pytest

from tests.benchmarks.running import run_benchmark


@pytest.mark.long
def test_dies_the_others_say_who_is_gone_and_torchrun_resumes() -> None:
    """Dies: in a reduction, of three ranks; then torchrun's agent restarts two after a kill."""
    options = ["--place", "reduce", "--strategy", "FULL_SHARD"]
    options += ["--random", "1", "--steps", "8", "--in-process"]
    result = run_benchmark("drills.rank_kills", options)
    [cell] = result["places"]
    assert cell["problem"] is None
    assert len(cell["texts"]) == 2
    assert all("rank 1 is gone" in text for text in cell["texts"])
    assert result["random"]["num_kills"] == 1
    assert result["random"]["steps_with_other_losses"] == []
