"""The order of reductions, and the gradients reduced before a unit or a backward ends.

[Note: Agreed order]
Under `SHARD_OPTIM` and `NO_SHARD` gradients lie in a persistent buffer, so their reductions can
wait for each other. All ranks reduce them in one order, even if they ran their units in different
orders or skipped some. The values equal DistributedDataParallel's.

- At first the order is the reverse of the units' order, as in most backwards. A handle is reduced
  once it is over and all handles before it have been reduced.
- A backward expects the handles that any rank used in one of the last two backwards; the first two
  expect all. At its end it reduces the expected handles that it has not reached, as zeros, even if
  this rank has no gradient at all: other ranks may have some. The flags that follow show which
  other handles any rank has used. These are reduced last.
- A nested backward, as reentrant checkpoints run it, may bring a gradient after its handle was
  reduced, on some ranks only. If any forward ran in such a region, the flags show that too, and all
  ranks reduce the handle once more.
- The flags carry a digest of the order in which the handles were over. If all ranks had the same
  order, it becomes the agreed one.

A bucket is over when it is full, if it may be reduced before its unit's end, [Note: Buckets].
Handles that have hooks on gradients keep the order of their backward.

[Note: Buckets]
With a cap on the size of a reduction, a unit's parameters are cut into buckets, the last ones
first. Each bucket is a handle of its own. A bucket is full when autograd has accumulated all its
gradients. Another rank may reach that point later, or never, but all ranks must issue the same
collectives in the same order. So a bucket is reduced early only

- after the buckets before it in the order in which the unit's end would reduce them, and
- while no other collective of the tree can come before that end: the backward has reached the first
  call of the unit, and no other unit, of any tree, ran inside that call. In a region of
  non-reentrant checkpointing the recomputation might gather other units; and
- if no hook waits for its gradients, see [Note: Early gradients].

These are facts of the forward, the same on all ranks. Where they do not hold, buckets wait for the
unit's end. If ranks use different parameters of a unit, they fill its buckets at different moments:
a collective of another tree, or of a recomputation, that comes before the unit's end then finds the
ranks out of step, and so does the first one after a backward that fails there.

A rank that reduces early waits for the others in the middle of its backward; they must take part
even if they have no gradient at all. So each backward begins with a flag reduction that shows
whether any rank accumulates gradients; only ranks that do not accumulate wait for it. At the end of
the backward the remaining buckets are reduced before any rank waits for another collective.

Where gradients lie in a persistent buffer, a full bucket waits for its turn instead. All ranks
reduce it in any case, so no flag is sent ahead, and ranks may fill buckets in any order. [Note:
Agreed order]

A bucket that is tied to another unit's parameters ends with that unit, after them.

A nested backward, as reentrant checkpointing runs it, may accumulate a gradient after its bucket
was reduced. The gradient then stays where autograd put it, and the flags at the end of the backward
make all ranks reduce that bucket once more. From then on the unit's buckets wait for its end.

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

import weakref
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from torch.autograd.graph import get_gradient_edge

from composable_shard.comm import FlagReduction, Proposal
from composable_shard.flat_param import FlatParamHandle
from composable_shard.torch_private import will_run_node

LATE = 2  # some rank has gradients of a handle that came after its reduction


class Buckets:
    """Progress of the running backward with the buckets of a unit, see [Note: Buckets]."""

    def __init__(self) -> None:
        self._position: int | None = None
        self._full: set[FlatParamHandle] = set()
        self._issued: set[FlatParamHandle] = set()
        self._is_late = False  # some backward had a gradient after its bucket was reduced

    def reach(self, position: int | None) -> None:
        """Note that the backward has reached a call of the unit.

        Args:
            position: Number of the call; None if buckets may not be reduced early.
        """
        self._position = position

    def may_go_early(self, handle: FlatParamHandle, position: int) -> bool:
        """Return whether a bucket that is full may be reduced before its unit's end."""
        return position == self._position and not self._is_late and not handle.shown.has_early_hooks

    def fills(self, handle: FlatParamHandle, index: int) -> bool:
        """Count the gradient of parameter `index` of a bucket; return whether that made it full."""
        if not handle.grads.awaited.count(index):
            return False
        self._full.add(handle)
        return True

    def take_full(self, queue: Iterable[FlatParamHandle]) -> Iterator[FlatParamHandle]:
        """Yield the full buckets whose turn it is."""
        for bucket in queue:
            if not bucket.requires_grad or bucket in self._issued:
                continue
            if bucket not in self._full:
                return
            yield bucket

    def note_issued(self, handle: FlatParamHandle) -> None:
        """Note that a bucket is reduced early."""
        self._issued.add(handle)

    def is_issued(self, handle: FlatParamHandle) -> bool:
        """Return whether a bucket of a unit that has not ended was reduced early."""
        return handle in self._issued

    def end(self, handle: FlatParamHandle) -> bool:
        """Note the end of the unit; return whether the bucket was reduced early."""
        was_issued = handle in self._issued
        self._issued.discard(handle)
        self._full.discard(handle)
        handle.grads.awaited.reset()
        return was_issued

    def note_late(self) -> None:
        """Note that some rank got a gradient after its bucket was reduced."""
        self._is_late = True

    def reset(self) -> None:
        """Forget the backward, which is over."""
        self._position = None
        self._full.clear()
        self._issued.clear()


