"""The order of reductions that all ranks agree on, kept from backward to backward.

[Note: Agreed order]
Under `SHARD_OPTIM` and `NO_SHARD` gradients lie in a persistent buffer, so their reductions can
wait for each other. All ranks reduce them in one order, even if they ran their units in different
orders or skipped some. The values equal DistributedDataParallel's.

- At first the order is the reverse of the units' order, as in most backwards. A handle is reduced
  once it is ready and all handles before it have been reduced.
- A backward expects the handles that any rank used in one of the last two backwards; the first two
  expect all. At its end it reduces the expected handles that it has not reached, as zeros, even if
  this rank has no gradient at all: other ranks may have some. The flags that follow show which
  other handles any rank has used. These are reduced last.
- The flags carry a digest of the order in which the handles were ready. If all ranks had the same
  order, it becomes the agreed one.

Handles that have hooks on gradients keep the order of their backward.
"""

from __future__ import annotations

import weakref
import zlib
from array import array
from collections.abc import Sequence
from typing import Any, ClassVar

from composable_shard.comm import Proposal
from composable_shard.flat_param import FlatParamHandle
from composable_shard.runtime.phases import Phase
from composable_shard.runtime.reduction_queue import Ending, Item, Order, ReductionQueue
from composable_shard.runtime.stage import READY

_HandleRef = weakref.ref[FlatParamHandle]


class ReductionOrder:
    """The agreed order of a tree's reductions, kept between backwards. [Note: Agreed order]"""

    def __init__(self) -> None:
        self._order: list[_HandleRef] = []
        # Handles used in the last backward and in the one before; None: not known, so expect all.
        self._used: tuple[set[_HandleRef] | None, ...] = (None, None)

    def arrange(self, handles: Sequence[FlatParamHandle]) -> list[FlatParamHandle]:
        """Return the tree's handles with persistent gradients in the agreed order."""
        known = set(handles)
        order = [each for ref in self._order if (each := ref()) is not None and each in known]
        if len(order) == len(handles):
            return order
        self._order, self._used = [weakref.ref(handle) for handle in handles], (None, None)
        return list(handles)

    def expects(self, handle: FlatParamHandle) -> bool:
        """Return whether any rank used a handle in the last two backwards, or may have."""
        ref = weakref.ref(handle)
        return any(used is None or ref in used for used in self._used)

    def note_used(self, handles: Sequence[FlatParamHandle]) -> None:
        """Note the handles that any rank has used in a backward; the same on all ranks."""
        self._used = {weakref.ref(handle) for handle in handles}, self._used[0]

    def propose(self, handles: Sequence[FlatParamHandle]) -> Proposal:
        """Return the order in which this rank's handles were ready, for all ranks to compare."""
        ready = [weakref.ref(handle) for handle in handles]
        positions = {ref: index for index, ref in enumerate(self._order)}
        digest = zlib.crc32(array("L", [positions[ref] for ref in ready]).tobytes())
        return Proposal(digest, lambda: self._take_over(ready))

    def _take_over(self, ready: Sequence[_HandleRef]) -> None:
        self._order = list(dict.fromkeys([*ready, *self._order]))


class AgreedOrder(Order):
    """Handles whose gradients have a persistent buffer, in one backward. [Note: Agreed order]"""

    place: ClassVar[int] = 3
    keeps_order: ClassVar[bool] = True

    def __init__(self, queue: ReductionQueue) -> None:
        super().__init__(queue)
        self._known: ReductionOrder = queue.context.kept.setdefault(AgreedOrder, ReductionOrder())
        # Reduced by all ranks, and not issued yet: items, or what stands for several
        self._expected: list[Any] = []
        self._over: dict[Item, None] = {}  # in the order in which this rank was ready

    def take(self) -> None:
        """Become the order of the handles that are reduced, and arrange them."""
        queue, states = self.queue, dict.fromkeys(item.state for item in self.queue.items.values())
        handles = [
            handle
            for state in reversed(states)
            for handle in state.handles
            if handle.grads.is_persistent and queue.items[handle].order.may_be_ordered
        ]
        for handle in self._known.arrange(handles):
            item = queue.items[handle]
            if item.is_reduced and handle.requires_grad:
                item.order = self.weak
                queue.ordered.append(item)
        expected = [item for item in queue.ordered if self._known.expects(item.handle)]
        self._expected = queue.divide(expected)

    def end(self, item: Item) -> None:
        """Note that a handle can be reduced; it is ready, even if it was reduced before."""
        for each in self.queue.watchers:
            each.precede(item)
        if self.queue.brings_gradients:
            self.make_ready(item)

    def make_ready(self, item: Item, *, before_end: bool = False) -> None:
        """Note that a handle is ready; reduce those that are ready and first."""
        queue = self.queue
        if item in queue.issued:
            # By the call that the backward reached before: the same on all ranks, unless asked for.
            if not queue.asks_for_late and not item.had_all:
                queue.issue(item)
        else:
            item.stage = READY
            self._over[item] = None
            while self._expected and self._expected[0].stage is READY:
                queue.issue(self._expected.pop(0))

    def _join(self, ending: Ending) -> None:
        """Reduce the handles that all ranks expect and that this rank has not reduced."""
        if self.queue.ordered:
            ending.backward.end_ordered()
            while self._expected:
                self.queue.issue(self._expected.pop(0))

    def _propose(self, ending: Ending) -> None:
        """Propose the order in which handles were ready here, for all ranks to compare."""
        if self.queue.ordered:
            ending.proposal = self._known.propose([item.handle for item in self._over])

    def _note_used(self, ending: Ending) -> None:
        """Note what any rank has used, for what the next backwards expect."""
        if self.queue.brings_gradients and self.queue.ordered:
            pairs = zip(ending.items, ending.flags.finish(), strict=True)
            found = [item.handle for item, used in pairs if any(used) and item.order.keeps_order]
            self._known.note_used(found)

    acts: ClassVar = {Phase.JOIN: _join, Phase.FLAGS: _propose, Phase.LAST: _note_used}
