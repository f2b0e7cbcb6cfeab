"""Which rank owns which whole parameter.

[Note: Balance]
Items are assigned from the largest to the smallest, each to the rank with the least so far: the
"longest processing time" rule of Graham (1969). Ties go to the earlier item and to the lower rank.
If all ranks begin empty, the fullest of N ranks then has at most

    max(the largest item, the mean + the (N + 1)-th largest item)

and at most 4/3 of the fullest rank of the best distribution. So with many items per rank the
fullest rank is close to the mean. No bound near the mean can hold for all inputs: of three equal
items, one of two ranks gets two.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balance(sizes: Sequence[int], num_ranks: int, loads: Sequence[int] = ()) -> list[int]:
    """Return a rank for each item, see [Note: Balance].

    `loads` are the totals that the ranks already have. Default: 0.

    Example: sizes `(3, 3, 2, 2, 2)` on two ranks give `[0, 1, 0, 1, 0]`.
    """
    heap = [(load, rank) for rank, load in enumerate(loads or [0] * num_ranks)]
    heapq.heapify(heap)
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        load, rank = heap[0]
        owners[index] = rank
        heapq.heapreplace(heap, (load + sizes[index], rank))
    return owners


def fullest(
    sizes: Sequence[int], owners: Sequence[int], num_ranks: int, loads: Sequence[int] = ()
) -> int:
    """Return the total of the fullest rank."""
    totals = list(loads or [0] * num_ranks)
    for size, owner in zip(sizes, owners, strict=True):
        totals[owner] += size
    return max(totals)