_HandleRef = weakref.ref[FlatParamHandle]


class _Unit(Protocol):
    """A ShardState: its module imports this one."""

    @property
    def handles(self) -> list[FlatParamHandle]: ...


class ReductionOrder:
    """The agreed order of a tree's reductions, kept between backwards. [Note: Agreed order]"""

    def __init__(self) -> None:
        self._order: list[_HandleRef] = []
        # Handles used in the last backward and in the one before; None: not known, so expect all.
        self._used: tuple[set[_HandleRef] | None, ...] = (None, None)

    def begin(
        self, units: Sequence[_Unit], reducing: set[FlatParamHandle], *, asks_for_late: bool
    ) -> Turns:
        """Return the turns of the handles in `reducing`; `units` are the tree's, in order."""
        owners = {
            handle: unit
            for unit in reversed(units)
            for handle in unit.handles
            if handle.grads.is_persistent and not handle.shown.has_early_hooks
        }
        order = [handle for ref in self._order if (handle := ref()) in owners]
        if len(order) != len(owners):
            order, self._used = list(owners), (None, None)
            self._order = [weakref.ref(handle) for handle in order]
        turns = Turns()
        turns.asks_for_late = asks_for_late
        for handle in order:
            if handle is not None and handle.requires_grad and handle in reducing:
                turns[handle] = owners[handle]
        turns.expect(
            self, [h for h in turns if any(u is None or weakref.ref(h) in u for u in self._used)]
        )
        return turns

    def note_used(self, used: set[_HandleRef]) -> None:
        """Note the handles that any rank has used in a backward; the same on all ranks."""
        self._used = used, self._used[0]

    def take_over(self, ended: Sequence[_HandleRef]) -> None:
        """Make the order in which handles were over, equal on all ranks, the agreed one."""
        self._order = list(dict.fromkeys([*ended, *self._order]))

    def positions(self, ended: Sequence[_HandleRef]) -> list[int]:
        """Return the positions of handles in the agreed order."""
        known = {ref: index for index, ref in enumerate(self._order)}
        return [known[ref] for ref in ended]


