"""`ShardState` (one unit) and `TreeContext` (the state that the units of a tree share).

A `BackwardPass` holds the state of one backward, a `ForwardCall` the state of one call of a tree.
Both are dropped at its end, so no field is reset by hand.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from itertools import islice
from typing import Any

import torch
from torch import nn

from composable_shard.comm import FlagReduction, make_streams
from composable_shard.flat_param import (
    FlatParamHandle,
    ScopeParams,
    ScratchPool,
    Slot,
)
from composable_shard.options import UnitOptions
from composable_shard.runtime.casts import BufferBroadcast
from composable_shard.runtime.reduction_order import ReductionOrder
from composable_shard.runtime.saved_values import KnownForwards
from composable_shard.torch_private import backward_hooks_of


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
_LEGAL = {
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

StateRef = weakref.ref["ShardState"]


class ShardState:
    """One unit: its handles, its options, and its phase in a step.

    Attributes:
        name: FQN of the unit's module, as seen from the outermost sharded module so far.
        options: The options that the user passed.
        handles: Handles of the parameters this unit manages.
        borrowed: Handles of other units whose parameters this unit shows too (tied weights); it
            gathers them for its own forward and backward, their owner reduces their gradients.
        ignored: Places of parameters of its modules that were left out on purpose.
        needed: handles + borrowed: all handles whose full parameters this unit computes with.
        reshard_after_forward: The option's value, or the value set since. True frees the full
            parameters between forward and backward, False keeps them, None keeps them only where
            this unit leads the call, and a number n keeps 1/n of them.
        forward_prefetch: Units to gather when its forward begins; None: the units expected next.
        backward_prefetch: Units to gather when its backward begins; None: the units expected next.
        buffers: Broadcasts its buffers before forwards; None if not requested.
        has_buckets: Its handles are buckets, which may be reduced before its end.
        backward_hooks: Users' hooks on its modules and on modules inside. They may read and write
            full parameters whose gradients have already arrived.
        requires_gradient_sync: False leaves gradients unsharded and unreduced.
        requires_all_reduce: False reduces gradients over the shard group only.
        is_last_backward: False: another backward comes before the step.
        full_params: Full parameters that `unshard_params` shows on this rank; empty outside it.
        depth: Number of running calls of its modules.
        is_held: `unshard` claims its full parameters, until `reshard`.
        is_in_pass: A forward of its modules claims its full parameters.
        last_call: Number of its last call, counted over all units of the process.
        call_number: Number of its last graph-recording call; `call_end`: of the first after it.
        call_sequence_nr: Number of the next autograd node when call `call_number` began.
        is_checkpointed: Non-reentrant checkpointing may run call `call_number` again.
        known_forwards: Record of forwards whose saved tensors were inspected, [Note: Aliases].
        reads_nothing: The user promised that no backward reads its full parameters.
        runs_backwards: A node of its graph runs a nested backward, as reentrant checkpoints do.
        forward_order: The units in the order of the last call that this unit led.
        load_call: Missing keys and prefix of the last load_state_dict, from `note_load`.
    """

    def __init__(
        self,
        options: UnitOptions,
        modules: Sequence[nn.Module],
        handles: list[FlatParamHandle],
        borrowed: list[FlatParamHandle],
        *,
        has_buckets: bool,
        buffers: BufferBroadcast | None,
    ) -> None:
        self.name = type(modules[0]).__name__
        self.options = options
        self.handles = handles
        self.borrowed = borrowed
        self.needed = handles + borrowed
        self.ignored: list[Slot] = []
        self.reshard_after_forward = options.reshard_after_forward
        self.buffers = buffers
        self.has_buckets = has_buckets
        parts = [part for module in modules for part in module.modules()]
        self.backward_hooks = [hooks for part in parts for hooks in backward_hooks_of(part)]
        self.num_modules = self.modules_to_run = len(modules)
        self.training_state = TrainingState.IDLE
        self.requires_gradient_sync = self.requires_all_reduce = self.is_last_backward = True
        self.forward_prefetch: tuple[StateRef, ...] | None = None
        self.backward_prefetch: tuple[StateRef, ...] | None = None
        self.is_held = self.is_in_pass = False
        self.full_params: dict[FlatParamHandle, ScopeParams] = {}
        self.depth = 0
        self.last_call = self.call_number = self.call_end = -1
        self.call_sequence_nr = 0
        self.is_checkpointed = False
        self.known_forwards = KnownForwards()
        self.reads_nothing = self.runs_backwards = False
        self.forward_order: list[StateRef] = []
        self.context: TreeContext | None = None
        self.load_call: tuple[list[str], str] | None = None
        self.ref: StateRef = weakref.ref(self)

    def __repr__(self) -> str:
        kind, number = self.options.strategy.name, len(self.handles)
        return f"<ShardState '{self.name}': {kind}, {number} handles, {self.training_state.name}>"

    @property
    def reduces_fully(self) -> bool:
        """Whether a backward reduces gradients completely, over all ranks."""
        return self.requires_gradient_sync and self.requires_all_reduce and self.is_last_backward

    @property
    def is_in_scope(self) -> bool:
        """Whether `unshard_params` shows any of its handles, borrowed ones included."""
        return any([handle.shown.is_in_scope for handle in self.needed])

    def change(self, setting: str, value: object) -> None:
        """Change a setting: what backwards reduce or read, or which units are gathered ahead."""
        setattr(self, setting, value)

    def in_tree(self, chosen: Sequence[StateRef]) -> list[ShardState]:
        """Return those of some units that are in this one's tree; others may be gone on a rank."""
        units = [unit for ref in chosen if (unit := ref()) is not None]
        return [unit for unit in units if unit.context is self.context]

    def leave_out(self, ignored: list[Slot]) -> None:
        """Note the places of parameters of its modules that were left out on purpose."""
        self.ignored = ignored

    def hold(self) -> None:
        """Claim the full parameters until `let_go`, for `unshard`."""
        for handle in self.needed:
            handle.full.claims.add(("held", self.ref))
        self.is_held = True

    def let_go(self) -> None:
        """Give up the claim of `hold`, if there is one; frees nothing."""
        if not self.is_held:
            return
        for handle in self.needed:
            handle.full.claims.discard(("held", self.ref))
        self.is_held = False
        for handle in self.needed:
            if not handle.full.claims:
                handle.take_back("between unshard and reshard")

    def enter_scope(self, full_params: dict[FlatParamHandle, ScopeParams]) -> None:
        """Note that `unshard_params` shows these full parameters."""
        self.transition(TrainingState.UNSHARDED_PARAMS)
        self.full_params = full_params

    def leave_scope(self) -> None:
        """Note that `unshard_params` no longer shows parameters of the unit."""
        self.full_params = {}
        if self.training_state is TrainingState.UNSHARDED_PARAMS:
            self.transition(TrainingState.IDLE)

    def note_load(self, missing_keys: list[str], prefix: str) -> None:
        """Note a load_state_dict: its missing keys, and the prefix below which all is loaded."""
        self.load_call = missing_keys, prefix

    def transition(self, target: TrainingState) -> None:
        """Change the training state.

        Raises:
            RuntimeError: If the transition is illegal, which is a bug of this library.
        """
        if target is self.training_state:
            return
        if target not in _LEGAL[self.training_state]:
            raise RuntimeError(
                f"unit '{self.name}' can't go from {self.training_state.name} to {target.name}; "
                "please report this"
            )
        self.training_state = target

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the state of this process and of a running step, for copies and pickles."""
        state = {**self.__dict__, "known_forwards": KnownForwards()}
        for name in ("context", "ref", "forward_order"):
            del state[name]
        state.update(
            training_state=TrainingState.IDLE,
            full_params={},
            load_call=None,
            depth=0,
            is_held=False,
            is_in_pass=False,
            modules_to_run=self.num_modules,
            # These refer to units of the original.
            forward_prefetch=None,
            backward_prefetch=None,
        )
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.forward_order = []
        self.context = None
        self.ref = weakref.ref(self)


class ForwardCall:
    """One call of a tree, from the pre-forward of the unit that leads it to its post-forward.

    Attributes:
        leader: The outermost unit that this call runs.
        order: The units that have run, in order; weakly, so that a deleted module is freed at once.
        last_order: The units of the leader's last call, while `order` is as it was; then empty.
        output_sequence_nr: Number of the next autograd node when a unit last returned.
        prefetched: Units that were gathered ahead and have not run; True if the user chose the
            unit.
        broadcast: Units that have broadcast their buffers in this call, if due.
        innermost: `CallReached` of the innermost running call that records a graph, or None.
    """

    __slots__ = (
        *("broadcast", "innermost", "last_order", "leader"),
        *("order", "output_sequence_nr", "prefetched"),
    )

    def __init__(self, leader: ShardState) -> None:
        self.leader = leader.ref
        self.order: list[StateRef] = []
        self.last_order = leader.forward_order
        self.output_sequence_nr = 0
        self.prefetched: dict[ShardState, bool] = {}
        self.broadcast: set[ShardState] = set()
        self.innermost: Any = None  # its module is above this one

    def advance(self, unit: StateRef) -> Iterator[ShardState | None]:
        """Note that a unit runs now; return the units expected after it, if the order held.

        None stands for a deleted unit. A unit that runs several times in a row, for each of its
        modules, counts once.
        """
        if self.order and self.order[-1] is unit:
            return iter(())
        position = len(self.order)
        self.order.append(unit)
        if position >= len(self.last_order) or self.last_order[position] is not unit:
            self.last_order = []
        return map(weakref.ref.__call__, islice(self.last_order, position + 1, None))


class TreeContext:
    """The state that the units of one tree share and that outlives a call and a backward.

    The outermost sharded module of a call leads it. No unit is the root permanently: calling an
    inner module first has no later effect.

    Attributes:
        modules: Weak references to the outermost modules.
        around: Weak references to the outermost callers that first ran these, sharded or not.
        states: The units, outermost first.
        device: Device on which the units compute.
        call: The running call, or one that an exception has interrupted.
        entered: Units whose forward is running, or left their full parameters claimed.
        num_forwards: Number that the next graph-recording call of a unit gets.
        call_start: `num_forwards` when the tree's last graph-recording call began.
        open_calls: Number of graph-recording calls since a backward; `most_open_calls`: maximum.
        spans_calls: The last backward also reached an earlier call, so the next one may too.
        first_calls: Number of each unit's first call that the next backward may reach.
        armed: Units whose outputs wait for a backward, in the order of their last forward.
        may_recompute: Units whose forward may run again in a nested backward (reentrant
            checkpoints); `has_regions`: such units have existed.
        has_changed: The next call must rebuild the tree, [Note: Units that are taken out].
        backward: The running `BackwardPass` or None; untyped, because its module imports this one.
        last_backward_id: Number of the last backward; `probed_backward_id`: of the last empty one.
        has_aborted: The gradients of an aborted backward are not dropped yet.
        flag_reductions: Flag reductions that a backward issued and may not have waited for.
        has_agreed: The ranks have compared their models and options, and they are equal.
        is_checked: Lazy init is complete (also buffers are initialised), so calls skip it.
        streams: Side streams of an accelerator; `scratch`: memory that the reductions share.
        reduction_order: Agreed order of handles with persistent gradients; None without any.
    """

    def __init__(
        self, modules: list[nn.Module], states: list[ShardState], device: torch.device
    ) -> None:
        self.modules = [weakref.ref(module) for module in modules]
        self.around: dict[weakref.ref[nn.Module], None] = {}
        self.states: list[StateRef] = [state.ref for state in states]
        self.device = device
        self.call: ForwardCall | None = None
        self.entered = {state.ref: None for state in states if state.depth or state.is_in_pass}
        self.num_forwards = 0
        self.call_start, self.open_calls, self.most_open_calls = 0, 0, 1
        self.first_calls: dict[StateRef, int] = {}
        self.armed: dict[StateRef, None] = {}
        self.may_recompute: set[StateRef] = set()
        self.backward: Any = None
        self.last_backward_id = self.probed_backward_id = -1
        self.has_aborted = self.spans_calls = self.has_regions = self.has_changed = False
        self.flag_reductions: list[FlagReduction] = []
        self._has_warned_of_host_memory = False
        self.has_agreed = self.is_checked = False
        self.streams = make_streams(device)
        self.scratch = ScratchPool()
        self.reduction_order: ReductionOrder | None = None
        self._owners: dict[int, StateRef] | None = None  # by id of a handle that is alive
        trees.add(self)

    def owner_of(self, handle: FlatParamHandle) -> ShardState | None:
        """Return the unit of a handle that another unit borrows, if it still exists."""
        if self._owners is None:
            self._owners = {id(h): state.ref for state in self.live_states() for h in state.handles}
        owner_ref = self._owners.get(id(handle))
        return None if owner_ref is None else owner_ref()

    def take_over(self, other: TreeContext) -> None:
        """Move the units of another tree, which is idle and has no graph, into this one."""
        for state in other.live_states():
            state.context = self
        self.modules = [ref for ref in self.modules + other.modules if ref() is not None]
        self.states = [ref for ref in self.states + other.states if ref() is not None]
        self.around |= other.around
        other.modules, other.states, other.last_backward_id = [], [], -1
        self.has_agreed = self.has_agreed and other.has_agreed
        self.is_checked = self.is_checked and other.is_checked
        self.reduction_order = self.reduction_order or other.reduction_order
        self._owners = None

    def follow(self, other: TreeContext, armed: list[StateRef], *, are_known: bool) -> None:
        """Replace another tree, whose modules this one now has, and take over its state.

        Args:
            other: The tree to replace.
            armed: Units of `other` whose outputs wait for a backward.
            are_known: All units have been compared with the other ranks'.
        """
        other.modules, other.has_changed = [], False
        self.around, self.has_regions = dict(other.around), other.has_regions
        if are_known:
            self.has_agreed = self.is_checked = True
            self.reduction_order = other.reduction_order and ReductionOrder()
        own = set(self.states)
        self.armed = {each: None for each in armed if each in own}
        self.first_calls = dict(other.first_calls)
        self.num_forwards = other.num_forwards
        self.call_start, self.spans_calls = other.call_start, other.spans_calls
        self.last_backward_id = other.last_backward_id
        self.may_recompute = other.may_recompute & own
        for state in self.live_states():
            state.forward_order = []

    def give_up(self, states: Sequence[ShardState]) -> None:
        """Remove units that get another context."""
        gone = {state.ref for state in states}
        self.states = [ref for ref in self.states if ref not in gone]
        for each in gone:
            self.armed.pop(each, None)
            self.entered.pop(each, None)
        self._owners = None

    def entered_states(self) -> list[ShardState]:
        """Return the units in `entered` that still exist."""
        return [state for ref in self.entered if (state := ref()) is not None]

    def live_modules(self) -> list[nn.Module]:
        """Return the outermost modules that still exist."""
        return [module for ref in self.modules if (module := ref()) is not None]

    def watched_modules(self) -> list[nn.Module]:
        """Return the modules in which a call looks for new contents and for units taken out."""
        refs = dict.fromkeys([*self.around, *self.modules])
        return [module for ref in refs if (module := ref()) is not None]

    def live_states(self) -> list[ShardState]:
        """Return the units that still exist."""
        return [state for ref in self.states if (state := ref()) is not None]

    def live_handles(self) -> list[FlatParamHandle]:
        """Return the handles of the units that still exist."""
        return [handle for state in self.live_states() for handle in state.handles]

    def forget_graphs(self) -> None:
        """Note that the graphs of all calls so far were used up or dropped."""
        self.armed.clear()
        self.first_calls.clear()

    @property
    def serves_graphs(self) -> bool:
        """Whether full values are kept for graphs whose backward no hook announces."""
        return any(handle.full.serves_graphs for handle in self.live_handles())

    def warns_of_host_memory(self) -> bool:
        """Return True the first time only, for a warning that is given once."""
        has_warned, self._has_warned_of_host_memory = self._has_warned_of_host_memory, True
        return not has_warned


num_calls = [0]  # calls of units begun in this process; counts all trees, as one may call another
trees: weakref.WeakSet[TreeContext] = weakref.WeakSet()  # all trees of this process
