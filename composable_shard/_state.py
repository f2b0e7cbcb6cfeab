"""`ShardState`: what `fully_shard` attaches to a module, and what the states of a tree share."""

from __future__ import annotations

import weakref
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from composable_shard._flat_grad import Streams
from composable_shard._flat_param import FlatParamHandle

__all__ = ["ExecutionOrder", "ShardState", "TrainingState", "TreeContext"]


class TrainingState(Enum):
    """What a unit is doing."""

    IDLE = auto()
    # Between the pre-forward and the post-forward of its module.
    FORWARD = auto()
    # From the first gradient of one of its outputs to the last gradient of its parameters.
    PRE_BACKWARD = auto()
    # From there to the end of the backward pass.
    POST_BACKWARD = auto()


_LEGAL = {
    TrainingState.IDLE: {TrainingState.FORWARD, TrainingState.PRE_BACKWARD},
    # A backward may run inside a forward, as for gradient penalties.
    TrainingState.FORWARD: {TrainingState.IDLE, TrainingState.PRE_BACKWARD},
    TrainingState.PRE_BACKWARD: {
        TrainingState.POST_BACKWARD,
        TrainingState.IDLE,
        TrainingState.FORWARD,
    },
    # A second output of the unit, or a second use of its module, comes late.
    TrainingState.POST_BACKWARD: {
        TrainingState.PRE_BACKWARD,
        TrainingState.IDLE,
        TrainingState.FORWARD,
    },
}

StateRef = weakref.ref["ShardState"]