class Turns(dict[FlatParamHandle, Any]):
    """The handles that a backward reduces in the agreed order, each with its unit."""

    def __init__(self) -> None:
        super().__init__()
        # The flags say which handles have gradients that came after a reduction
        self.asks_for_late = False
        self._order = ReductionOrder()
        self._queue: list[FlatParamHandle] = []  # expected, and not reduced yet
        self._reduced: set[FlatParamHandle] = set()
        self._ended: dict[FlatParamHandle, None] = {}
        self._at_end: set[FlatParamHandle] = set()

    def expect(self, order: ReductionOrder, handles: list[FlatParamHandle]) -> None:
        """Set the handles that are reduced even if this rank has no gradients of them."""
        self._order, self._queue = order, handles

    def take(self, handle: FlatParamHandle) -> list[FlatParamHandle]:
        """Note that a handle is over; return the handles whose turn it is now.

        A handle reduced before gets another turn at once, even without a gradient here; but none
        after `rest` returned it (all gradients had come), nor if the flags show late gradients.
        """
        if handle in self._reduced:
            return [] if self.asks_for_late or handle in self._at_end else [handle]
        self._ended[handle] = None
        num_due = 0
        while num_due < len(self._queue) and self._queue[num_due] in self._ended:
            num_due += 1
        due, self._queue = self._queue[:num_due], self._queue[num_due:]
        self._reduced.update(due)
        return due

    def rest(self) -> list[FlatParamHandle]:
        """Return the expected handles that are not reduced yet, at the end of the backward."""
        due, self._queue = self._queue, []
        self._reduced.update(due)
        self._at_end.update(due)
        return due

    def last(
        self, handles: Sequence[FlatParamHandle], used: Sequence[Sequence[int]]
    ) -> list[FlatParamHandle]:
        """Return the handles to reduce after the flags: used by a rank and not reduced, or late."""
        flags = dict(zip(handles, used, strict=True))
        found = [handle for handle in self if any(flags[handle])]
        self._order.note_used({weakref.ref(handle) for handle in found})
        due = self.rest() + [h for h in found if h not in self._reduced or LATE in flags[h]]
        self._reduced.update(due)
        return list(dict.fromkeys(due))

    def has_reduced(self, handle: FlatParamHandle) -> bool:
        """Return whether a handle has been reduced."""
        return handle in self._reduced

    def propose(self) -> Proposal:
        """Return the order in which this rank's handles were over, for all ranks to compare."""
        order, ended = self._order, [weakref.ref(handle) for handle in self._ended]
        digest = zlib.crc32(array("L", order.positions(ended)).tobytes())
        return Proposal(digest, lambda: order.take_over(ended))


NO_TURNS = Turns()  # for trees without handles in an agreed order


_MAY_CHANGE = 2  # a third flag, beside 0: unused and 1: used


