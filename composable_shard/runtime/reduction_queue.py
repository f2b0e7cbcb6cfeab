"""The queue of a backward's reductions: what is ready and first is issued.

[Note: Queue of reductions]
All ranks must issue the same collectives in the same order, but gradients come at other moments on
other ranks, or never. So a reduction is issued when its gradients are ready, and all reductions
before it in an order that the ranks agree on have been issued. The handle's `Order` says when that
is. By default its unit is over: the units' ends are the order, [Note: End of a unit], so it is
issued at once and never waits. An option derives a class from `Order`, and `runtime/initialization`
gives it to the units that need it; a backward makes one object of each such class. Under
`FULL_SHARD` and `SHARD_GRAD_OP` without options there is none.

Where the backend groups calls, as NCCL does, the tree's queue is of a class of
`launched_reductions`: there the reductions of small units wait for the next ones, at most until the
backward ends, and are issued as one, [Note: Launched reductions]. All else is as here.

A nested backward, as reentrant checkpoints run it, may bring a gradient after its handle was
reduced, on some ranks only. Where that can be, the flags at the end of the backward show it
(`LATE`), and all ranks reduce the handle once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar
from weakref import proxy

from composable_shard.comm import FlagReduction, Proposal, ShardGroup
from composable_shard.flat_param import FlatParamHandle, Round
from composable_shard.runtime.gathers import release_after_backward
from composable_shard.runtime.phases import Phase
from composable_shard.runtime.stage import EARLY, ISSUED, OPEN, READY
from composable_shard.runtime.unit import ShardState, TreeContext

LATE = 2  # a flag: some rank has gradients of a handle that came after its reduction
NO_CALL = -1  # in place of the number of a call: the end of the backward
NOT_IN_USE = -2  # likewise: none, for the backward has not reached the handle, or it is over


class Item:
    """A handle in the queue of one backward.

    Attributes:
        state, handle: The unit and its handle.
        order: Says when it is reduced.
        is_reduced: The backward reduces the gradients. Otherwise they stay unsharded: the item's
            order is `Postponed` then (postponed.py).
        stage: How far they are; it moves as `STAGE_MOVES` of stage.py says.
        ends_with: Number of the unit's first call: the handle ends when the backward has passed it.
            `NO_CALL`: with the backward. `NOT_IN_USE`: the backward has not reached it, or is over.
        is_counted: The number of its gradients starts a reduction: an order of buckets or of early
            hooks sets it.
        counted: Parameters whose gradients have come, where they are counted.
        had_all: Its last reduction was issued after autograd had run all nodes of the backward, so
            the agreed order need not repeat it.
    """

    __slots__ = (
        "counted",
        "ends_with",
        "had_all",
        "handle",
        "is_counted",
        "is_reduced",
        "order",
        "stage",
        "state",
    )

    def __init__(self, state: ShardState, handle: FlatParamHandle, order: Order) -> None:
        self.state, self.handle, self.order = state, handle, order
        self.is_reduced = self.is_wanted
        self.stage = OPEN
        self.ends_with = NOT_IN_USE
        self.had_all = self.is_counted = False
        self.counted: set[int] = set()

    @property
    def is_wanted(self) -> bool:
        """Whether the unit's settings ask for a reduction now."""
        # A persistent buffer, unsharded anyway, is reduced once, when no reduction is postponed.
        settings = self.state.settings
        is_kept = self.handle.grads.is_persistent
        return settings.reduces_fully if is_kept else settings.requires_gradient_sync

    @property
    def is_deferred(self) -> bool:
        """Whether the reduction postpones the all-reduce over the replicate groups."""
        is_due = self.state.settings.requires_all_reduce and self.state.settings.is_last_backward
        return not is_due and bool(self.handle.shard_group.replicate_groups)

    @property
    def keeps_values(self) -> bool:
        """Whether the full values are still needed after the unit's end."""
        handle = self.handle
        return not (handle.settings.reshard_after_backward and handle.full.readers.may_free)

    def count(self, index: int) -> bool:
        """Count the gradient of a parameter; return whether that was the last one to come.

        A nested backward may accumulate one gradient twice before another has come.
        """
        if index in self.counted:
            return False
        self.counted.add(index)
        return len(self.counted) == len(self.handle.entries)