class ShardState:
    """One unit: its handles, its options, and where it is in a step.

    Attributes:
        name: FQN of the unit's module, as seen from the outermost sharded module so far.
        handles: Handles of the parameters this unit manages.
        borrowed: Handles of other units whose parameters this unit shows too (tied weights); it
            gathers them for its own forward and backward, their owner reduces them.
        reshard_after_forward: True frees the full parameters between forward and backward, False
            keeps them, None keeps them only where this unit leads the call.
        requires_gradient_sync: False leaves gradients unsharded and unreduced.
        depth: How many calls of its modules are running.
        call_number: Number of its last call in the tree.
        forward_index: Number of its first call that the next backward may reach, -1 before it.
        forward_order: The units that ran in the calls this unit led.
    """

    def __init__(self, name: str, reshard_after_forward: bool | None, num_modules: int) -> None:
        self.name = name
        self.handles: list[FlatParamHandle] = []
        self.borrowed: list[FlatParamHandle] = []
        self.reshard_after_forward = reshard_after_forward
        self.num_modules = num_modules
        self.modules_to_run = num_modules
        self.training_state = TrainingState.IDLE
        self.requires_gradient_sync = True
        self.is_held = False  # by unshard(), until reshard()
        self.is_in_pass = False  # its modules' forwards hold the full parameters
        self.depth = 0
        self.call_number = -1
        self.call_sequence_nr = 0  # of the next autograd node when that call began
        self.forward_index = -1
        self.forward_order = ExecutionOrder()
        self.context: TreeContext | None = None
        self.ref: StateRef = weakref.ref(self)

    @property
    def needed(self) -> list[FlatParamHandle]:
        """Handles whose full parameters this unit computes with: its own and borrowed ones."""
        return self.handles + self.borrowed if self.borrowed else self.handles

    def transition(self, target: TrainingState) -> None:
        """Change the training state.

        Raises:
            RuntimeError: If the change makes no sense, which is a bug of this library.
        """
        if target is self.training_state:
            return
        if target not in _LEGAL[self.training_state]:
            raise RuntimeError(
                f"unit '{self.name}' can't go from {self.training_state.name} to {target.name}; "
                "please report this"
            )
        self.training_state = target

    def describe_options(self) -> str:
        """Return the options that all ranks must agree on."""
        return f"in unit '{self.name}' reshard_after_forward={self.reshard_after_forward}"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process or to a running step, for copies and pickles."""
        state = dict(self.__dict__)
        for name in ("context", "ref", "forward_order"):
            del state[name]
        state.update(
            training_state=TrainingState.IDLE,
            depth=0,
            forward_index=-1,
            is_held=False,
            is_in_pass=False,
            modules_to_run=self.num_modules,
        )
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.forward_order = ExecutionOrder()
        self.context = None
        self.ref = weakref.ref(self)


class ExecutionOrder:
    """Remember the order in which units ran last time, to know which one comes next.

    Holds weak references, so that a deleted module is freed at once. Grows with one call only.
    """

    def __init__(self) -> None:
        self._previous: list[StateRef] = []
        self._current: list[StateRef] = []
        self._is_as_before = True

    def begin(self) -> None:
        """Start a new sequence."""
        self._current = []
        self._is_as_before = True

    def advance(self, unit: StateRef) -> ShardState | None:
        """Note that `unit` runs now and return the one expected after it, if the order held."""
        position = len(self._current)
        self._current.append(unit)
        previous = self._previous
        if not self._is_as_before or position >= len(previous) or previous[position] is not unit:
            self._is_as_before = False
            return None
        return previous[position + 1]() if position + 1 < len(previous) else None

    def end(self) -> None:
        """Make the sequence that just ended the expectation for the next one."""
        self._previous, self._current = self._current, []


class TreeContext:
    """What the units of one tree share: who leads the running call, and the running backward.

    The outermost sharded module of a call leads it. No unit is a root for good: calling an inner
    module first changes nothing later.

    Attributes:
        modules: Weak references to the outermost modules.
        states: The units, outermost first.
        leader: The unit that leads the running call, if one runs.
        armed: Units whose outputs wait for a backward, in the order of their last forward.
        backward: Weak reference to the running backward pass; dead if that was aborted.
        num_forwards: Number of the next call of a unit.
        call_start: Number with which the last call that led the tree began.
        spans_calls: The last backward reached an earlier one too: so may the next.
        reaches_earlier_call: This backward does.
        open_handles: What the running backward needs: (position, unit, handle), in the order in
            which they end.
        reduced: Handles that were reduced in this backward.
        in_flight: Handles whose reduction was issued and not finished.
        output_sequence_nr: Number of the next autograd node when a unit last returned.
        accumulates: This backward accumulates gradients of parameters.
        prefetched: The unit whose gather was issued ahead, until it runs.
        keeps_unsharded: A backward with create_graph ran: its graph reads the full parameters, so
            nothing is freed before the next forward.
    """

    def __init__(
        self, modules: list[nn.Module], states: list[ShardState], device: torch.device
    ) -> None:
        self.modules = [weakref.ref(module) for module in modules]
        self.states: list[StateRef] = [state.ref for state in states]
        self.has_groups = any(state.num_modules > 1 for state in states)
        self.leader: StateRef | None = None
        self.num_forwards = 0
        self.call_start = 0
        self.spans_calls = False
        self.reaches_earlier_call = False
        self.armed: dict[StateRef, None] = {}
        self.backward: weakref.ref[Any] | None = None
        self.graph_task_id = -1  # autograd's number of the running backward
        self.next_in_backward: dict[StateRef, StateRef] = {}
        self.open_handles: list[tuple[int, ShardState, FlatParamHandle]] = []
        self.reduced: dict[FlatParamHandle, None] = {}
        self.in_flight: list[FlatParamHandle] = []
        self.prefetched: ShardState | None = None
        self.keeps_unsharded = False
        self.accumulates = False
        self.output_sequence_nr = 0
        self.is_checked = False
        self.streams = _make_streams(device)

    def live_modules(self) -> list[nn.Module]:
        """Return the outermost modules that still exist."""
        return [module for ref in self.modules if (module := ref()) is not None]

    def live_states(self) -> list[ShardState]:
        """Return the units that still exist."""
        return [state for ref in self.states if (state := ref()) is not None]


def _make_streams(device: torch.device) -> Streams | None:
    if device.type in ("cpu", "meta"):
        return None
    return Streams(torch.Stream(device, priority=-1), torch.Stream(device, priority=-1))
