"""In which order ranks reduce gradients that have no order of their own.

[Note: Agreed order]
Under `SHARD_OPTIM` and `NO_SHARD` gradients lie in a persistent buffer, so their reductions can
wait for each other. All ranks reduce them in one order, in whichever order each has run its units,
and whichever it has left out: the values are those of DistributedDataParallel.

- The order is that of the units in reverse at first, as in most backwards. A handle is reduced once
  it is over and those before it have been reduced.
- Expected are the handles that any rank used in one of the last two backwards; all of them before.
  At its end a backward reduces the expected ones that it has not reached: they count as zero, also
  in a backward without any gradient of parameters, as other ranks may have some. The flags that
  follow say which others any rank has used. These are reduced last.
- Backwards nested in this one, as reentrant checkpoints run them, may bring a gradient after its
  handle was reduced, and on some ranks only: where any forward ran in such a region, the flags say
  that too, and all ranks reduce the handle once more.
- Beside the flags travels a digest of the order in which the handles were over. If all ranks had
  the same one, they take it over.

A bucket is over when it is full, if it may be reduced before its unit's end, [Note: Buckets].
Handles that have hooks on gradients keep the order of their backward.
"""

from __future__ import annotations

import weakref
import zlib
from array import array
from collections.abc import Sequence
from typing import Any, Protocol

from composable_shard.comm import Proposal
from composable_shard.flat_param import FlatParamHandle
from composable_shard.runtime.buckets import LATE

_HandleRef = weakref.ref[FlatParamHandle]


class _Unit(Protocol):
    """A ShardState: its module imports this one."""

    @property
    def handles(self) -> list[FlatParamHandle]: ...


class ReductionOrder:
    """What the backwards of a tree know of their order, see [Note: Agreed order]."""

    def __init__(self) -> None:
        self._order: list[_HandleRef] = []
        # Used by the last backward, and by the one before it; None: by all, for all that is known.
        self._used: tuple[set[_HandleRef] | None, ...] = (None, None)

    def begin(
        self, units: Sequence[_Unit], reducing: set[FlatParamHandle], *, asks_for_late: bool
    ) -> Turns:
        """Return the turns of the handles that a backward reduces in the agreed order.

        Args:
            units: Of the tree, outermost first.
            reducing: The handles whose gradients are reduced.
            asks_for_late: The flags say which handles have gradients that came after a reduction.
        """
        owners = {
            handle: unit
            for unit in reversed(units)
            for handle in unit.handles
            if handle.grads.is_persistent and not handle.has_early_hooks
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
        """Let the order be that in which handles were over, the same on all ranks."""
        self._order = list(dict.fromkeys([*ended, *self._order]))

    def positions(self, ended: Sequence[_HandleRef]) -> list[int]:
        """Return where handles are in the order."""
        known = {ref: index for index, ref in enumerate(self._order)}
        return [known[ref] for ref in ended]


class Turns(dict[FlatParamHandle, Any]):
    """The handles that a backward reduces in the agreed order, each with its unit.

    Attributes:
        asks_for_late: The flags say which handles have gradients that came after a reduction.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asks_for_late = False
        self._order = ReductionOrder()
        self._queue: list[FlatParamHandle] = []  # expected, and not reduced yet
        self._reduced: set[FlatParamHandle] = set()
        self._ended: dict[FlatParamHandle, None] = {}
        self._at_end: set[FlatParamHandle] = set()

    def expect(self, order: ReductionOrder, handles: list[FlatParamHandle]) -> None:
        """Take the handles that are reduced whether or not this rank has gradients of them."""
        self._order, self._queue = order, handles

    def take(self, handle: FlatParamHandle) -> list[FlatParamHandle]:
        """Note that a handle is over; return the handles whose turn it is now.

        One that has been reduced has another turn at once, whether or not this rank has a gradient;
        but none after `rest` has returned it, when all gradients had come, or if the flags tell.
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
        """Return the expected handles whose turn has not come, as the backward ends."""
        due, self._queue = self._queue, []
        self._reduced.update(due)
        self._at_end.update(due)
        return due

    def last(
        self, handles: Sequence[FlatParamHandle], used: Sequence[Sequence[int]]
    ) -> list[FlatParamHandle]:
        """Return the handles whose turn is after the flags: any rank has used them, or late.

        Args:
            handles: Those with flags.
            used: Their flags.
        """
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


NO_TURNS = Turns()  # of a tree without such handles
