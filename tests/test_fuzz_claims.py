"""A few cases of the differential fuzz; minutes of it by `python -m tests.fuzz_claims`."""

from __future__ import annotations

import pytest

from tests.fuzz_claims import FEATURES, draw, run_apart, run_seeds

pytestmark = pytest.mark.long

NUM_SEEDS = 4  # of a test
MAY_BE_REFUSED = {"uneven", "hiding"}
SEEDED = {"penalty", "freeze", "data", "dropping", "carrying"}  # of those that were wrong once


@pytest.mark.parametrize("first", range(0, 4 * NUM_SEEDS, NUM_SEEDS))
def test_random_programs_are_right(first: int) -> None:
    """Gradients and values of a plain model, for fixed seeds; a failure prints its seed."""
    run_seeds(first, NUM_SEEDS, set(FEATURES) - MAY_BE_REFUSED)


@pytest.mark.parametrize(("seed", "result"), [(500, "right"), (511, "refused"), (1149, "refused")])
def test_random_program_whose_ranks_differ_is_right_or_refused(seed: int, result: str) -> None:
    """By an error on each rank, beside reentrant checkpoints; 1149: a backward fails in buckets."""
    assert run_apart(2, seed, {"uneven"}) == result


def test_an_error_about_a_full_parameter_tells_the_version_that_was_found() -> None:
    """Asking the parameter for its form would ask what modules show, which has another one."""
    assert run_apart(2, 460374, set(FEATURES)) == "refused"


@pytest.mark.parametrize("seed", [9113])
def test_random_program_that_was_wrong_stays_right(seed: int) -> None:
    """9113: two forwards, during the first of which a tree without a root was joined."""
    run_seeds(seed, 1, SEEDED)


@pytest.mark.fast
def test_a_seed_draws_the_same_case_each_time() -> None:
    """So a seed that failed can be run alone, and all ranks do the same."""
    for seed in range(20):
        assert draw(seed, set(FEATURES)) == draw(seed, set(FEATURES))
        assert str(draw(seed, set(FEATURES)))
