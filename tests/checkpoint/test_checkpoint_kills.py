"""Checkpoints: a kill at any moment of a save loses nothing."""

from __future__ import annotations

import pytest

from tests.harness.helpers import run_benchmark


@pytest.mark.long
def test_kills_between_file_operations_and_at_random_moments() -> None:
    """A part of what the benchmark does, whose own checks say what went wrong."""
    options = ["--every", "14", "--random", "2", "--steps", "12", "--resume-every", "3"]
    result = run_benchmark("drills.checkpoint_kills", options)
    counts = result["num_kills"]
    assert counts["one rank, between operations"] >= 3
    assert counts["all ranks, between operations"] >= 3
    inside = counts.get("one rank, inside a save", 0) + counts.get("all ranks, inside a save", 0)
    assert inside >= 1
    assert result["num_resumed"] >= 4
    assert set(result["found"]) == {
        "before",
        "new",
    }  # kills before and after the moment that counts
