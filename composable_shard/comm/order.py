"""Which collectives this rank has issued on each process group, in order.

[Note: Identity of a collective]
Collectives match by their order alone. Ranks that run units in another order, or of which one
calls a function that the others don't, would compute with the wrong values, or wait for each other.
So every collective has an identity: what it is for ("the forward gather of unit 'layers.1'"), its
kind and its bytes, in short a number of 32 bits, the same on all ranks.

- Messages from rank to rank carry identity and position in their tags. Messages of different
  collectives never meet: instead of wrong values, or of an abort where the sizes differ, the ranks
  wait, and find out for what: [Note: Watch].

- Collectives of a backend, as NCCL's, carry nothing. In the first steps the ranks exchange
  identities before each of them. [Note: First steps] Gloo's abort the process where sizes differ,
  so there the ranks always exchange them.

- Each backward compares a digest of what was issued since the last one, before it publishes
  gradients. [Note: Digest of a step]
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard.comm.devices import Waitable, is_capturing

LOWEST_TAG = 1 << 20  # out of the way of tags that users choose
NUM_TAGS = (1 << 31) - LOWEST_TAG
MAX_ISSUED = 1 << 16  # between two backwards: a program may only evaluate
_NUM_RECENT = 64
LATE_STEPS = 2  # with one the host would wait for the device in most steps

# By identity. There are as many as a program has collectives of different kinds.
_known: dict[int, tuple[str, str, int]] = {}  # what `identify` was told
_of_steps: set[int] = set()
_OF_STEP = 1 << 32


def identify(what: str, kind: str, nbytes: int, *, is_of_step: bool = False) -> int:
    """Return the identity of a collective, see [Note: Identity of a collective].

    Args:
        what: What it is for.
        kind: The kind of collective; "" for a setting, `note_setting`.
        nbytes: Of the full-size payload.
        is_of_step: All data-parallel ranks issue it in their steps, [Note: Digest of a step].
    """
    identity = zlib.crc32(_text(what, kind, nbytes).encode())
    if is_of_step:
        # Bytes left out: those of shards that have copies may differ between the copies' groups.
        identity += _OF_STEP * (zlib.crc32(what.encode()) | 1)
        if kind:
            _of_steps.add(identity)
    _known[identity] = what, kind, nbytes
    return identity


def describe(identity: int) -> str:
    """Return what `identify` was told."""
    return _text(*_known[identity]) if identity in _known else "a collective"


def _text(what: str, kind: str, nbytes: int) -> str:
    return f"{what} ({kind} of {nbytes} bytes)" if kind else f"{what} (a setting)"


class GroupOrder:
    """The collectives that this rank has issued on one process group, by their identities."""

    def __init__(self) -> None:
        self.issued: list[int] = []  # since the last `fold`
        self.num_folded = 0  # how many came before
        self.failure: str | None = None  # why no further collective can succeed
        self.timeout: timedelta | None = None  # of its messages; None for the group's
        self.room = MAX_ISSUED  # how long `issued` may get before `make_room` is called
        # What was started last, for `settle`; an interrupt's traceback keeps it
        self.posted: ReferenceType[Waitable] | None = None
        self._before_next: list[Callable[[], object]] = []
        self.last_step: list[int] = []  # of the last step, what all data-parallel ranks issue
        # Whether identities go ahead of a backend's collectives, and of gloo's [Note: First steps]
        self.is_exchanged = self.is_checked = True
        self._is_always_exchanged = self._is_always_checked = False
        self._agreed: set[int] = set()  # on all ranks, since exchanges began the last time
        self._num_again = 0  # how many since the last one that was new to these
        self._num_known = 0
        self.has_news = False  # whether the step before the last `fold` has issued something new
        self._late: deque[tuple[Any, Tensor, torch.Event]] = deque()
        self._recent: list[int] = []

    def note(self, identity: int) -> None:
        """Enter a collective that is issued now."""
        if len(self.issued) > self.room:
            self.make_room()
        self.issued.append(identity)

    def run_before_next(self, run: Callable[[], object]) -> None:
        """Run something before the next collective, which it may issue itself."""
        self._before_next.append(run)
        self.room = -1

    def make_room(self) -> None:
        """Run what comes before the next collective; let `issued` be short."""
        self.room = MAX_ISSUED
        waiting, self._before_next = self._before_next, []
        for run in waiting:
            run()
        if len(self.issued) > self.room:
            self.fold()

    def fold(self) -> int:
        """Begin to count calls anew, as each step does; return a digest of the last ones."""
        self.last_step = [identity for identity in self.issued if identity >= _OF_STEP]
        digest = zlib.crc32(array("Q", [each >> 32 for each in self.last_step]).tobytes())
        before, self._num_known = self._num_known, len(_of_steps)
        self.has_news = before < self._num_known
        self.num_folded += len(self.issued)
        self._recent = (self._recent + self.issued)[-_NUM_RECENT:]
        self.issued.clear()
        return digest

    def note_agreed(self) -> None:
        """Note that all ranks are about to issue the last collective: exchanged, and the same."""
        identity = self.issued[-1]
        if identity not in self._agreed:
            self._agreed.add(identity)
            self._num_again = 0
        self._num_again += 1
        is_over = self._num_again > 2 * len(self._agreed)
        self.is_exchanged = self._is_always_exchanged or not is_over
        self.is_checked = self.is_exchanged or self._is_always_checked

    def check_always(self) -> None:
        """Let `is_checked` be: some collectives of the group are gloo's."""
        self._is_always_checked = self.is_checked = True

    def exchange_again(self, *, always: bool = False) -> None:
        """Exchange identities from now on; call on all ranks at one point of the order."""
        self.is_exchanged = self.is_checked = True
        self._agreed.clear()
        self._num_again = 0
        self._is_always_exchanged = self._is_always_exchanged or always

    def take_late(self, step: Any, received: Tensor) -> tuple[Any, Tensor] | None:
        """Return a step and what the ranks have sent of it, on the CPU; None where it is to come.

        From an accelerator it comes `LATE_STEPS` late. All ranks must act on it in one step, so
        the host does wait where the device is further behind than that.
        """
        if received.device.type == "cpu":
            return step, received
        if is_capturing(received.device):
            return None  # no event may be asked
        host = torch.empty_like(received, device="cpu", pin_memory=True)
        host.copy_(received, non_blocking=True)
        event = torch.Event(received.device)
        event.record()
        self._late.append((step, host, event))
        if len(self._late) <= LATE_STEPS:
            return None
        step, host, event = self._late.popleft()
        if not event.query():
            event.synchronize()
        return step, host

    @property
    def num_issued(self) -> int:
        """How many collectives this rank has issued on the group."""
        return self.num_folded + len(self.issued)

    def recent(self) -> list[tuple[int, int, str]]:
        """Return the last collectives: number on the group, call of the step, what it is."""
        issued = (self._recent + list(self.issued))[-_NUM_RECENT:]
        first, folded = self.num_issued - len(issued), self.num_folded
        return [
            (number, number - folded + 1, describe(identity))
            for number, identity in enumerate(issued, first)
        ]


