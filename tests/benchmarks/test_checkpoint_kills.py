"""Checkpoints: a kill at any moment of a save loses nothing."""

from __future__ import annotations

import pytest

from tests.benchmarks.running import run_benchmark

_BETWEEN_OPERATIONS = "one rank, between operations", "all ranks, between operations"


@pytest.mark.long
def test_kills_between_file_operations_and_at_random_moments() -> None:
    """A part of what the benchmark does, whose own checks say what went wrong."""
    options = ["--every", "14", "--random", "2", "--steps", "12", "--resume-every", "3"]
    result = run_benchmark("drills.checkpoint_kills", options)
    counts = result["num_kills"]
    assert all(counts[kind] >= 3 for kind in _BETWEEN_OPERATIONS)
    # Where the random ones fall depends on the machine; those between operations are in a save.
    assert sum(counts.values()) - sum(map(counts.get, _BETWEEN_OPERATIONS)) == 2
    assert result["num_resumed"] >= 4
    assert set(result["found"]) == {
        "before",
        "new",
    }  # kills before and after the moment that counts
