"""Every two values meet, in few rows."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from tests.harness.pairs import pairwise, two_of_each

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    "sizes", [(4, 8, 2), (2, 2, 2, 2, 2), (3, 3, 3), (8, 4, 3, 2, 3), (1, 5, 2)]
)
def test_every_two_values_meet(sizes: tuple[int, ...]) -> None:
    """Of any two parameters; names stay in order, and no row comes twice."""
    parameters = {f"p{number}": range(size) for number, size in enumerate(sizes)}
    names, rows = pairwise(**parameters)
    assert names == tuple(parameters)
    assert len(set(rows)) == len(rows)
    for first, second in itertools.combinations(range(len(sizes)), 2):
        expected = itertools.product(range(sizes[first]), range(sizes[second]))
        assert {(row[first], row[second]) for row in rows} == set(expected)


def test_rows_are_few_and_the_same_each_time() -> None:
    """At most a half more than the two largest parameters need."""
    grid = {"a": "wxyz", "b": range(8), "c": (2, 3)}
    assert pairwise(**grid) == pairwise(**grid)
    assert len(pairwise(**grid)[1]) == 32
    assert len(pairwise(a=range(8), b=range(4), c=range(3), d=range(2), e=range(3))[1]) <= 48
    assert len(pairwise(**{name: (False, True) for name in "abcdefgh"})[1]) <= 12


def test_two_parameters_give_all_combinations() -> None:
    """Of one there is nothing to pair."""
    assert sorted(pairwise(a=(1, 2), b="xy")[1]) == [(1, "x"), (1, "y"), (2, "x"), (2, "y")]


@pytest.mark.parametrize("sizes", [(21, 4), (4, 4), (8, 4, 2, 2), (2, 2), (5, 3), (7, 1)])
def test_each_value_meets_two_of_the_others(sizes: tuple[int, ...]) -> None:
    """Or all there are; each value comes about as often as the others of its parameter."""
    names, rows = pairwise(**{f"p{number}": range(size) for number, size in enumerate(sizes)})
    cases = [dict(zip(names, row, strict=True)) for row in rows]
    kept = [cases[index] for index in two_of_each(cases)]
    for one, other in itertools.permutations(names, 2):
        for value in {case[one] for case in cases}:
            expected = min(2, len({case[other] for case in cases}))
            assert len({case[other] for case in kept if case[one] == value}) >= expected
    for name in names:
        counts = Counter(case[name] for case in kept).values()
        assert max(counts) <= 2 * min(counts)
    assert len(kept) <= 2.5 * max(sizes)


def test_a_value_that_meets_one_other_keeps_it() -> None:
    """As in a list of single cases."""
    cases = [{"a": 0, "b": 0}, {"a": 1, "b": 0}, {"a": 2, "b": 0}, {"a": 3, "b": 1}]
    assert two_of_each(cases) == [0, 1, 2, 3]