# By group: not by its name, which comes again after destroy_process_group.
_orders: WeakKeyDictionary[dist.ProcessGroup, GroupOrder] = WeakKeyDictionary()


def order_of(group: dist.ProcessGroup) -> GroupOrder:
    """Return what this rank has issued on a process group."""
    order = _orders.get(group)
    if order is None:
        order = _orders[group] = GroupOrder()
    return order


def all_orders() -> list[tuple[dist.ProcessGroup, GroupOrder]]:
    """Return the groups on which this rank has issued collectives."""
    return list(_orders.items())


def before_next_collective(run: Callable[[], object], groups: Iterable[dist.ProcessGroup]) -> None:
    """Run something before what is issued next on any of these groups."""
    for group in dict.fromkeys(groups):
        order_of(group).run_before_next(run)


def exchange_always(groups: Iterable[dist.ProcessGroup]) -> None:
    """Exchange identities before each collective of a backend; call on all ranks at one point."""
    for group in groups:
        order_of(group).exchange_again(always=True)


def note_setting(what: str, groups: Iterable[dist.ProcessGroup]) -> None:
    """Enter into the order of collectives what all ranks must do, though they send nothing.

    If one of them does not, the ranks differ in the next message or digest.
    """
    identity = identify(what, "", 0, is_of_step=True)
    for group in dict.fromkeys(groups):
        if group.size() > 1:
            order_of(group).note(identity)
