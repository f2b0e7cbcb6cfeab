"""A sample of the interrupts; all lines by `python -m tests.interrupts`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.ranks import run_ranks
from tests.interrupts import PROGRAMS, count_lines, on_all_ranks, run_chunk

NUM_MOMENTS = 24  # of a program
SAMPLED = ("plain", "no_sync", "shards_optim", "checkpoint", "one_rank", "new_data", "first_step")


@pytest.mark.long
@pytest.mark.parametrize("name", SAMPLED)
def test_a_step_after_an_interrupt_at_any_line_is_right(name: str, tmp_path: Path) -> None:
    """State dict and checkpoint in the handler too: by value, as a plain model's."""
    count = min(run_ranks(PROGRAMS[name].world_size, count_lines, name))
    first = 1 + 7 * SAMPLED.index(name)
    moments = on_all_ranks(name, range(first, count + 1, count // NUM_MOMENTS))
    num_run, failures = run_chunk(name, moments, str(tmp_path))
    assert not failures, failures[0]
    assert num_run == len(moments)