@dataclass(slots=True)
class Ending:
    """What the phases of the end of a backward hand on, [Note: Phases].

    Attributes:
        backward: The `BackwardPass`; untyped, because its module imports this one.
        rest: Handles to reduce that the backward has not reached; `Postponed` finds them.
        has_joined: What is left was reduced.
        items: Handles whose gradients are published at the end.
        used: For each of them its ranks, and which parameters got a gradient on this one.
        highest: The value of a flag, at most.
        proposal: What this rank would change, if all ranks agree.
        flags: Which parameters any rank used, once they were sent.
        published: The handles whose gradients were published.
    """

    backward: Any
    rest: list[Item] = field(default_factory=list)
    has_joined: bool = False
    items: list[Item] = field(default_factory=list)
    used: list[tuple[ShardGroup, Sequence[int]]] = field(default_factory=list)
    highest: int = 1
    proposal: Proposal | None = None
    flags: FlagReduction = field(init=False)
    published: list[Item] = field(default_factory=list)


class Order:
    """When handles are reduced: this one, the default, when their unit is over.

    Of this class `end` and `make_ready` do all of the work. The other methods are empty: an order
    of an option overrides those it needs. `Buckets` (bucket_windows.py) is that of `bucket_cap_mb`,
    `EarlyHooks` (early_hooks.py) of hooks that users put on parameters before the ranks were
    compared, `AgreedOrder` (reduction_order.py) of strategies that keep gradients unsharded,
    `Postponed` (postponed.py) of `no_sync` and the like. `GradientHooks` (gradient_hooks.py) takes
    no handle: it runs the hooks that `EarlyHooks` has not run.

    One object of each class lasts for one backward. Those that an option brings are in
    `ReductionQueue.orders`, and are told what happens to all handles of the tree.

    Attributes:
        queue: The queue, weakly, which has the order.
        weak: The order itself, weakly, for its items. Without cycles, what a backward has made goes
            with it, and a model that is deleted takes its handles along.
        place: Among the orders of a backward, which act in this order. One further on may take the
            items of one before.
        is_watching: It is told of all units, not only of its own.
        keeps_order: Its handles are reduced in an order of their own, which all ranks have.
        may_be_ordered: Its handles may get a fixed order instead, if they keep their gradients in a
            persistent buffer.
        is_due_at_end: It publishes nothing before the backward ends.
        acts: What it does in the phases of a backward's end.
    """

    place: ClassVar[int] = 0
    is_watching: ClassVar[bool] = False
    keeps_order: ClassVar[bool] = False
    may_be_ordered: ClassVar[bool] = True
    is_due_at_end: ClassVar[bool] = True
    acts: ClassVar[Mapping[Phase, Callable[[Any, Ending], None]]] = {}

    def __init__(self, queue: ReductionQueue) -> None:
        self.queue: ReductionQueue = proxy(queue)
        self.weak: Order = proxy(self)

    # The backward begins

    def prepare(self, states: Sequence[ShardState]) -> None:
        """Look at units as they are before a backward adopts their changes."""

    def take(self) -> None:
        """Become the order of some items; nothing is sent."""

    def begin(self) -> None:
        """Begin, as all items have their orders; may issue collectives."""

    # Units begin and end

    def reach(self, state: ShardState, call: int, *, runs_alone: bool) -> None:
        """Note that the backward has reached a call; `runs_alone`: no other unit ran inside."""

    def nest(self) -> None:
        """Note that a backward inside this one has a gradient of a handle that isn't reduced."""

    def recompute(self, state: ShardState) -> None:
        """Note that a unit's forward runs again."""

    def fill(self, item: Item, backward: Any) -> None:
        """Note that all gradients of a handle have come, and its unit is not over."""

    def precede(self, item: Item) -> None:
        """Note that a unit's end is about to reduce a handle."""

    def follow(self) -> None:
        """Note that a reduction was issued."""

    def has_waiting(self, item: Item) -> bool:
        """Return whether a frozen handle has gradients to reduce, those of earlier backwards."""
        return False

    def end(self, item: Item) -> None:
        """Reduce a handle whose unit is over, or note that it can be reduced."""
        queue = self.queue
        for each in queue.watchers:
            each.precede(item)
        # A backward that brings no gradient, such as one of inputs alone, reduces nothing. Where
        # other ranks bring some, this rank takes part in what ends with the backward, after the
        # flags (Phase.REST). A handle that they reduce before is an error on all ranks: not in
        # step.
        if not queue.brings_gradients or (item.stage is not OPEN and item.stage is not READY):
            return
        # One whose gradients have come late is reduced again by all ranks, as the flags show.
        if not (queue.asks_for_late and queue.is_ending and item in queue.issued):
            queue.issue(item)

    def make_ready(self, item: Item, *, before_end: bool = False) -> None:
        """Note that a handle is ready; issue what is first now.

        Args:
            item: The handle.
            before_end: Whether its unit is not over.
        """
        self.queue.issue(item, before_end=before_end)


_place_of: Callable[[type[Order]], int] = attrgetter("place")


