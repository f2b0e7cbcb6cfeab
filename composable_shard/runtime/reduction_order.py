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

from composable_shard.comm import Proposal
from composable_shard.flat_param import FlatParamHandle

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
