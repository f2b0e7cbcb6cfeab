"""`ShardState` (one unit) and `TreeContext` (the state that the units of a tree share)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn

from composable_shard.comm import FlagReduction, ShardGroup, make_streams
from composable_shard.flat_param import GRAPH, HELD, FlatParamHandle, ScratchPool, Slot
from composable_shard.options import UnitOptions, UnitSettings
from composable_shard.runtime.forward_call import ForwardCall
from composable_shard.runtime.open_graphs import OpenGraphs, UnitCall, alive
from composable_shard.runtime.saved_values import Inspection
from composable_shard.runtime.training_state import MOVES, TrainingState
from composable_shard.torch_private import backward_hooks_of

StateRef = weakref.ref["ShardState"]
# Returns the classes of the orders that a unit with these settings needs, besides the default.
OrderChoice = Callable[["ShardState", UnitSettings], Iterable[Any]]


def _no_orders(state: ShardState, settings: UnitSettings) -> Iterable[Any]:
    return ()  # before the ranks are compared


class BeforeForward(Protocol):
    """What an option lets a unit do before a forward, once in a call of its tree.

    Attributes:
        shard_group: The ranks that do it together.
    """

    shard_group: ShardGroup

    def describe(self) -> list[str]:
        """Return lines with all that these ranks must agree on."""
        ...

    def run(self, *, is_followed: bool) -> None:
        """Do it; `is_followed`: the forward is one of training whose gradients are reduced."""
        ...


class ShardState:
    """One unit: its handles, its options, and its phase in a step.

    Attributes:
        name: FQN of the unit's module, as seen from the outermost sharded module so far.
        options: The options that the user passed.
        handles: Handles of the parameters this unit manages.
        borrowed: Handles of other units whose parameters this unit shows too (tied weights); it
            gathers them for its own forward and backward, their owner reduces their gradients.
        ignored: Places of parameters of its modules that were left out on purpose.
        needed_handles: handles + borrowed: those whose full parameters this unit computes with.
        settings: What the setters have changed.
        before_forward: What an option lets it do before its forwards, if any does.
        order_kinds: Classes of the orders that its handles may have in a backward, besides the
            default: under `FULL_SHARD` without options none. Chosen when the ranks are compared;
            untyped: their modules import this one.
        depth: Number of running calls of its modules.
        is_in_pass: A forward of its modules claims its full parameters.
        last_call: Its last graph-recording call.
        inspection: What is known of reads of its full parameters, [Note: Aliases].
        forward_order: The units in the order of the last call that this unit led.
        load_call: Missing keys and prefix of the last load_state_dict, from `set_load_call`.
    """

    def __init__(
        self,
        options: UnitOptions,
        modules: Sequence[nn.Module],
        handles: list[FlatParamHandle],
        borrowed: list[FlatParamHandle],
        *,
        before_forward: BeforeForward | None,
        inside: Iterable[nn.Module],
    ) -> None:
        self.name = type(modules[0]).__name__
        self.options = options
        self.handles = handles
        self.borrowed = borrowed
        self.needed_handles = handles + borrowed
        self.ignored: list[Slot] = []
        self.settings = UnitSettings()
        self.order_kinds: tuple[Any, ...] = ()
        self._find_orders: OrderChoice = _no_orders
        # Where the strategy frees parameters, `ReshardPolicy.apply` follows, of what was planned.
        self.change(reshard_after_forward=options.reshard_after_forward)
        self.before_forward = before_forward
        self.inspection = Inspection(list(chain.from_iterable(map(backward_hooks_of, inside))))
        self.num_modules = self.modules_to_run = len(modules)
        self.training_state = TrainingState.IDLE
        self.is_in_pass = False
        self.depth = 0
        self.last_call = UnitCall()
        self.forward_order: list[StateRef] = []
        self.context: TreeContext | None = None
        self.load_call: tuple[list[str], str] | None = None
        self.ref: StateRef = weakref.ref(self)

    def __repr__(self) -> str:
        kind, number = self.options.strategy.name, len(self.handles)
        return f"<ShardState '{self.name}': {kind}, {number} handles, {self.training_state.name}>"

    @property
    def is_held(self) -> bool:
        """Whether `unshard` claims its full parameters, until `reshard`."""
        return all(
            [(HELD, self.ref) in handle.full.readers.claims for handle in self.needed_handles]
        )

    def change(self, **settings: Any) -> None:
        """Change some of the unit's `settings`, and those of its handles with them."""
        changed = replace(self.settings, **settings)
        # Orders first, and none leaves: an interrupt leaves the unit with one more than it needs.
        for kind in self._find_orders(self, changed):
            self.add_order(kind)
        self.settings = changed
        for handle in self.handles:
            handle.take_settings(self.settings)

    def choose_orders(self, choice: OrderChoice) -> None:
        """Choose which orders its handles may have in a backward, now and when settings change."""
        self._find_orders = choice
        self.order_kinds = tuple(choice(self, self.settings))

    def add_order(self, kind: Any) -> None:
        """Let its handles have one more order in the backwards that begin from now on."""
        if kind not in self.order_kinds:
            self.order_kinds = (*self.order_kinds, kind)

    def in_tree(self, chosen: Sequence[StateRef]) -> list[ShardState]:
        """Return those of some units that are in this one's tree; others may be gone on a rank."""
        return [unit for unit in alive(chosen) if unit.context is self.context]

    def leave_out(self, ignored: list[Slot]) -> None:
        """Note the places of parameters of its modules that were left out on purpose."""
        self.ignored = ignored

    def hold(self) -> None:
        """Claim the full parameters until `let_go`, for `unshard`."""
        for handle in self.needed_handles:
            handle.full.readers.claims.add((HELD, self.ref))

    def let_go(self) -> None:
        """Give up the claim of `hold`, if there is one; frees nothing."""
        claim = HELD, self.ref
        held = [handle for handle in self.needed_handles if claim in handle.full.readers.claims]
        for handle in held:
            handle.full.readers.claims.discard(claim)
        for handle in held:
            if not handle.full.readers.claims:
                handle.adopt_shown_changes("between unshard and reshard")

    def set_load_call(self, missing_keys: list[str], prefix: str) -> None:
        """Note a load_state_dict: its missing keys, and the prefix below which all is loaded."""
        self.load_call = missing_keys, prefix

    def transition(self, target: TrainingState) -> None:
        """Change the training state.

        Raises:
            RuntimeError: If the transition is illegal, which is a bug of this library.
        """
        if target is self.training_state:
            return
        if target not in MOVES[self.training_state]:
            raise RuntimeError(
                f"unit '{self.name}' can't go from {self.training_state.name} to {target.name}; "
                "please report this"
            )
        self.training_state = target

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the state of this process and of a running step, for copies."""
        state = dict(self.__dict__)
        for name in ("context", "ref", "forward_order"):
            del state[name]
        state.update(
            training_state=TrainingState.IDLE,
            order_kinds=(),
            _find_orders=_no_orders,
            load_call=None,
            last_call=UnitCall(),
            depth=0,
            is_in_pass=False,
            modules_to_run=self.num_modules,
            settings=self.settings.of_copy(),
        )
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.forward_order = []
        self.context = None
        self.ref = weakref.ref(self)


class TreeContext:
    """The state that the units of one tree share and that outlives a call and a backward.

    The outermost sharded module of a call leads it. No unit is the root permanently: calling an
    inner module first has no later effect.

    Attributes:
        modules: Weak references to the outermost modules.
        callers: Weak references to the outermost modules, sharded or not, whose calls run these;
            each call checks them for added and removed modules.
        states: The units, outermost first.
        device: Device on which the units compute.
        call: The running call, or one that an exception has interrupted.
        entered: Units whose forward is running, or left their full parameters claimed.
        graphs: The calls that a backward may reach, by their numbers (open_graphs.py). Outputs of
            `armed` units wait for one; `first_calls` has the call with which each unit ends.
        has_changed: The next call must rebuild the tree, [Note: Units that are taken out].
        backward: The running `BackwardPass` or None; untyped, because its module imports this one.
        has_aborted: The gradients of an aborted backward are not dropped yet.
        flag_reductions: Flag reductions that a backward issued and may not have waited for.
        has_agreed: The ranks have compared their models and options, and they are equal.
        is_checked: Lazy init is complete (also buffers are initialised), so calls skip it.
        streams: Side streams of an accelerator; `scratch`: memory that the reductions share.
        keeps_gradients: Some handles' gradients lie in a persistent buffer.
        kept: What orders of reductions keep from one backward to the next, by their classes.
        gathers: The tree's `Gathers`; `make_queue`: the class of its queues of reductions. Both are
            chosen when the ranks are compared; untyped, because their modules import this one.
    """

    def __init__(
        self, modules: list[nn.Module], states: list[ShardState], device: torch.device
    ) -> None:
        self.modules = [weakref.ref(module) for module in modules]
        self.callers: dict[weakref.ref[nn.Module], None] = {}
        self.states: list[StateRef] = [state.ref for state in states]
        self.device = device
        self.call: ForwardCall[ShardState] | None = None
        self.entered = {state.ref: None for state in states if state.depth or state.is_in_pass}
        self.graphs: OpenGraphs[ShardState] = OpenGraphs()
        self.backward: Any = None
        self.has_aborted = self.has_changed = False
        self.flag_reductions: list[FlagReduction] = []
        self.has_agreed = self.is_checked = False
        self.streams = make_streams(device)
        self.scratch = ScratchPool()
        self.keeps_gradients = False
        self.kept: dict[type, Any] = {}
        self.gathers: Any = None
        self.make_queue: Any = None
        trees.add(self)

    def take_over(self, other: TreeContext) -> None:
        """Move the units of another tree, which is idle and has no graph, into this one.

        An interrupt leaves what the next call completes: until the modules are set, the units are
        not those of the modules, so the tree is rebuilt; the other tree has all of its own units
        until the end, so it joins again.
        """
        self.has_agreed = self.has_agreed and other.has_agreed
        self.is_checked = self.is_checked and other.is_checked
        if not self.keeps_gradients and (other.keeps_gradients or self.gathers is None):
            self.gathers, self.make_queue = other.gathers, other.make_queue
        self.keeps_gradients = self.keeps_gradients or other.keeps_gradients
        self.kept = {**other.kept, **self.kept}
        self.callers |= other.callers
        states = dict.fromkeys([*self.states, *other.states])
        self.states = [ref for ref in states if ref() is not None]
        for state in other.live_states():
            state.context = self
        modules = dict.fromkeys([*self.modules, *other.modules])
        self.modules = [ref for ref in modules if ref() is not None]
        other.modules, other.states, other.graphs = [], [], OpenGraphs()

    def follow(
        self, other: TreeContext, graphs: OpenGraphs[ShardState], *, are_known: bool
    ) -> None:
        """Replace another tree, whose modules this one now has, and take over its state.

        `graphs` are its graphs, from before it gave up units. With `are_known` all units have been
        compared with the other ranks'.
        """
        other.modules, other.has_changed = [], False
        self.callers = dict(other.callers)
        if are_known:
            self.has_agreed = self.is_checked = True
            self.keeps_gradients = other.keeps_gradients
            # Its own: several trees may follow one, and each notes how far its calls are.
            self.gathers, self.make_queue = type(other.gathers)(), other.make_queue
        own = set(self.states)
        self.graphs = graphs.within(own)
        for state in self.live_states():
            state.forward_order = []

    def remember(self) -> Callable[[], None]:
        """Return a function that undoes `give_up` and `take_over` here, before a call has begun."""
        attributes = vars(self).copy()
        attributes["graphs"] = self.graphs.within(self.states)
        attributes["entered"] = self.entered.copy()
        return partial(vars(self).update, attributes)

    def give_up(self, states: Sequence[ShardState]) -> None:
        """Remove units that get another context."""
        gone = {state.ref for state in states}
        self.states = [ref for ref in self.states if ref not in gone]
        for each in gone:
            self.graphs.armed.pop(each, None)
            self.entered.pop(each, None)

    def watched_modules(self) -> list[nn.Module]:
        """Return the modules in which a call looks for new contents and for units taken out."""
        return alive(dict.fromkeys([*self.callers, *self.modules]))

    def live_states(self) -> list[ShardState]:
        """Return the units that still exist."""
        return alive(self.states)

    def live_handles(self) -> list[FlatParamHandle]:
        """Return the handles of the units that still exist."""
        return [handle for state in self.live_states() for handle in state.handles]

    @property
    def serves_graphs(self) -> bool:
        """Whether full values are kept for graphs whose backward no hook announces."""
        return any(handle.full.readers.bits & GRAPH for handle in self.live_handles())


trees: weakref.WeakSet[TreeContext] = weakref.WeakSet()  # all trees of this process
