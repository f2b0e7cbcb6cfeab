"""Parameter grids in which each pair of values comes once, in place of each combination."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

Pair = tuple[int, int, int, int]  # two parameters with a value of each, by number


def pairwise(**parameters: Iterable[Any]) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Return the arguments of `parametrize` for a grid of which every two values meet in some row.

    Three parameters of 4, 8 and 2 values have 64 combinations and 32 pairs of the larger two: 32
    rows. The rows are the same each time. Two parameters give all combinations.
    """
    if len(parameters) < 2:
        raise ValueError(f"expected two parameters or more, got {list(parameters)}")
    values = [list(each) for each in parameters.values()]
    missing = {
        (first, a, second, b): None
        for first, second in itertools.combinations(range(len(values)), 2)
        for a in range(len(values[first]))
        for b in range(len(values[second]))
    }
    rows = []
    while missing:
        first, a, second, b = next(iter(missing))
        row = {first: a, second: b}
        for other in range(len(values)):
            if other not in row:
                row[other] = _most_useful(other, len(values[other]), row, missing, len(rows))
        for pair in _pairs(row):
            missing.pop(pair, None)
        rows.append(tuple(values[each][row[each]] for each in range(len(values))))
    return tuple(parameters), rows


def _most_useful(
    parameter: int, num_values: int, row: dict[int, int], missing: dict[Pair, None], turn: int
) -> int:
    """Return the value with the most missing pairs; of equals each one in turn."""
    in_turn = [(turn + k) % num_values for k in range(num_values)]
    return max(
        in_turn, key=lambda value: sum(p in missing for p in _pairs({**row, parameter: value}))
    )


def _pairs(row: dict[int, int]) -> list[Pair]:
    return [
        (first, row[first], second, row[second])
        for first, second in itertools.combinations(sorted(row), 2)
    ]
