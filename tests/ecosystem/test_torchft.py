"""torchft: a replica group is killed in mid-step, the other one goes on, and it comes back."""

import warnings

import pytest

from tests.ecosystem.programs import needs


@needs("torchft")
@pytest.mark.deadline(240.0)
def test_a_replica_group_that_is_killed_costs_the_other_one_no_restart() -> None:
    """Losses and weights are a plain model's, and both groups end bitwise equal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        from tests.ecosystem.torchft_kills import run_and_compare

        told = run_and_compare(num_steps=90, num_kills=2)
    assert told.startswith("right: 2 kills in 90 steps; ")
    num_alone = int(told.split(";")[1].split()[0])
    assert 0 < num_alone < 90  # some steps had one group, and some had both
