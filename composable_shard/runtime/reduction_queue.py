"""The queue of a backward's reductions: what is ready and first is issued.

[Note: Queue of reductions]
All ranks must issue the same collectives in the same order, but gradients come at other moments on
other ranks, or never. So a reduction is issued when its gradients are ready, and all reductions
before it in an order that the ranks agree on have been issued:

- A handle whose gradients have no persistent buffer, the default, is ready when the unit is over.
  The units' ends are the order, [Note: End of a unit], so it is issued at once and never waits.
- A handle with a persistent buffer can wait, [Note: Agreed order].
- A bucket is ready when autograd has accumulated all its gradients. [Note: Buckets]

A nested backward, as reentrant checkpoints run it, may bring a gradient after its handle was
reduced, on some ranks only. Where that can be, the flags at the end of the backward show it
(`LATE`), and all ranks reduce the handle once more.

[Note: Buckets]
With a cap on the size of a reduction, a unit's parameters are cut into buckets, the last ones
first. Each bucket is a handle of its own. Another rank may fill a bucket later, or never. So a
bucket is reduced before its unit's end only

- after the buckets before it in the order in which the unit's end would reduce them, and
- in the unit's *window*: from its first call, as the backward reaches it, until its end, if no
  other unit of the tree ran inside that call. Regions of non-reentrant checkpointing have no
  window, for their recomputation might gather other units; and
- if no hook waits for its gradients, see [Note: Early gradients].

These are facts of the forward, the same on all ranks. Where they do not hold, buckets wait for the
unit's end. If ranks use different parameters of a unit, the next collective of another tree, or of
a recomputation, in the window raises "not in step", and so does the first after a backward that
fails there.

A rank that reduces early waits for the others in the middle of its backward; they must take part
even if they have no gradient at all. So each backward begins with a flag reduction that shows
whether any rank accumulates gradients; only ranks that do not accumulate wait for it. At the end of
the backward the remaining buckets are reduced before any rank waits for another collective. Buckets
in the agreed order are reduced in any case, so for them no flag is sent ahead.

[Note: Early gradients]
A hook that `register_post_accumulate_grad_hook` put on a sharded parameter may step an optimizer
and drop the gradient. To save memory it must run as soon as the unit is over. So when the reduction
of a unit with such hooks starts, a flag reduction of a byte for each parameter starts too. When the
next unit's reduction has started, all ranks publish the unit's gradients and run the hooks: at the
same point of the same order of collectives, for a hook may issue some itself. The byte says whether
a rank used the parameter, or that its gradient may not be final: autograd is going to accumulate
more, a forward still runs, or a nested backward may come. In that case the unit's gradients are
published at the end of the backward, as all others are.

Ranks may have hooks on different parameters. They agree on the units that have any when they
compare their models, at the first forward. Hooks that are put on other units later run at the end
of the backward. An exception in a hook is raised at the end too: all ranks finish the backward, no
further hook runs, and all gradients are published.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.autograd.graph import get_gradient_edge

from composable_shard.comm import FlagReduction, Proposal, trace
from composable_shard.flat_param import (
    HIDDEN_ALIAS,
    FlatParamHandle,
    Round,
    run_gradient_hooks,
)
from composable_shard.runtime.gathers import release_after_backward
from composable_shard.runtime.stage import DELIVERED, EARLY, FINAL, ISSUED, OPEN, READY
from composable_shard.runtime.unit import ShardState, TreeContext
from composable_shard.torch_private import (
    DisableTorchFunctionSubclass,
    current_backward_id,
    will_run_node,
)

LATE = 2  # a flag: some rank has gradients of a handle that came after its reduction
_MAY_CHANGE = 2  # a flag of early gradients
NO_CALL = -1  # in place of the number of a call: the end of the backward
NOT_IN_USE = -2  # likewise: none, for the backward has not reached the handle, or it is over


class Item:
    """A handle in the queue of one backward.

    Attributes:
        state, handle: The unit and its handle.
        is_reduced: The backward reduces the gradients; otherwise they stay unsharded.
        is_agreed: They are reduced in the agreed order, [Note: Agreed order].
        stage: How far they are; it moves as `STAGE_MOVES` says.
        ends_with: Number of the unit's first call: the handle ends when the backward has passed it.
            `NO_CALL`: with the backward. `NOT_IN_USE`: the backward has not reached it, or is over.
        counted: Parameters whose gradients have come, where their number starts a reduction.
        had_all: Its last reduction was issued after autograd had run all nodes of the backward.
        flags: The flag reduction of early gradients, in flight.
        num_ended: Handles that have ended since `flags` was issued.
        used: Which parameters get one of the FINAL gradients.
        num_writes: `guard.num_writes` before its hooks ran.
    """

    __slots__ = (
        "counted",
        "ends_with",
        "flags",
        "had_all",
        "handle",
        "is_agreed",
        "is_reduced",
        "num_ended",
        "num_writes",
        "stage",
        "state",
        "used",
    )

    def __init__(self, state: ShardState, handle: FlatParamHandle) -> None:
        self.state, self.handle = state, handle
        self.is_reduced = self.is_wanted
        self.is_agreed = False
        self.stage = OPEN
        self.ends_with = NOT_IN_USE
        self.had_all = False
        self.counted: set[int] = set()
        self.flags: FlagReduction | None = None
        self.num_ended = self.num_writes = 0
        self.used: list[bool] = []

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

    def will_change(self, index: int) -> bool:
        """Return whether this backward has yet to accumulate the gradient of a parameter."""
        param = self.handle.entries[index].unsharded
        with DisableTorchFunctionSubclass():  # "Note: Kept objects"
            if param is None or not param.requires_grad or index in self.counted:
                return False
            try:
                return will_run_node(get_gradient_edge(param).node)
            except RuntimeError:  # autograd.grad() with respect to the parameter
                return True


class ReductionQueue:
    """The reductions of one backward, [Note: Queue of reductions].

    Attributes:
        items: The tree's handles, in the order of the units.
        agreed: Those that are reduced in the agreed order, in that order.
        asked: Those that a backward inside this one asked to reduce, which began without it.
        issued: Those that this backward has reduced, the last one last.
        reduces_all: Every handle is reduced.
        accumulates: This rank accumulates gradients of parameters, or some rank is known to.
        is_sure: All ranks know that some rank accumulates gradients.
        asks_for_late: The flags at the end show handles whose gradients came after a reduction.
        is_ending: Autograd has run all its nodes.
        window: Number of the call whose buckets may be reduced before its unit's end, or None.
        hook_error: The first error of a user's hook, to be raised at the end.
    """

    def __init__(self, context: TreeContext) -> None:
        self._context, self._streams = context, context.streams
        self.items: dict[FlatParamHandle, Item] = {}
        self.agreed: list[Item] = []
        # Agreed, reduced by all ranks, and not issued yet: items, or what stands for several
        self._expected: list[Any] = []
        self._over: dict[Item, None] = {}  # agreed, in the order in which this rank was ready
        self.asked: dict[Item, None] = {}
        self.issued: dict[Item, None] = {}
        self._flagged: dict[Item, None] = {}  # with flags in flight
        self._final: list[Item] = []
        self.reduces_all, self.is_ending = True, False
        self.accumulates = self.is_sure = self.asks_for_late = False
        self.window: int | None = None
        self.hook_error: BaseException | None = None

    def begin(self, states: Sequence[ShardState]) -> None:
        """Enter the tree's handles.

        Issues one all-reduce of a byte for each process group that has buckets, [Note: Buckets].
        """
        context, buckets = self._context, list[Item]()
        for state in states:
            for handle in state.handles:
                item = self.items[handle] = Item(state, handle)
                self.reduces_all = self.reduces_all and item.is_reduced
                # Without new gradients too waiting ones are reduced: of all handles, or of none.
                self.accumulates = (
                    self.accumulates
                    or handle.will_get_gradient()
                    or (item.is_reduced and handle.grads.waits_for_reduction)
                )
                if state.has_buckets and item.is_reduced:
                    buckets.append(item)
        self.asks_for_late = context.graphs.has_regions or bool(buckets)
        if context.reduction_order is not None:
            self._arrange(states)
        if buckets:
            self._agree_to_reduce([item.handle for item in buckets if not item.is_agreed])

    def _arrange(self, states: Sequence[ShardState]) -> None:
        order = self._context.reduction_order
        assert order is not None
        handles = [
            handle
            for state in reversed(states)
            for handle in state.handles
            if handle.grads.is_persistent and not handle.shown.has_early_hooks
        ]
        for handle in order.arrange(handles):
            item = self.items[handle]
            if item.is_reduced and handle.requires_grad:
                item.is_agreed = True
                self.agreed.append(item)
        self._expected = [item for item in self.agreed if order.expects(item.handle)]

    def are_due_at_end(self) -> bool:
        """Return whether no result is due before the backward ends, and no gradient is late."""
        is_early = any(item.handle.shown.has_early_hooks for item in self.items.values())
        return not (is_early or self.asks_for_late)

    def _agree_to_reduce(self, buckets: list[FlatParamHandle]) -> None:
        """Let all ranks know whether any of them accumulates gradients."""
        groups = {handle.shard_group.joint_groups: handle.shard_group for handle in buckets}
        if not groups:
            return
        own = int(self.accumulates)
        flags = FlagReduction([(group, [own]) for group in groups.values()], highest=1)
        self._context.flag_reductions.append(flags)
        if not own:
            self.accumulates = any(any(values) for values in flags.finish())
        self.is_sure = self.accumulates

    def ask_again(self) -> None:
        """Note which handles are to be reduced after all, as a backward inside this one begins.

        The gradients of backwards inside a hook are those of the backward around them. If only the
        first of them ran under `no_sync`, all are reduced at the end.
        """
        for item in self.items.values():
            if not item.is_reduced and item.is_wanted and item.handle.requires_grad:
                self.asked[item] = None

    # What is ready

    def open_window(self, state: ShardState, call: int, *, runs_alone: bool) -> None:
        """Note that the backward has reached a call of a unit with buckets, [Note: Buckets]."""
        is_sure = self.is_sure or not any(
            handle.requires_grad and not self.items[handle].is_agreed for handle in state.handles
        )
        self.window = call if runs_alone and is_sure else None

    def is_in_window(self, item: Item) -> bool:
        """Return whether a bucket may be reduced before its unit's end.

        One that was reduced after a later call waits for the end: where a rank has no gradient from
        this call, its end reduces nothing.
        """
        may_wait = item.handle.shown.has_early_hooks or item in self.issued
        return item.ends_with == self.window and item.is_reduced and not may_wait

    def make_ready(self, item: Item, *, is_early: bool = False) -> None:
        """Note that a handle is ready; issue what is first now.

        Args:
            item: The handle; unless it is agreed, all before it were issued.
            is_early: Whether its unit is not over.
        """
        if not item.is_agreed:
            self.issue(item, is_early=is_early)
        elif item in self.issued:
            # By the call that the backward reached before: the same on all ranks, unless asked for.
            if not self.asks_for_late and not item.had_all:
                self.issue(item)
        else:
            item.stage = READY
            self._over[item] = None
            while self._expected and self._expected[0].stage is READY:
                self.issue(self._expected.pop(0))

    def reopen(self, item: Item, *, is_reached: bool) -> None:
        """Note that more gradients of a handle may come, by an earlier call or a nested backward.

        Args:
            item: The handle.
            is_reached: By an earlier call: the same on all ranks.
        """
        if is_reached:
            # A late gradient waits for its last reduction, perhaps on this rank only: the second
            # stage must be issued before. [Note: Two stages]
            item.handle.grads.advance()
        if not item.is_agreed and item.stage not in EARLY:
            item.stage = OPEN

    def end(self, item: Item) -> None:
        """Reduce the handle of a unit that is over, now or when it is first in the agreed order."""
        if self._flagged or item.handle.shown.has_early_hooks:
            self._flag(item)
        is_asked = self.is_ending and self.asks_for_late and item in self.issued
        if not self.accumulates or item.stage in EARLY:
            pass
        elif item.is_agreed:
            self.make_ready(item)
        elif item.stage is not ISSUED and not is_asked:
            self.issue(item)

    def issue(self, item: Item, *, is_early: bool = False) -> None:
        """Start a reduction, on all ranks in the same order; end the one in flight.

        With `is_early` its unit is not over, and may need the full values.
        """
        # One reduction in flight: ending the last one here bounds the buffers to two units.
        self.advance()
        self.issued.pop(item, None)
        context, handle = self._context, item.handle
        # Early, its unit may still compute: the values stay, unless gradients have their place.
        keeps = handle.grads.round is not Round.IN_VALUES if is_early else item.keeps_values
        handle.grads.issue(
            self._streams,
            context.scratch,
            keep_unsharded=keeps,
            is_deferred=item.is_deferred,
        )
        item.stage = ISSUED
        item.had_all = self.is_ending
        self.issued[item] = None
        if is_early and not keeps:
            release_after_backward(handle)
        if self._final:
            self.deliver()

    def advance(self) -> None:
        """Wait until the last reduction, if it is in flight, no longer needs its buffers."""
        if self.issued:
            next(reversed(self.issued)).handle.grads.advance()

    # Gradients that are published before the backward ends

    def _flag(self, item: Item) -> None:
        """Collect the handles that are final; start the flags of one that is over.

        One all-reduce for each process group: a byte for each parameter, and one more.
        """
        # Before any return: all ranks count here how many units have ended. The rest is packed
        # before `used` is read. Flags are entered in the context before they are waited for: an
        # interrupt leaves them to `return_to_idle`.
        self.collect()
        state, handle = item.state, item.handle
        if not handle.shown.has_early_hooks or item.stage in EARLY:
            return
        handle.grads.pack_rest(may_overwrite=not item.keeps_values)
        is_due = state.settings.is_last_backward and not item.is_deferred
        if self.is_ending or not is_due:
            return
        full, used = handle.full, handle.grads.used
        if (
            state.ref in self._context.graphs.may_recompute
            or not full.readers.may_free
            or current_backward_id() != self._context.graphs.last_backward_id
            or (full.is_kept and not full.is_cast and full.readers.bits & HIDDEN_ALIAS)
        ):
            statuses = [_MAY_CHANGE] * len(used)
        else:
            will_change = map(item.will_change, range(len(used)))
            statuses = [
                _MAY_CHANGE if later else int(now)
                for later, now in zip(will_change, used, strict=True)
            ]
        values = [int(self.accumulates), *statuses]
        item.flags = FlagReduction([(handle.shard_group, values)], highest=_MAY_CHANGE)
        self._context.flag_reductions.append(item.flags)
        item.num_ended = 0
        if not self.accumulates:
            self.accumulates = item.flags.finish()[0][0] > 0
        if self.accumulates:
            self._flagged[item] = None

    def collect(self) -> None:
        """Wait for reductions and flags that have overlapped with a unit's compute.

        Two-stage reductions get two units, unless the backward is ending. [Note: Two stages]
        """
        if not self._flagged:
            return
        self.advance()
        flagged, self._flagged = self._flagged, {}
        for item in flagged:
            item.num_ended += 1
            group = item.handle.shard_group
            has_second_stage = group.size > 1 and bool(group.replicate_groups)
            if has_second_stage and item.num_ended == 1 and not self.is_ending:
                self._flagged[item] = None
                continue
            item.handle.grads.finish()
            assert item.flags is not None
            _, *statuses = item.flags.finish()[0]
            if max(statuses) != _MAY_CHANGE:
                item.stage, item.used = FINAL, list(map(bool, statuses))
                self._final.append(item)

    def deliver(self) -> None:
        """Publish the gradients that are final, and run their hooks."""
        final, self._final = self._final, []
        for item in final:
            handle = item.handle
            handle.grads.publish(item.used)
            # Allow writes from here on: this backward no longer needs the parameters.
            handle.guard.set_in_backward(False)
            item.stage, item.num_writes = DELIVERED, handle.guard.num_writes
            self.run_hooks(item)

    def run_hooks(self, item: Item) -> None:
        """Run the hooks of a handle's parameters, unless a hook has failed in this backward."""
        handle = item.handle
        if self.hook_error is not None or handle.grads.reduction.deferred is not None:
            return
        if trace.logs:
            trace.record("gradient_hooks", handle.name)
        try:
            if handle.guard.may_have_hooks:
                run_gradient_hooks(handle.shown)
        except BaseException as error:
            # Raise it at the end, because the other ranks wait for this rank's collectives.
            self.hook_error = error

    def check_not_written(self, handles: Sequence[FlatParamHandle]) -> None:
        """Check that hooks have not changed parameters with which a forward runs again."""
        for handle in handles:
            item = self.items.get(handle)
            if item is None or item.stage is not DELIVERED:
                continue
            if item.num_writes != handle.guard.num_writes:
                raise RuntimeError(
                    f"unit '{handle.name}' is computed again in a backward whose hooks "
                    "(register_post_accumulate_grad_hook) have stepped its parameters. Checkpoint "
                    "units one by one, or step the optimizer after backward() has returned."
                )

    # The backward ends

    def issue_expected(self) -> None:
        """Reduce the handles that all ranks expect and that this rank has not reduced."""
        while self._expected:
            self.issue(self._expected.pop(0))

    def flags_of(self, item: Item) -> Sequence[int]:
        """Return a flag for each parameter: 0, 1 for a gradient, `LATE` if it came too late."""
        grads = item.handle.grads
        is_late = item in self.issued and any(grads.arrived)
        return [LATE * each for each in grads.used] if is_late else grads.used

    def propose(self) -> Proposal:
        """Return the order in which handles were ready here, for all ranks to compare."""
        order = self._context.reduction_order
        assert order is not None
        return order.propose([item.handle for item in self._over])

    def issue_last(self, items: Sequence[Item], flags: FlagReduction) -> None:
        """Reduce the handles of which any rank has gradients that were not reduced."""
        order = self._context.reduction_order
        pairs = zip(items, flags.finish(), strict=True)
        found = [(item, used) for item, used in pairs if any(used)]
        if self.agreed and order is not None:
            order.note_used([item.handle for item, _ in found if item.is_agreed])
        for item, used in found:
            if LATE in used or (item.is_agreed and item not in self.issued):
                self.issue(item)
