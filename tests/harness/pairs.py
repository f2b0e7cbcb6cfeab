"""Parameter grids in which each pair of values comes once, in place of each combination."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

Pair = tuple[int, int, int, int]  # two parameters with a value of each, by number


class GridRows(list[tuple[Any, ...]]):
    """GridRows of a grid, each value a parameter's own; those of a plain list belong together."""


def pairwise(**parameters: Iterable[Any]) -> tuple[tuple[str, ...], GridRows]:
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
    rows = GridRows()
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


def two_of_each(cases: Sequence[Mapping[str, Hashable]], num_met: int = 2) -> list[int]:
    """Return which cases to keep, such that each value meets two of every other parameter's values.

    Or `num_met`, or the only one that it meets in all cases. Of two parameters with 21 and 4 values
    that are 42 cases, each of the 4 values in about as many.
    """
    meetings = [list(itertools.permutations(case.items(), 2)) for case in cases]
    known: dict[tuple[Any, str], set[Any]] = defaultdict(set)
    for value, other in itertools.chain.from_iterable(meetings):
        known[value, other[0]].add(other)
    met: dict[tuple[Any, str], set[Any]] = defaultdict(set)
    num_uses: Counter[Any] = Counter()

    def is_missing(value: Any, other: Any) -> bool:
        seen = met[value, other[0]]
        return other not in seen and len(seen) < min(num_met, len(known[value, other[0]]))

    def usefulness(index: int) -> tuple[int, int]:
        num_missing = sum(is_missing(*pair) for pair in meetings[index])
        return num_missing, -sum(num_uses[value] for value in cases[index].items())

    left, kept = list(range(len(cases))), []
    while left and usefulness(best := max(left, key=usefulness))[0]:
        left.remove(best)
        kept.append(best)
        num_uses.update(cases[best].items())
        for value, other in meetings[best]:
            met[value, other[0]].add(other)
    return sorted(kept)
