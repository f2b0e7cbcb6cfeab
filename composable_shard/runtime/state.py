"""`ShardState`: what `fully_shard` attaches to a module, and what a tree of them shares.

`replicate`, `checkpoint` and torch's `fully_shard` look there too, so each sees the others. The
state itself has a key of its own: torch's is random in each process and would not survive a pickle.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum, auto
from typing import Any, Generic, TypeVar
from weakref import ref

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

from composable_shard.comm import UseExchange, make_streams
from composable_shard.flat_param import FlatParamHandle, FullParams, ScratchPool
from composable_shard.options import UnitOptions
from composable_shard.runtime.buckets import Buckets
from composable_shard.runtime.buffers import BufferBroadcast

__all__ = [
    "ExecutionOrder",
    "ShardState",
    "TrainingState",
    "TreeContext",
    "attach_state",
    "find_applied",
    "read_state",
]


_API_NAME = "fully_shard"
_STATE_KEY = "_composable_shard_state"


def read_state(module: nn.Module) -> Any | None:
    """Return the state attached to `module` itself, or None; writes nothing."""
    return module.__dict__.get(_STATE_KEY)


def attach_state(module: nn.Module, state: Any) -> None:
    """Attach `state` to `module`. Nothing in it can fail, so it is the last thing a call does."""
    module.__dict__[_STATE_KEY] = state
    module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())[_API_NAME] = RegistryItem()


def find_applied(module: nn.Module) -> str | None:
    """Return the name of a composable API applied to `module` that excludes ours, or None."""
    registry = module.__dict__.get(REGISTRY_KEY, {})
    return next((name for name in (_API_NAME, "replicate") if name in registry), None)


Unit = TypeVar("Unit")


class ExecutionOrder(Generic[Unit]):
    """Remember the order in which units ran last time, to know which one comes next.

    Holds weak references, so that a deleted module is freed at once. Grows with one call only.
    """

    def __init__(self) -> None:
        self._previous: list[ref[Unit]] = []
        self._current: list[ref[Unit]] = []
        self._is_as_before = True

    def begin(self) -> None:
        """Start a new sequence."""
        self._current = []
        self._is_as_before = True

    def advance(self, unit: ref[Unit]) -> Iterator[Unit]:
        """Note that `unit` runs now; yield the ones expected after it, if the order held.

        Where a unit runs several times in a row, for each of its modules, only the first time.
        """
        if self._current and self._current[-1] is unit:
            return iter(())
        position = len(self._current)
        self._current.append(unit)
        previous = self._previous
        if not self._is_as_before or position >= len(previous) or previous[position] is not unit:
            self._is_as_before = False
            return iter(())
        return self._expected(position + 1)

    def end(self) -> None:
        """Make the sequence that just ended the expectation for the next one."""
        self._previous, self._current = self._current, []

    def _expected(self, position: int) -> Iterator[Unit]:
        while position < len(self._previous) and (unit := self._previous[position]()) is not None:
            yield unit
            position += 1


class TrainingState(Enum):
    """What a unit is doing."""

    __hash__ = object.__hash__  # that of Enum is a Python function

    IDLE = auto()
    # Between the pre-forward and the post-forward of its module.
    FORWARD = auto()
    # From the first gradient of one of its outputs to the last gradient of its parameters.
    PRE_BACKWARD = auto()
    # From there to the end of the backward pass.
    POST_BACKWARD = auto()
    # Inside unshard_params.
    UNSHARDED_PARAMS = auto()


_LEGAL = {
    TrainingState.IDLE: {
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
        options: What the user asked for.
        handles: Handles of the parameters this unit manages.
        borrowed: Handles of other units whose parameters this unit shows too (tied weights); it
            gathers them for its own forward and backward, their owner reduces them.
        needed: Both: those whose full parameters it computes with.
        reshard_after_forward: That of the options, or what was set since. True frees the full
            parameters between forward and backward, False keeps them, None keeps them only where
            this unit leads the call, and a number n keeps 1/n of them.
        forward_prefetch: Units to gather when its forward begins; None: the one that is expected.
        backward_prefetch: Likewise for its backward.
        buffers: Broadcasts its buffers before forwards, on request.
        buckets: Decides which of them are reduced before the unit's end, if any may.
        requires_gradient_sync: False leaves gradients unsharded and unreduced.
        full_params: What `unshard_params` shows of its handles on this rank, inside the scope.
        requires_all_reduce: False reduces gradients over the shard group only.
        is_last_backward: False tells that another backward comes before the step.
        depth: How many calls of its modules are running.
        call_number: Number of its last call in the tree.
        forward_index: Number of its first call that the next backward may reach, -1 before it.
        may_recompute: A backward nested in the next one may run its forward again.
        is_checkpointed: A backward itself may, as in non-reentrant checkpointing.
        is_recomputed: The running backward has.
        forward_order: The units that ran in the calls this unit led.
    """

    def __init__(self, name: str, options: UnitOptions, num_modules: int) -> None:
        self.name = name
        self.options = options
        self.handles: list[FlatParamHandle] = []
        self.borrowed: list[FlatParamHandle] = []
        self.needed = self.handles
        self.reshard_after_forward = options.reshard_after_forward
        self.buffers: BufferBroadcast | None = None
        self.buckets: Buckets | None = None
        self.num_modules = num_modules
        self.modules_to_run = num_modules
        self.training_state = TrainingState.IDLE
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.is_last_backward = True
        self.forward_prefetch: tuple[StateRef, ...] | None = None
        self.backward_prefetch: tuple[StateRef, ...] | None = None
        self.is_held = False  # by unshard(), until reshard()
        self.is_in_pass = False  # its modules' forwards hold the full parameters
        self.full_params: dict[FlatParamHandle, FullParams] = {}
        self.depth = 0
        self.call_number = -1
        self.last_call = -1  # `context.num_calls` when that call, or one without graph, began
        self.call_sequence_nr = 0  # of the next autograd node when that call began
        self.forward_index = -1
        self.may_recompute = False
        self.is_checkpointed = self.is_recomputed = False
        self.forward_order: ExecutionOrder[ShardState] = ExecutionOrder()
        self.context: TreeContext | None = None
        # The missing keys of the last load_state_dict, and the modules that it has been through.
        self.load_call: tuple[list[str], frozenset[int]] | None = None
        self.ref: StateRef = weakref.ref(self)

    @property
    def puts_nothing_off(self) -> bool:
        """Whether a backward reduces gradients as far as they are ever reduced."""
        return self.requires_gradient_sync and self.requires_all_reduce and self.is_last_backward

    def reduces(self, handle: FlatParamHandle) -> bool:
        """Return whether a backward reduces the gradients of the handle, or leaves them unsharded.

        A buffer that holds them unsharded anyway is reduced once, when nothing is put off.
        """
        if not handle.grad.is_persistent:
            return self.requires_gradient_sync
        return self.puts_nothing_off

    def has_issued(self, handle: FlatParamHandle) -> bool:
        """Return whether the running backward reduces a bucket of the unit already."""
        return self.buckets is not None and self.buckets.is_issued(handle)

    def defers_all_reduce(self, handle: FlatParamHandle) -> bool:
        """Return whether a reduction over the shard group leaves out the copies of the shard."""
        is_due = self.requires_all_reduce and self.is_last_backward
        return not is_due and bool(handle.shard_group.replicate_groups)

    @property
    def is_in_scope(self) -> bool:
        """Whether `unshard_params` shows any of its handles, perhaps for a unit it borrows from."""
        return any([handle.is_in_scope for handle in self.needed])

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
        text = (
            f"in unit '{self.name}' strategy={self.options.strategy.name} "
            f"reshard_after_forward={self.reshard_after_forward}{self.options.describe()}"
        )
        if self.handles and (hook_name := self.handles[0].grad.reduction.hook_name):
            text += f" comm_hook={hook_name}"
        return text

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process or to a running step, for copies and pickles."""
        state = dict(self.__dict__)
        for name in ("context", "ref", "forward_order"):
            del state[name]
        state.update(
            training_state=TrainingState.IDLE,
            full_params={},
            load_call=None,
            depth=0,
            forward_index=-1,
            may_recompute=False,
            is_checkpointed=False,
            is_recomputed=False,
            is_held=False,
            is_in_pass=False,
            modules_to_run=self.num_modules,
            # They would lead to the units of the original.
            forward_prefetch=None,
            backward_prefetch=None,
        )
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.forward_order = ExecutionOrder()
        self.context = None
        self.ref = weakref.ref(self)


class TreeContext:
    """What the units of one tree share: who leads the running call, and the running backward.

    The outermost sharded module of a call leads it. No unit is a root for good: calling an inner
    module first changes nothing later.

    Attributes:
        modules: Weak references to the outermost modules.
        states: The units, outermost first.
        leader: The unit that leads the running call, if one runs.
        entered: Units whose forward runs, or whose full parameters it left claimed.
        call: Another object for each such call.
        armed: Units whose outputs wait for a backward, in the order of their last forward.
        backward: Weak reference to the running backward pass; dead if that was aborted.
        num_forwards: Number of the next call of a unit that records a graph.
        num_calls: How many calls of units have begun.
        call_start: Number with which the last call that led the tree began.
        spans_calls: The last backward reached an earlier one too: so may the next.
        reaches_earlier_call: This backward does.
        open_handles: What the running backward needs: (position, unit, handle), in the order in
            which they end.
        reduced: Handles that were reduced in this backward.
        in_flight: Handles whose reduction was issued and not finished.
        exchanges: Those in flight, of what this backward did with parameters.
        early: Handles with hooks whose reduction was issued, see [Note: Early gradients].
        ready: Those whose gradients are final, with their parameters' use.
        delivered: Those whose hooks have run, with `guard.num_writes` before that.
        hook_error: What a hook raised.
        is_ending: Autograd has run all of this backward.
        output_sequence_nr: Number of the next autograd node when a unit last returned.
        has_agreed: The ranks shard the same model in the same way.
        is_checked: And its buffers have been initialised, so calls need no check any more.
        has_warned_of_host_memory: Every rank was about to hold the whole tree in host memory.
        accumulates: This backward accumulates gradients of parameters.
        is_sure_to_reduce: All ranks know that some rank does.
        prefetched: The units whose gathers were issued ahead, until they run; True for those that
            the user chose.
        scratch: Memory that the reductions share.
        keeps_unsharded: A backward with create_graph ran: its graph reads the full parameters, so
            nothing is freed before the next forward.
    """

    def __init__(
        self, modules: list[nn.Module], states: list[ShardState], device: torch.device
    ) -> None:
        self.modules = [weakref.ref(module) for module in modules]
        self.states: list[StateRef] = [state.ref for state in states]
        self.leader: StateRef | None = None
        self.entered = {state.ref: None for state in states if state.depth or state.is_in_pass}
        self.call = object()
        self.num_forwards = 0
        self.num_calls = 0
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
        self.exchanges: list[UseExchange] = []
        self.early: dict[FlatParamHandle, UseExchange] = {}
        self.ready: list[tuple[FlatParamHandle, list[bool]]] = []
        self.delivered: dict[FlatParamHandle, int] = {}
        self.hook_error: BaseException | None = None
        self.is_ending = False
        self.prefetched: dict[ShardState, bool] = {}
        self._owners: dict[int, StateRef] | None = None  # by id of a handle that is alive
        self.keeps_unsharded = False
        self.accumulates = False
        self.is_sure_to_reduce = False
        self.output_sequence_nr = 0
        self.has_agreed = False
        self.is_checked = False
        self.has_warned_of_host_memory = False
        self.streams = make_streams(device)
        self.scratch = ScratchPool()
        _trees.add(self)

    def find_buckets(self) -> dict[FlatParamHandle, ShardState]:
        """Return the handles that may be reduced before their unit's end, each with its unit."""
        return {
            handle: state
            for state in self.live_states()
            if state.buckets is not None
            for handle in state.handles
            if state.reduces(handle)
        }

    def owner_of(self, handle: FlatParamHandle) -> ShardState | None:
        """Return the unit of a handle that another unit borrows, if it still exists."""
        if self._owners is None:
            self._owners = {id(h): state.ref for state in self.live_states() for h in state.handles}
        owner_ref = self._owners.get(id(handle))
        return None if owner_ref is None else owner_ref()

    def is_only_one_armed(self) -> bool:
        """Return whether no unit of another tree waits for a backward, perhaps the same one."""
        return not any(other.armed for other in _trees if other is not self)

    def entered_states(self) -> list[ShardState]:
        """Return the units in `entered` that still exist."""
        return [state for ref in self.entered if (state := ref()) is not None]

    def live_modules(self) -> list[nn.Module]:
        """Return the outermost modules that still exist."""
        return [module for ref in self.modules if (module := ref()) is not None]

    def live_states(self) -> list[ShardState]:
        """Return the units that still exist."""
        return [state for ref in self.states if (state := ref()) is not None]


_trees: weakref.WeakSet[TreeContext] = weakref.WeakSet()  # of this process
