"""Reductions of neighbouring units that are issued as one.

[Note: Launched reductions]
Where the backend groups collectives, [Note: Launches], reductions of small units wait for the next
ones. They have no more than `MAX_LAUNCH_NBYTES` together, one group, and no comm hook.

- In the agreed order the expected handles are divided into batches when the backward begins. A
  batch is ready when all of its handles are. Their buffers stay anyway, so this takes no memory.
- Otherwise a handle that is over waits until the next one would not fit, and at most until the
  backward ends. What waits has at most half of the unit's `prefetch_nbytes`, and so has what is in
  flight: with the default 2 MiB each.

All ranks make the same batches: units end at the same points of all backwards, as the
[Note: End of a unit] says. Where a handle opens again, what waits is reduced first, so that no
gradient comes into an earlier sum than it would alone. Not so in the agreed order: there a late
gradient, as of a backward inside a hook, joins the sum that waits. Nothing in a backward waits for
a reduction that has not started, and the end of the backward starts those that are left before any
rank waits for another.

Reductions start alone in backwards whose gradients may come late or are published early: those with
regions that run again, with buckets, or with hooks on sharded parameters, [Note: Early gradients].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from composable_shard.comm import MAX_LAUNCH_NBYTES, Launch
from composable_shard.runtime.reduction_queue import Item, ReductionQueue
from composable_shard.runtime.stage import OPEN, READY, Stage
from composable_shard.runtime.unit import ShardState, TreeContext


@dataclass(frozen=True, eq=False)
class Batch:
    """Handles that are reduced by one launch."""

    items: Sequence[Item]

    @property
    def stage(self) -> Stage:
        """READY if all are."""
        return READY if all(item.stage is READY for item in self.items) else OPEN


class _Launching(ReductionQueue):
    """Reductions of which some are issued together."""

    def __init__(self, context: TreeContext) -> None:
        super().__init__(context)
        self._last: Sequence[Item] = ()  # issued last

    def end_last(self) -> None:
        """Wait until the reductions issued last no longer need their buffers."""
        for item in self._last:
            item.handle.grads.free_input()

    def _launch(self, items: Sequence[Item]) -> None:
        # What is in flight ends here: each reduction alone would end the one before it.
        self.end_last()
        self._last = ()
        context, streams = self.context, self.context.streams
        group = _group_of(items[0])
        if len(items) == 1 or group is None:
            super().issue(items[0])
        else:
            launch = Launch(
                group, context.device, what="reductions", number=len(items), streams=streams
            )
            try:
                with launch as self._streams:
                    for item in items:
                        super().issue(item)
            finally:
                launch.close()
            self._streams = streams
        self._last = items


class LaunchedReductions(_Launching):
    """Reductions in the order of the units' ends: small ones wait for the next ones."""

    def __init__(self, context: TreeContext) -> None:
        super().__init__(context)
        self._waiting: dict[Item, None] = {}  # over, to be reduced with the next ones
        self._total = 0  # bytes of these
        self._may_wait = False

    def begin(self, states: Sequence[ShardState]) -> None:
        """Enter the tree's handles."""
        super().begin(states)
        self._may_wait = self.are_due_at_end()

    def issue(self, item: Item, **how: bool) -> None:
        """Start a reduction, now or with the next ones."""
        if self._may_wait and not self.is_ending:
            self._add(item)
        else:
            super().issue(item, **how)
            self._last = (item,)

    def reopen(self, item: Item, *, is_reached: bool) -> None:
        """Reduce what waits, if the handle is among it, before more of its gradients come."""
        if item in self._waiting:
            self._launch_waiting()
        super().reopen(item, is_reached=is_reached)

    def note_end(self) -> None:
        """Reduce what waits, as the backward ends."""
        super().note_end()
        self._launch_waiting()

    def _add(self, item: Item) -> None:
        if item in self._waiting:
            return
        item.stage = READY
        # Now, while its full parameters are shown: users' edits of them are found here.
        item.handle.grads.pack_rest(may_overwrite=not item.keeps_values)
        nbytes, group = item.handle.grads.reduction.nbytes, _group_of(item)
        limit = min(MAX_LAUNCH_NBYTES, item.state.options.prefetch_nbytes // 2)
        fits = self._total + nbytes <= limit
        if self._waiting and not (fits and group is _group_of(next(iter(self._waiting)))):
            self._launch_waiting()
        self._waiting[item] = None
        self._total += nbytes
        if group is None or nbytes > limit:
            self._launch_waiting()

    def _launch_waiting(self) -> None:
        items, self._waiting, self._total = tuple(self._waiting), {}, 0
        if items:
            self._launch(items)


class LaunchedBatches(_Launching):
    """Reductions in the agreed order, divided into batches when the backward begins."""

    def divide(self, items: Sequence[Item]) -> list[Any]:
        """Return the items in order, neighbours that are reduced together as batches."""
        return _divide(items) if self.are_due_at_end() else list(items)

    def issue(self, item: Item | Batch, **how: bool) -> None:
        """Start reductions."""
        if isinstance(item, Batch):
            self._launch(item.items)
        else:
            super().issue(item, **how)
            self._last = (item,)


def _group_of(item: Item) -> dist.ProcessGroup | None:
    grads = item.handle.grads
    # Terms of a sum would be in memory that other reductions of the launch use too.
    is_summed_here = grads.packing is None or grads.reduction.num_terms > 0
    return None if is_summed_here else grads.reduction.group


def _divide(items: Sequence[Item]) -> list[Item | Batch]:
    """Return the items in order, neighbours that are reduced together as batches."""
    batches: list[list[Item]] = []
    total, last = 0, None
    for item in items:
        nbytes, group = item.handle.grads.reduction.nbytes, _group_of(item)
        total += nbytes
        if group is not None and group is last and total <= MAX_LAUNCH_NBYTES:
            batches[-1].append(item)
        else:
            batches.append([item])
            total = nbytes
        last = group
    return [Batch(each) if len(each) > 1 else each[0] for each in batches]
