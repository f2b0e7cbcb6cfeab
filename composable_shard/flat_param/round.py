"""`Round`: where the gradients of a handle are between two of its reductions."""

from __future__ import annotations

from enum import Enum


class Round(Enum):
    """Where the gradients are that came since the last reduction was issued, or that it reads."""

    NONE = "no gradient has come"
    IN_BUFFER = "packed in a buffer of their own"
    IN_VALUES = "packed in the place of the values"
    REDUCING = "read by a reduction in flight"

    __hash__ = object.__hash__  # Enum's own is a slow Python function


NONE, IN_BUFFER, IN_VALUES, REDUCING = Round


# A new round of a handle waits for the reduction in flight: it writes into the memory that this
# one reads. So there is one round, and no state for two.
ROUND_MOVES: dict[Round, frozenset[Round]] = {
    NONE: frozenset({IN_BUFFER, IN_VALUES}),  # the first gradient, or a reduction of zeros
    IN_BUFFER: frozenset({REDUCING, NONE}),  # issued; or dropped
    # issued; or the values are needed; or dropped
    IN_VALUES: frozenset({REDUCING, IN_BUFFER, NONE}),
    REDUCING: frozenset({NONE}),  # finished, or dropped
}
