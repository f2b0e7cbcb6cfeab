"""Which flat parameters of a unit are reduced before the unit's end.

[Note: Buckets]
With a cap on the size of a reduction, a unit's parameters are cut into buckets, the last ones
first. Each bucket is a handle of its own. A bucket is full when autograd has accumulated all its
gradients. Another rank may reach that point later, or never, but all ranks must issue the same
collectives in the same order. So a bucket is reduced early only

- after the buckets before it in the order in which the unit's end would reduce them, and
- while no other collective can come before that end: the backward has reached the first call of
  the unit, no other unit ran inside that call, and no other sharded tree has a graph: outputs that
  wait for a backward, or what a backward left, retained or of another forward, until parameters
  are written. In a region of non-reentrant checkpointing the recomputation might gather other
  units; and
- if no hook waits for its gradients, see [Note: Early gradients].

These are facts of the forward, the same on all ranks. Where they do not hold, buckets wait for the
unit's end. A rank that reduces early waits for the others in the middle of its backward; they must
take part even if they have no gradient at all. So each backward begins with a flag reduction that
tells whether any rank accumulates gradients; only ranks that do not accumulate wait for it. At the
end of the backward the remaining buckets are reduced before anyone waits for anything else.

Where gradients lie in a persistent buffer, a bucket that is full waits for its turn instead, and
all ranks reduce it anyway: nothing tells ahead, and the ranks may fill buckets in any order.
[Note: Agreed order]

If a backward fails at the same point on all ranks, some may have reduced more buckets than others.
Before the next call, all ranks issue the reductions of that unit that they have not issued, of
those that might have gone early, and drop the results. A bucket that is tied to another unit's
parameters ends with that unit, after them.

A nested backward, as reentrant checkpointing runs it, may accumulate a gradient after its bucket
was reduced. The gradient then stays where autograd put it, and the flags at the end of the backward
tell all ranks to reduce that bucket once more. From then on the unit's buckets wait for its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from composable_shard.flat_param import FlatParamHandle

LATE = 2  # some rank has gradients of a handle that came after its reduction


class Buckets:
    """Progress of the running backward with the buckets of a unit, see [Note: Buckets].

    It outlives a `BackwardPass`: after an abort it says what other ranks may have issued.
    """

    def __init__(self) -> None:
        self._position: int | None = None
        self._queue: list[FlatParamHandle] = []
        self._is_under_way = False
        self._full: set[FlatParamHandle] = set()
        self._issued: set[FlatParamHandle] = set()
        self._is_late = False  # some backward had a gradient after its bucket was reduced

    def reach(self, position: int | None, queue: list[FlatParamHandle]) -> None:
        """Note that the backward has reached a call of the unit.

        Args:
            position: Of that call; None where buckets may not be reduced early.
            queue: The buckets that others may reduce early, in the order in which the unit's end
                reduces them. Garbage may hold another tree on this rank alone.
        """
        self._position, self._queue = position, queue
        self._is_under_way = len(queue) > 0

    @property
    def is_under_way(self) -> bool:
        """Whether some rank may have reduced buckets early, and the unit's end is still to come."""
        return self._is_under_way and not self._is_late

    def take_expected(self) -> list[FlatParamHandle]:
        """Return the buckets that other ranks may have reduced early and this one has not."""
        queue, self._queue = self._queue, []
        return [each for each in queue if each.requires_grad and each not in self._issued]

    def may_go_early(self, handle: FlatParamHandle, position: int) -> bool:
        """Return whether a bucket that is full may be reduced before its unit's end.

        Args:
            handle: The bucket.
            position: Where it ends in the running backward.
        """
        return position == self._position and not self._is_late and not handle.has_early_hooks

    def fills(self, handle: FlatParamHandle, index: int) -> bool:
        """Count the gradient of parameter `index` of a bucket; return whether that made it full."""
        if not handle.grads.awaited.count(index):
            return False
        self._full.add(handle)
        return True

    def take_full(self, queue: Iterable[FlatParamHandle]) -> Iterator[FlatParamHandle]:
        """Yield the full buckets whose turn it is.

        Args:
            queue: The unit's buckets in the order in which its end reduces them.
        """
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
        self._is_under_way = False
        was_issued = handle in self._issued
        self._issued.discard(handle)
        self._full.discard(handle)
        handle.grads.awaited.reset()
        return was_issued

    def note_late(self) -> None:
        """Note that some rank had a gradient that came after its bucket had gone."""
        self._is_late = True

    def reset(self) -> None:
        """Forget the backward, which is over."""
        self._position, self._is_under_way, self._queue = None, False, []
        self._full.clear()
        self._issued.clear()
