"""Buckets: parts of a unit that may be reduced before its end, and when.

[Note: Buckets]
With a cap on the size of a reduction, a unit's parameters are cut into buckets, the last ones
first. Each bucket is a handle of its own, and ready when autograd has accumulated all its
gradients. Another rank may fill a bucket later, or never. So a bucket is reduced before its unit's
end only

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
"""

from __future__ import annotations

from typing import Any, ClassVar

from composable_shard.comm import FlagReduction
from composable_shard.runtime.phases import Phase
from composable_shard.runtime.reduction_queue import Ending, Item, Order, ReductionQueue
from composable_shard.runtime.stage import READY
from composable_shard.runtime.unit import ShardState


class Buckets(Order):
    """Buckets of units, [Note: Buckets].

    Attributes:
        window: Number of the call whose buckets may be reduced before its unit's end, or None.
    """

    place: ClassVar[int] = 1
    is_watching: ClassVar[bool] = True

    def __init__(self, queue: ReductionQueue) -> None:
        super().__init__(queue)
        self._items: list[Item] = []  # that this backward reduces, whichever order they get
        self.window: int | None = None

    def take(self) -> None:
        """Become the order of the buckets that are reduced."""
        queue = self.queue
        for item in queue.items.values():
            if _has_buckets(item.state):
                item.is_counted = True
                if item.is_reduced:
                    item.order = self.weak
                    self._items.append(item)
        queue.asks_for_late = queue.asks_for_late or bool(self._items)

    def begin(self) -> None:
        """Let all ranks know whether any of them accumulates gradients.

        Issues one all-reduce of a byte for each process group with buckets that aren't in a fixed
        order.
        """
        handles = [item.handle for item in self._items if not item.order.keeps_order]
        groups = {handle.shard_group.joint_groups: handle.shard_group for handle in handles}
        if not groups:
            return
        queue, own = self.queue, int(self.queue.brings_gradients)
        flags = FlagReduction([(group, [own]) for group in groups.values()], highest=1)
        queue.context.flag_reductions.append(flags)
        if not own:
            queue.brings_gradients = any(any(values) for values in flags.finish())
        queue.is_sure = queue.brings_gradients

    def reach(self, state: ShardState, call: int, *, runs_alone: bool) -> None:
        """Open the window of a unit, as the backward reaches one of its calls."""
        if _has_buckets(state):
            items = self.queue.items
            is_sure = self.queue.is_sure or not any(
                handle.requires_grad and not items[handle].order.keeps_order
                for handle in state.handles
            )
            self.window = call if runs_alone and is_sure else None

    def fill(self, item: Item, backward: Any) -> None:
        """Reduce the buckets that are ready and first, as all gradients of one have come."""
        # One that was reduced after a later call waits for the end: where a rank has no gradient
        # from this call, its end reduces nothing. One whose hooks wait has their order.
        is_open = item.ends_with == self.window and item not in self.queue.issued
        if is_open and (item.order is self.weak or item.order.keeps_order):
            item.stage = READY
            for each in backward.ready_with(item):
                if each.stage is READY:
                    each.order.make_ready(each, before_end=True)

    def _join(self, ending: Ending) -> None:
        """Reduce what is left now if other ranks may have: they do if they know of gradients."""
        if self.queue.is_sure:
            ending.backward.reduce_rest(ending)

    acts: ClassVar = {Phase.JOIN: _join}


def _has_buckets(state: ShardState) -> bool:
    return state.options.bucket_cap_mb is not None
