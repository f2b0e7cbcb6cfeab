"""Take turns: every peer is timed in every round, in rotating order, in one process."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterable, Mapping

Samples = dict[str, list[float]]  # by peer: one figure per round


def in_turn(names: Iterable[str], turn: int) -> list[str]:
    """Return the names in order, but each round begins with another one."""
    each = list(names)
    shift = turn % len(each)
    return each[shift:] + each[:shift]


def interleave(timed: Mapping[str, Callable[[], float]], rounds: int, repeats: int) -> Samples:
    """Return each peer's samples; one sample is the median of a few repeats.

    Args:
        timed: By peer, what does the work once and returns its seconds.
        rounds: Samples per peer.
        repeats: Calls per sample; three more before the first round warm up.
    """
    names = list(timed)
    for name in names:
        for _ in range(3):
            timed[name]()
    samples: Samples = {name: [] for name in names}
    gc.collect()
    gc.freeze()  # what lives on is not to be scanned again at one peer's expense
    for turn in range(rounds):
        for name in in_turn(names, turn):
            gc.collect()
            samples[name].append(statistics.median(timed[name]() for _ in range(repeats)))
    gc.unfreeze()
    return samples


def ratios(samples: Samples, name: str, to: str) -> list[float]:
    """Return one peer's figures divided by another's, round by round."""
    return [a / b for a, b in zip(samples[name], samples[to], strict=True)]
