"""`TrainingState`: the phase of a unit in a step, and the table of its changes."""

from __future__ import annotations

from enum import Enum, auto


class TrainingState(Enum):
    """The phase that a unit is in."""

    __hash__ = object.__hash__  # Enum's own is a slow Python function

    IDLE = auto()
    # Between the pre-forward and the post-forward of its module.
    FORWARD = auto()
    # From when a backward reaches one of its outputs until the unit's end, [Note: End of a unit].
    PRE_BACKWARD = auto()
    # From the unit's end to the end of the backward.
    POST_BACKWARD = auto()
    # Inside unshard_params.
    UNSHARDED_PARAMS = auto()


IDLE = TrainingState.IDLE

MOVES = {
    IDLE: {
        TrainingState.FORWARD,
        TrainingState.PRE_BACKWARD,
        TrainingState.UNSHARDED_PARAMS,
    },
    TrainingState.UNSHARDED_PARAMS: {TrainingState.IDLE},
    # A backward may run inside a forward, as for gradient penalties.
    TrainingState.FORWARD: {TrainingState.IDLE, TrainingState.PRE_BACKWARD},
    TrainingState.PRE_BACKWARD: {
        TrainingState.POST_BACKWARD,
        TrainingState.IDLE,
        TrainingState.FORWARD,
    },
    # The backward may reach another output of the unit, or another call of its module, later.
    TrainingState.POST_BACKWARD: {
        TrainingState.PRE_BACKWARD,
        TrainingState.IDLE,
        TrainingState.FORWARD,
    },
}