class ReductionQueue:
    """The reductions of one backward, [Note: Queue of reductions].

    Attributes:
        context: The tree.
        items: The tree's handles, in the order of the units.
        orders: The orders that options bring; `watchers`: those that are told of all units.
        ordered: Handles with an order of their own, in that order.
        issued: Those that this backward has reduced, the last one last.
        brings_gradients: The backward accumulates gradients of parameters on this rank, or is known
            to do so on another one. If not, nothing is reduced.
        is_sure: All ranks know that some rank accumulates gradients.
        asks_for_late: The flags at the end show handles whose gradients came after a reduction.
        is_ending: Autograd has run all its nodes.
    """

    def __init__(self, context: TreeContext) -> None:
        self.context, self._streams = context, context.streams
        self.items: dict[FlatParamHandle, Item] = {}
        self.orders: list[Order] = []
        self.watchers: list[Order] = []
        self.ordered: list[Item] = []
        self.issued: dict[Item, None] = {}
        self.brings_gradients = self.is_sure = self.asks_for_late = self.is_ending = False
        self._default = Order(self)

    def choose(self, states: Sequence[ShardState]) -> None:
        """Make the orders that the tree's units need; nothing is sent."""
        kinds: set[type[Order]] = set()
        for state in states:
            kinds.update(state.order_kinds)
        for kind in sorted(kinds, key=_place_of):
            self.enter(kind)
        for order in self.orders:
            order.prepare(states)

    def enter(self, kind: type[Order]) -> None:
        """Let an order of this class act from now on, once."""
        if any(type(each) is kind for each in self.orders):
            return
        order = kind(self)
        self.orders.append(order)
        if order.is_watching:
            self.watchers.append(order)

    def begin(self, states: Sequence[ShardState]) -> None:
        """Enter the tree's handles. An order may issue collectives."""
        default = self._default.weak
        self.asks_for_late = self.context.graphs.has_regions
        for state in states:
            for handle in state.handles:
                self.items[handle] = Item(state, handle, default)
                self.brings_gradients = self.brings_gradients or handle.will_get_gradient()
        for order in self.orders:
            order.take()
        for order in self.orders:
            order.begin()

    def are_due_at_end(self) -> bool:
        """Return whether no result is due before the backward ends, and no gradient is late."""
        return not self.asks_for_late and all(order.is_due_at_end for order in self.orders)

    def divide(self, items: Sequence[Item]) -> list[Any]:
        """Return items of a fixed order as what is issued at once: items, or several as one."""
        return list(items)

    def reopen(self, item: Item, *, is_reached: bool) -> None:
        """Note that more gradients of a handle may come, by an earlier call or a nested backward.

        Args:
            item: The handle.
            is_reached: By an earlier call: the same on all ranks.
        """
        if is_reached:
            # A late gradient waits for its last reduction, perhaps on this rank only: the second
            # stage must be issued before. [Note: Two stages]
            item.handle.grads.free_input()
        if not item.order.keeps_order and item.stage not in EARLY:
            item.stage = OPEN

    def issue(self, item: Item, *, before_end: bool = False) -> None:
        """Start a reduction, on all ranks in the same order; end the one in flight.

        With `before_end` its unit is not over, and may need the full values.
        """
        # One reduction (or launch) in flight: ending the last one here bounds the buffers to two
        # units.
        self.end_last()
        self.issued.pop(item, None)
        context, handle = self.context, item.handle
        # Before the end its unit may still compute: the values stay, unless gradients have their
        # place.
        keeps = handle.grads.round is not Round.IN_VALUES if before_end else item.keeps_values
        handle.grads.issue(
            self._streams,
            context.scratch,
            keeps_values=keeps,
            is_deferred=item.is_deferred,
        )
        item.stage = ISSUED
        item.had_all = self.is_ending
        self.issued[item] = None
        if before_end and not keeps:
            release_after_backward(handle)
        for each in self.watchers:
            each.follow()

    def end_last(self) -> None:
        """Wait until the last reduction, if it is in flight, no longer needs its buffers."""
        if self.issued:
            next(reversed(self.issued)).handle.grads.free_input()

    def note_end(self) -> None:
        """Note that autograd has run all its nodes."""
        self.is_ending = True

    def flag_late(self, ending: Ending) -> None:
        """Let the flags at the end show which gradients came after a reduction."""
        ending.highest = LATE
        for index, item in enumerate(ending.items):
            if item in self.issued and any(item.handle.grads.arrived):
                group, used = ending.used[index]
                ending.used[index] = group, [LATE * each for each in used]

    def issue_last(self, ending: Ending) -> None:
        """Reduce the handles of which any rank has gradients that were not reduced."""
        for item, used in zip(ending.items, ending.flags.finish(), strict=True):
            is_left = item.order.keeps_order and item not in self.issued
            if any(used) and (LATE in used or is_left):
                self.issue(item)
