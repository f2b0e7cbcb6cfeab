"""Reads of shards that come later than the call that asked for them.

[Note: Late reads]
A save in the background reads what training is about to overwrite. A shard may be read late if
every way to write to it leads through code of ours, which makes the read first: ops on shards, and
the functions that call `WriteGuard.wait_for_reads`, or `LateReads.make` for gradients, which a
program may save too. So no other tensor may share its memory, and no program may have got hold of
it: by `to_local()`, by its address, or as a compiler does. Whoever comes first makes a read, the
thread of the save or the write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from composable_shard.torch_private import storage_of, storage_uses_of


class LateReads:
    """The reads that a write has to make first, by the storage that they read.

    Attributes:
        are_there: Whether there are any; to ask costs no call.
    """

    are_there = False

    def __init__(self) -> None:
        self._reads: dict[int, Callable[[], None]] = {}

    def begin(self, reads: dict[int, Callable[[], None]]) -> None:
        """Note reads to come."""
        self._reads, self.are_there = reads, True

    def end(self) -> None:
        """Forget them, for they have been made."""
        self._reads, self.are_there = {}, False

    def make(self, local: Tensor) -> None:
        """Make the reads of a shard's local tensor that are still to come."""
        read = self._reads.get(storage_of(local))
        if read is not None:
            read()


LATE_READS = LateReads()


def hand_out(local: Tensor, guard: Any) -> None:
    """Note that a program gets at a shard's memory, to which it may write as it likes."""
    if guard is not None:
        guard.set_handed_out()  # of all aliases, and of the handle's other parameters
    else:
        # On the storage: a row, and a view as another dtype, have a local tensor of their own.
        local.untyped_storage().was_handed_out = True  # type: ignore[attr-defined]
    if LATE_READS.are_there:
        LATE_READS.make(local)


def is_alone_in_memory(local: Tensor) -> bool:
    """Return whether a local tensor without guard is the only way to its memory."""
    was_handed_out = getattr(local.untyped_storage(), "was_handed_out", False)
    return not was_handed_out and storage_uses_of(local) == 1 and not local.is_shared()