class EarlyGradients:
    """Handles with hooks whose gradients one backward publishes before it ends.

    See [Note: Early gradients].
    """

    def __init__(self, in_flight: list[FlagReduction]) -> None:
        """Begin without handles; flag reductions are also entered into `in_flight`."""
        # Handles whose reduction and flag reduction were started and not waited for
        self.pending: dict[FlatParamHandle, FlagReduction] = {}
        # Handles whose final gradients wait to be published, with their parameters' use
        self.ready: list[tuple[FlatParamHandle, list[bool]]] = []
        self._in_flight = in_flight
        self._ages: dict[FlatParamHandle, int] = {}  # further reductions since the handle's own
        self._accumulated: dict[FlatParamHandle, set[int]] = {}
        self._delivered: dict[FlatParamHandle, int] = {}  # guard.num_writes before the hooks ran

    def is_final(self, handle: FlatParamHandle) -> bool:
        """Return whether all ranks know that no gradient of the handle is to come.

        The handle stays final even if the backward reaches an earlier call of its unit.
        """
        return handle in self._delivered or any(ready is handle for ready, _ in self.ready)

    def note_accumulated(self, handle: FlatParamHandle, index: int) -> None:
        """Note that autograd has accumulated the gradient of parameter `index`."""
        self._accumulated.setdefault(handle, set()).add(index)

    def start(self, handle: FlatParamHandle, *, accumulates: bool, may_change: bool) -> None:
        """Start the flag reduction for a handle that is over and whose gradients are packed.

        Issues one all-reduce for each process group: a byte for each parameter, and one more.

        Args:
            accumulates: Whether this rank accumulates gradients in this backward.
            may_change: Whether any gradient of the handle may still change.
        """
        if may_change or (
            handle.is_kept and not handle.full.is_cast and handle.full.params.aliases.are_hidden
        ):
            statuses = [_MAY_CHANGE] * len(handle.entries)
        else:
            statuses = [
                _MAY_CHANGE if self._is_to_come(handle, index) else int(is_used)
                for index, is_used in enumerate(handle.grads.used)
            ]
        values = [(handle.shard_group, [int(accumulates), *statuses])]
        flags = FlagReduction(values, highest=_MAY_CHANGE)
        self._in_flight.append(flags)
        self.pending[handle] = flags
        self._ages[handle] = 0

    def _is_to_come(self, handle: FlatParamHandle, index: int) -> bool:
        """Return whether this backward has yet to accumulate the gradient of parameter `index`."""
        param = handle.entries[index].unsharded
        has_come = index in self._accumulated.get(handle, ())
        if param is None or not param.requires_grad or has_come:
            return False
        try:
            return will_run_node(get_gradient_edge(param).node)
        except RuntimeError:  # autograd.grad() with respect to the parameter
            return True

    def has_accumulating_rank(self, handle: FlatParamHandle) -> bool:
        """Return whether the flags of a handle say that any rank accumulates gradients; waits."""
        flags = self.pending.get(handle)
        if flags is None:
            return False
        accumulates, *_ = flags.finish()[0]
        if not accumulates:
            del self.pending[handle]
            self._in_flight.remove(flags)
        return bool(accumulates)

    def collect(self, *, is_ending: bool) -> None:
        """Wait for reductions and flags that have overlapped with a unit's compute.

        Two-stage reductions get two units, unless the backward is ending. [Note: Two stages]
        """
        for handle, flags in list(self.pending.items()):
            group = handle.shard_group
            self._ages[handle] += 1
            has_second_stage = group.size > 1 and bool(group.replicate_groups)
            if has_second_stage and self._ages[handle] == 1 and not is_ending:
                continue
            handle.grads.finish()
            _, *statuses = flags.finish()[0]
            del self.pending[handle]
            self._in_flight.remove(flags)
            if max(statuses) != _MAY_CHANGE:
                self.ready.append((handle, [bool(status) for status in statuses]))

    def publish(self) -> Iterator[FlatParamHandle]:
        """Publish the gradients that are ready; yield each handle when its hooks are to run."""
        ready, self.ready = self.ready, []
        for handle, used in ready:
            handle.grads.publish(used)
            # Allow writes from here on: this backward no longer needs the parameters.
            handle.guard.set_in_backward(False)
            self._delivered[handle] = handle.guard.num_writes
            yield handle

    def check_not_delivered(self, handle: FlatParamHandle, index: int) -> None:
        """Check that no gradient arrives after hooks have run, as in a nested backward."""
        if handle in self._delivered:
            raise RuntimeError(
                f"a gradient of parameter '{handle.entries[index].label}' came after the hooks on "
                "its unit (register_post_accumulate_grad_hook) had run. Pass use_reentrant=False "
                "to torch.utils.checkpoint, and run no backward inside a backward."
            )

    def check_not_written(self, handles: list[FlatParamHandle]) -> None:
        """Check that hooks have not changed parameters with which a forward runs again."""
        for handle in handles:
            if self._delivered.get(handle, handle.guard.num_writes) != handle.guard.num_writes:
                raise RuntimeError(
                    f"unit '{handle.name}' is computed again in a backward whose hooks "
                    "(register_post_accumulate_grad_hook) have stepped its parameters. Checkpoint "
                    "units one by one, or step the optimizer after backward() has returned."
                )
