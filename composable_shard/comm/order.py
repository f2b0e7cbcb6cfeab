"""The collectives that this rank has issued on each process group, in order.

[Note: Identity of a collective]
Backends match collectives only by their order. If ranks run units in different orders, or one rank
calls a function that the others don't, they would compute with wrong values or wait for ever. So
every collective has an identity, a 32-bit number that is the same on all ranks: a hash of its
purpose ("the forward gather of unit 'layers.1'"), its kind and its bytes.

- Messages from rank to rank carry identity and position in their tags, so messages of different
collectives never match. Ranks that differ wait and then find out why, [Note: Watch], instead of
reading wrong values or aborting because sizes differ.

- Collectives of a backend, such as NCCL, carry no identity. In the first steps the ranks exchange
identities before each of them. [Note: First steps] Gloo aborts the process if sizes differ, so
ranks always exchange identities before its collectives.

- Each backward compares a digest of the collectives since the last backward, before it publishes
gradients. [Note: Digest of a step]
"""

from __future__ import annotations

import zlib
from array import array
from collections import Counter, deque
from collections.abc import Iterable
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

# By identity. A program has few different collectives.
_known: dict[int, tuple[str, str, int]] = {}  # the arguments of `identify`
_of_steps: set[int] = set()
_OF_STEP = 1 << 32


def identify(what: str, kind: str, nbytes: int, *, is_of_step: bool = False) -> int:
    """Return the identity of a collective, see [Note: Identity of a collective].

    Args:
        what: Its purpose.
        kind: The kind of collective; "" for a setting, `enter_setting`.
        nbytes: Of the full-size payload.
        is_of_step: All data-parallel ranks issue it in their steps, [Note: Digest of a step].
    """
    identity = zlib.crc32(_text(what, kind, nbytes).encode())
    if is_of_step:
        # Without bytes: copies of a shard may have different padding in their groups.
        identity += _OF_STEP * (zlib.crc32(what.encode()) | 1)
        if kind:
            _of_steps.add(identity)
    _known[identity] = what, kind, nbytes
    return identity


def describe(identity: int) -> str:
    """Return the purpose, kind and bytes that `identify` got."""
    return _text(*_known[identity]) if identity in _known else "a collective"


def _text(what: str, kind: str, nbytes: int) -> str:
    return f"{what} ({kind} of {nbytes} bytes)" if kind else f"{what} (a setting)"


class GroupOrder:
    """The collectives that this rank has issued on one process group, by their identities."""

    def __init__(self) -> None:
        self.issued: list[int] = []  # since the last `fold`
        self.num_folded = 0  # how many came before
        self.failure: str | None = None  # why no further collective can succeed
        self.has_told = False  # whether that was raised
        self.timeout: timedelta | None = None  # of its messages; None for the group's
        # Formed by `fully_shard` so far, by the names of all groups that a unit goes over
        self.num_units: Counter[tuple[str, ...]] = Counter()
        # What was started last, for `wait_for_interrupted`; an interrupt's traceback keeps it
        self.posted: ReferenceType[Waitable] | None = None
        self.last_step: list[int] = []  # of the last step, what all data-parallel ranks issue
        # Whether identities are exchanged before a backend's collectives, and before gloo's [Note:
        # First steps]
        self.is_exchanged = self.is_checked = True
        self._is_always_exchanged = self._is_always_checked = False
        self._agreed: set[int] = set()  # on all ranks, since exchanges began the last time
        self._num_again = 0  # how many since the last one that was new to these
        self._num_known = 0
        # By models: the kinds of optimizers of which the ranks have different numbers
        self.left_out: dict[object, set[tuple[str, int]]] = {}
        self.has_news = False  # whether the step before the last `fold` has issued something new
        self._late: deque[tuple[Any, Tensor, torch.Event]] = deque()
        self._recent: list[int] = []

    def enter(self, identity: int) -> None:
        """Enter a collective that is issued now."""
        if len(self.issued) > MAX_ISSUED:
            self.fold()
        self.issued.append(identity)

    def fold(self) -> int:
        """Begin the record of a new step; return a digest of the last one."""
        self.last_step = [identity for identity in self.issued if identity >= _OF_STEP]
        digest = zlib.crc32(array("Q", [each >> 32 for each in self.last_step]).tobytes())
        before, self._num_known = self._num_known, len(_of_steps)
        self.has_news = before < self._num_known
        self.num_folded += len(self.issued)
        self._recent = (self._recent + self.issued)[-_NUM_RECENT:]
        self.issued.clear()
        return digest

    def count_agreed(self) -> None:
        """Count the last identity, which all ranks have exchanged and which is the same."""
        identity = self.issued[-1]
        if identity not in self._agreed:
            self._agreed.add(identity)
            self._num_again = 0
        self._num_again += 1
        is_over = self._num_again > 2 * len(self._agreed)
        self.is_exchanged = self._is_always_exchanged or not is_over
        self.is_checked = self.is_exchanged or self._is_always_checked

    def check_always(self) -> None:
        """Keep exchanging identities, because some collectives of the group run on gloo."""
        self._is_always_checked = self.is_checked = True

    def exchange_again(self, *, always: bool = False) -> None:
        """Exchange identities from now on; call on all ranks at one point of the order."""
        self.is_exchanged = self.is_checked = True
        self._agreed.clear()
        self._num_again = 0
        self._is_always_exchanged = self._is_always_exchanged or always

    def delayed(self, step: Any, received: Tensor) -> tuple[Any, Tensor] | None:
        """Return a step and the ranks' joined digest of it, on the CPU; None while it is not there.

        From an accelerator it comes `LATE_STEPS` later. All ranks must act on it in the same step,
        so the host waits if the device is further behind.
        """
        if received.device.type == "cpu":
            return step, received
        if is_capturing(received.device):
            return None  # events can't be queried during capture
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
        """Number of collectives that this rank has issued on the group."""
        return self.num_folded + len(self.issued)

    def recent(self) -> list[tuple[int, int, str]]:
        """Return the last collectives: number on the group, number in the step, description."""
        issued = (self._recent + list(self.issued))[-_NUM_RECENT:]
        first, folded = self.num_issued - len(issued), self.num_folded
        return [
            (number, number - folded + 1, describe(identity))
            for number, identity in enumerate(issued, first)
        ]


# By group, not by name: a name is used again after destroy_process_group.
_orders: WeakKeyDictionary[dist.ProcessGroup, GroupOrder] = WeakKeyDictionary()


def order_of(group: dist.ProcessGroup) -> GroupOrder:
    """Return the order of collectives of a process group."""
    order = _orders.get(group)
    if order is None:
        order = _orders[group] = GroupOrder()
    return order


def all_orders() -> list[tuple[dist.ProcessGroup, GroupOrder]]:
    """Return the groups on which this rank has issued collectives."""
    return list(_orders.items())


def has_failed(group: dist.ProcessGroup) -> bool:
    """Return whether a group is closed, because its ranks were out of step or one is gone."""
    return order_of(group).failure is not None


def exchange_always(groups: Iterable[dist.ProcessGroup]) -> None:
    """Exchange identities before each collective of a backend; call on all ranks at one point."""
    for group in groups:
        order_of(group).exchange_again(always=True)


def enter_setting(what: str, groups: Iterable[dist.ProcessGroup]) -> None:
    """Enter a call that all ranks must make, although it sends nothing, into the order.

    If a rank does not make it, the ranks differ in the next message or digest.
    """
    identity = identify(what, "", 0, is_of_step=True)
    for group in dict.fromkeys(groups):
        if group.size() > 1:
            order_of(group).enter(identity)
