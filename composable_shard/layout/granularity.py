"""How finely parameters are cut, and which ranks own whole ones.

Pure arithmetic on integers, the same on every rank.

[Note: Balance]
The largest item comes first, and each goes to the rank that has the least so far: the "longest
processing time" rule of Graham (1969). Ties go to the earlier item and to the lower rank. Without
loads to begin with, the fullest of N ranks then has at most

    max(the largest item, the mean + the (N + 1)-th largest item)

and at most 4/3 of the fullest rank of the best distribution. So wherever there are many items to a
rank it is close to the mean. Where that left a rank above both 1.05 times the mean and the largest
item, exchanges of an item of the fullest rank for a smaller one, or none, of another follow while
one makes it less full. No such bound can hold for all inputs: of three equal items, one of two
ranks gets two.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor

from composable_shard.options import Block, Granularity


def is_owned(granularity: Granularity) -> bool:
    """Return whether one rank holds the whole parameter; its owner is balanced over the ranks."""
    return granularity == "param"


def block_numel(dense: Tensor, granularity: Granularity) -> int:
    """Return how many consecutive elements of a dense tensor, in memory order, stay together.

    A row is what one index of the outermost dimension in memory selects: of the first one, unless
    the tensor is laid out otherwise (channels_last, a transposed weight).
    """
    if isinstance(granularity, Block):
        return granularity.numel
    if granularity == "element" or dense.numel() == 0:
        return 1
    if is_owned(granularity):
        return dense.numel()
    outermost = max(range(dense.dim()), key=lambda dim: dense.stride(dim), default=None)
    if outermost is None:
        return 1
    return prod(size for dim, size in enumerate(dense.shape) if dim != outermost)


_MAX_IMBALANCE = 1.05  # of the mean: what exchanges are for
_MAX_TRIALS = 20_000  # of exchanges: a bound on the time


def balance(sizes: Sequence[int], num_ranks: int, loads: Sequence[int] = ()) -> list[int]:
    """Return a rank for each item, see [Note: Balance].

    Args:
        sizes: Of the items.
        num_ranks: How many ranks there are.
        loads: The total that each rank has already. Default: nothing.

    Example: sizes `(3, 3, 2, 2, 2)` on two ranks give `[0, 1, 1, 0, 1]`, then `[0, 0, 1, 1, 1]`.
    """
    totals = list(loads or [0] * num_ranks)
    heap = [(load, rank) for rank, load in enumerate(totals)]
    heapq.heapify(heap)
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        load, rank = heap[0]
        owners[index] = rank
        heapq.heapreplace(heap, (load + sizes[index], rank))
    for load, rank in heap:
        totals[rank] = load
    goal = max(_MAX_IMBALANCE * sum(totals) / num_ranks, *sizes, *loads, 0)
    if max(totals) > goal:
        _even_out(sizes, owners, totals, goal)
    return owners


def fullest(
    sizes: Sequence[int], owners: Sequence[int], num_ranks: int, loads: Sequence[int] = ()
) -> int:
    """Return what the rank with the most has."""
    totals = list(loads or [0] * num_ranks)
    for size, owner in zip(sizes, owners, strict=True):
        totals[owner] += size
    return max(totals)


class _Exchange(NamedTuple):
    """Two items, or one and none, that change places."""

    larger: int  # what the fuller of the two ranks has afterwards
    other: int  # rank
    given: int  # index of an item of the fullest rank
    taken: int  # index of an item of the other, -1 for none


def _even_out(sizes: Sequence[int], owners: list[int], totals: list[int], goal: float) -> None:
    """Exchange items of the fullest rank while that helps and it has more than the goal."""
    items: list[list[int]] = [[] for _ in totals]
    for index in sorted(range(len(sizes)), key=lambda index: sizes[index]):
        items[owners[index]].append(index)
    trials = 0
    while trials < _MAX_TRIALS:
        top = max(range(len(totals)), key=lambda rank: totals[rank])
        if totals[top] <= goal:
            return
        trials += len(items[top]) * len(totals)
        found = [
            _best_exchange(sizes, items[top], items[rank], (totals[top], totals[rank]), rank)
            for rank in range(len(totals))
            if rank != top
        ]
        best = min(found)
        if best.larger >= totals[top]:
            return
        _apply(sizes, items, totals, top, best)
        owners[best.given] = best.other
        if best.taken >= 0:
            owners[best.taken] = top


def _best_exchange(
    sizes: Sequence[int], mine: list[int], theirs: list[int], totals: tuple[int, int], rank: int
) -> _Exchange:
    """Return the exchange between two ranks after which the fuller of them has the least."""
    half = (totals[0] - totals[1]) / 2
    best = _Exchange(totals[0], rank, -1, -1)
    for given in mine:
        position = bisect_left(theirs, sizes[given] - half, key=lambda index: sizes[index])
        near = [theirs[place] for place in (position - 1, position) if 0 <= place < len(theirs)]
        for taken in (-1, *near):
            moved = sizes[given] - (sizes[taken] if taken >= 0 else 0)
            larger = max(totals[0] - moved, totals[1] + moved)
            if larger < best.larger:
                best = _Exchange(larger, rank, given, taken)
    return best


def _apply(
    sizes: Sequence[int], items: list[list[int]], totals: list[int], top: int, best: _Exchange
) -> None:
    moved = [(best.given, top, best.other)]
    if best.taken >= 0:
        moved.append((best.taken, best.other, top))
    for index, source, target in moved:
        items[source].remove(index)
        place = bisect_left(items[target], sizes[index], key=lambda other: sizes[other])
        items[target].insert(place, index)
        totals[source] -= sizes[index]
        totals[target] += sizes[index]
