"""`Stage`: how far the gradients of a handle are in one backward, and the table of its moves."""

from __future__ import annotations

from enum import Enum


class Stage(Enum):
    """How far the gradients of a handle are since the backward opened it last."""

    OPEN = "more may come"
    READY = "all have come, or the unit is over; handles before it were not reduced"
    ISSUED = "the reduction was issued"
    FINAL = "all ranks know that no gradient is to come: published before the backward ends"
    DELIVERED = "published, and their hooks have run"

    __hash__ = object.__hash__  # Enum's own is a slow Python function


OPEN, READY, ISSUED, FINAL, DELIVERED = Stage
EARLY = FINAL, DELIVERED  # of handles with hooks, by `EarlyHooks` alone

# Any call of a unit that the backward reaches, and a nested backward, opens its handles again.
STAGE_MOVES: dict[Stage, frozenset[Stage]] = {
    # READY: in the agreed order, or of a bucket; others are issued at once, also as zeros. FINAL:
    # opened again while its flags were in flight, by a call that brings no gradient.
    OPEN: frozenset({READY, ISSUED, FINAL}),
    READY: frozenset({ISSUED, OPEN}),  # OPEN: where nothing was issued, for `no_sync` waits
    ISSUED: frozenset({FINAL, OPEN}),
    FINAL: frozenset({DELIVERED}),
    DELIVERED: frozenset(),
}
