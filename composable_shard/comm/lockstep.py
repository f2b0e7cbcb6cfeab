"""Which collectives this rank has issued, and what all ranks do when one fails.

[Note: Watch]
A thread looks twice a second whether this rank issues collectives. When none has come for a second,
it writes into the store of the default process group what the rank last issued and which line of
the program runs: its statement. It also answers when another rank asks. A rank whose collective
fails asks, waits a few seconds for the statements, and raises an error made of all of them: the
same on each rank. A rank that does not answer is gone.

Where statements show two different collectives at the same position of a process group, its ranks
wait for each other for good. Then the thread closes the group's connections, so that all of them
raise at once and not at the group's timeout. With a backend that can't do that it logs the error.
So do ranks that wait for one that has failed since in a group that they are not in, as on a mesh
of several axes, and has issued nothing after it: all raise its error.

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
  so there the ranks exchange them later too, before what has not always followed what came before.

- Each backward compares a digest of what was issued since the last one, before it publishes
  gradients. [Note: Digest of a step]

Where no unit is what a collective is for, it is the function that the program has called: the
frames of the interpreter tell. A function's name comes with those of its arguments that are
numbers and flags, because all ranks must give them alike: `clip_grad_norm_(max_norm=1.0)` on one
rank and `clip_grad_norm_(max_norm=2.0)` on another are two different collectives. Strings such as
paths, and tensors, may differ.
"""

from __future__ import annotations

import atexit
import json
import logging
import sys
import threading
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any, NoReturn
from weakref import ReferenceType, WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard.comm.devices import HOST, Waitable, backend_name, is_capturing, is_exchange
from composable_shard.torch_private import frames_of_threads, side_store

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
        # Identities go, and may go, ahead of a backend's collectives, [Note: First steps].
        self.is_exchanged = self.is_checked = True
        self._checks_next = False
        # What has followed each, as all ranks know: mostly one
        self._next: dict[int, tuple[int, ...]] = {}
        self._is_always_exchanged = False
        self._agreed: set[int] = set()  # on all ranks, by an exchange
        self._agreed_again: set[int] = set()  # since exchanges began the last time
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
            self._next.clear()
        if identity not in self._agreed_again:
            self._agreed_again.add(identity)
            self._num_again = 0
        known = self._next.get(self._before, ())
        if identity not in known:
            self._next[self._before] = *known, identity
        self._num_again += 1
        is_over = self._num_again > 2 * len(self._agreed_again)
        self.is_exchanged = self._is_always_exchanged or not is_over
        self.is_checked = self.is_exchanged or self._checks_next

    def check_next(self) -> None:
        """Let `is_checked` be, also when identities are not exchanged any more."""
        self._checks_next = self.is_checked = True

    @property
    def _before(self) -> int:
        """What was issued before the last one."""
        issued = self.issued if len(self.issued) > 1 else [*self._recent[-1:], *self.issued]
        return issued[-2] if len(issued) > 1 else 0

    @property
    def is_expected(self) -> bool:
        """Whether ranks that differ would issue a collective of the size of the last one."""
        known = self._next.get(self._before, ())
        return self.issued[-1] in known and len({_known[each][1:] for each in known}) == 1

    def exchange_again(self, *, always: bool = False) -> None:
        """Exchange identities from now on; call on all ranks at one point of the order."""
        self.is_exchanged = self.is_checked = True
        self._agreed_again.clear()
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


_PACKAGE = __name__.partition(".")[0]
_TORCH = torch.__name__
_TRANSPARENT = sys.stdlib_module_names - {"__main__"}
_PLAIN = (bool, int, float)


def find_call(frame: FrameType | None) -> tuple[str, bool, FrameType | None]:
    """Return what a program has called: the function, whether it is ours, and the caller's frame.

    An empty name where it has called neither this library nor torch.
    """
    name, ours = "", None
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package == _PACKAGE:
            # A shard has it that leads lists, on some ranks perhaps: the op is the same.
            ours = ours if frame.f_code.co_name == "__torch_function__" else frame
        elif package == _TORCH:
            name = name or f"{frame.f_code.co_name}()"
        elif package not in _TRANSPARENT:
            break
        frame = frame.f_back
    return name if ours is None else _name_of(ours), ours is not None, frame


def _name_of(frame: FrameType) -> str:
    code, values = frame.f_code, frame.f_locals
    if code.co_name.startswith("__torch_"):
        return f"{values.get('func', code.co_name)}()"
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    given = [f"{name}={values[name]}" for name in names if type(values.get(name)) in _PLAIN]
    return f"{code.co_name}({', '.join(given)})"


def function_called(*, with_arguments: bool = True) -> str:
    """Return the library's function that the program has called.

    With numbers and flags, but not where the ranks are about to compare these.
    """
    name = find_call(sys._getframe(1))[0]
    return name if with_arguments else f"{name.partition('(')[0]}()"


_TICK_S = 0.5
_QUIET_S = 1.0
_ANSWER_S = 4.0
_STORE_S = 3.0  # for requests of the store meanwhile
_LONGEST_PAUSE_S = 30.0
_KEY = "composable_shard"
ADVICE = "All ranks must run the same units and call the same functions, in the same order."

_logger = logging.getLogger(_KEY)
_Statement = dict[str, Any]


class _Watch:
    """The thread of [Note: Watch], and what it shares with the threads that communicate."""

    def __init__(self, world: dist.ProcessGroup, store: dist.Store) -> None:
        self.world = world
        self._rank = world.rank()
        self._store = store
        self._stopped = threading.Event()
        self._since = time.time()
        self._num_answered = self._num_needed = 0
        self._counts: dict[str, int] = {}  # of collectives, by group
        self._used_last: set[str] = set()  # groups on which the last ones were
        self._stated: dict[str, int] | None = None  # the counts that the last statement tells of
        self._failures = {""}  # all that this rank has raised
        self._failed_at, self._failure = self._counts, ""
        # A store may outlive a process group, and serve another one of the same name.
        self._key = f"{_KEY}/{store.add(f'{_KEY}/watches/{self._rank}', 1)}"
        self._next_look_s = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"{_KEY} watch")
        self._thread.start()

    def stop(self, how: str | None = None) -> None:
        """End the thread; leave word of how this rank has ended."""
        self._stopped.set()
        self._thread.join(timeout=2 * _TICK_S)
        if how is not None and not self._thread.is_alive():
            with suppress(RuntimeError):
                self._state(self._num_answered, ended=how)

    def _run(self) -> None:
        # An error of the store means that its rank is gone: nobody can ask any more.
        with suppress(RuntimeError):
            while not self._stopped.wait(_TICK_S) and dist.group.WORLD is self.world:
                self._tick()

    def _tick(self) -> None:
        orders, counts = all_orders(), _counts()
        failures = {order.failure for _, order in orders if order.failure is not None}
        for failure in failures - self._failures:
            self._failed_at, self._failure = counts, failure
        self._failures |= failures
        if counts != self._counts:
            self._used_last = {name for name, n in counts.items() if n != self._counts.get(name, 0)}
            self._counts, self._num_needed = counts, 0
            self._since, self._next_look_s = time.time(), _QUIET_S
        quiet_s = time.time() - self._since
        num_asked = self._store.add(f"{self._key}/asked", 0)
        is_due = quiet_s > _QUIET_S and self._stated != counts
        if num_asked > self._num_answered:
            self._next_look_s = min(self._next_look_s, quiet_s + _QUIET_S)
        if num_asked > self._num_answered or is_due:
            self._state(num_asked)
        if quiet_s > self._next_look_s:
            self._next_look_s = quiet_s + min(quiet_s, _LONGEST_PAUSE_S)
            self._look_for_difference()

    def _state(self, num_asked: int, **more: Any) -> None:
        """Write this rank's statement into the store."""
        function, is_ours, where = _position()
        counts = _counts()
        has_issued = not counts.items() <= self._failed_at.items()  # something since it failed
        statement: _Statement = {
            "answers": num_asked,
            "function": function,
            "is_inside": is_ours,
            "where": where,
            "since": time.strftime("%H:%M:%S", time.localtime(self._since)),
            "groups": {group.group_name: order.recent() for group, order in all_orders()},
            "failure": "" if has_issued else self._failure,
            **more,
        }
        self._store.set(f"{self._key}/{self._rank}", json.dumps(statement))
        self._num_answered, self._stated = num_asked, counts

    def _read(self, ranks: Iterable[int]) -> dict[int, _Statement]:
        keys = {f"{self._key}/{rank}": rank for rank in ranks}
        there = [key for key in keys if self._store.check([key])]
        values = self._store.multi_get(there) if there else []
        return {keys[key]: json.loads(value) for key, value in zip(there, values, strict=True)}

    def _look_for_difference(self) -> None:
        for group, order in all_orders():
            # In a group that is not in use the ranks may have stopped at other places long ago.
            is_used = order.failure is None and group.group_name in self._used_last
            ranks = _ranks_of(group) if is_used else []
            if len(ranks) < 2:
                continue
            statements = self._read(ranks)
            found = _find_difference(group.group_name, statements)
            found = found or self._find_failed_now(group.group_name, statements, order)
            if found is not None:
                self._give_up(set(ranks), self._agree(group, found))

    def _find_failed_now(
        self, name: str, statements: dict[int, _Statement], order: GroupOrder
    ) -> str | None:
        """Return what `_find_failed` does, of ranks that say it while this rank waits for them.

        They may have caught the error, and come to where this rank is, without a word since.
        """
        if self._find_failed(name, statements, order) is None:
            return None
        self._num_needed = self._num_needed or self._store.add(f"{self._key}/asked", 1)
        now = {rank: one for rank, one in statements.items() if one["answers"] >= self._num_needed}
        return self._find_failed(name, now, order)

    def _find_failed(
        self, name: str, statements: dict[int, _Statement], order: GroupOrder
    ) -> str | None:
        """Return why a rank failed that this rank waits for, if it has not failed of that too."""
        known = {own.failure for _, own in all_orders()} | self._failures
        for statement in statements.values():
            issued = statement["groups"].get(name) or [[-1]]
            if statement["failure"] not in known and issued[-1][0] + 1 < order.num_issued:
                return str(statement["failure"])
        return None

    def _give_up(self, ranks: set[int], text: str) -> None:
        """Let all groups of these ranks fail: each of them may wait in another one."""
        for group, order in all_orders():
            own = _ranks_of(group)
            if order.failure is None and len(own) > 1 and ranks.issuperset(own):
                order.failure = text
                _close(group, text)
        self._store.add(f"{self._key}/asked", 1)  # let the others know soon

    def _agree(self, group: dist.ProcessGroup, text: str) -> str:
        """Return the text of the rank that has one first."""
        key = f"{self._key}/failure/{group.group_name}"
        return self._store.compare_set(key, "", text).decode()

    def explain(self, group: dist.ProcessGroup, error: str) -> str:
        """Return a text for the error of a group's collective; in time, whatever the store does."""
        found: list[str] = []
        # Where the network is cut the store does not answer, nor does a request of it fail.
        run = partial(self._ask, group, error, found)
        asking = threading.Thread(target=run, daemon=True, name=f"{_KEY} question")
        asking.start()
        asking.join(_ANSWER_S + _STORE_S)
        lost = "the rank that hosts it (mostly rank 0) is gone, or the network"
        what = f"failed, and the store of the job can't be reached: {lost}. {error}"
        return found[0] if found else f"{_own_position(group)} {what}"

    def _ask(self, group: dist.ProcessGroup, error: str, found: list[str]) -> None:
        """Ask what the ranks of a group do, and enter a text for an error."""
        ranks = dist.get_process_group_ranks(group)
        with suppress(RuntimeError):  # of the store
            num_asked = self._store.add(f"{self._key}/asked", 1)
            self._state(num_asked)
            deadline = time.monotonic() + _ANSWER_S
            while True:
                statements = self._read(ranks)
                silent = [rank for rank in ranks if not _has_answered(statements, rank, num_asked)]
                if not silent or time.monotonic() > deadline:
                    break
                time.sleep(_TICK_S / 5)
            name = group.group_name
            text = _find_difference(name, statements)
            there = {rank: one for rank, one in statements.items() if rank not in silent}
            text = text or self._find_failed(name, there, order_of(group))
            text = text or _describe_missing(name, ranks, statements, silent, error)
            found.append(self._agree(group, text))
            self._store.add(f"{self._key}/asked", 1)


def _has_answered(statements: dict[int, _Statement], rank: int, num_asked: int) -> bool:
    statement = statements.get(rank)
    if statement is None:
        return False
    return statement["answers"] >= num_asked or "ended" in statement


def _counts() -> dict[str, int]:
    """Return how many collectives this rank has issued on each group."""
    return {group.group_name: order.num_issued for group, order in all_orders()}


def _ranks_of(group: dist.ProcessGroup) -> list[int]:
    """Return the global ranks of a group; none if it has been destroyed."""
    with suppress(KeyError):
        return dist.get_process_group_ranks(group)
    return []


def _position() -> tuple[str, bool, str]:
    """Return which function the program is in, whether it is ours, and its line."""
    frames = frames_of_threads()
    own = {thread.ident for thread in threading.enumerate() if thread.name.startswith(_KEY)}
    main = threading.main_thread().ident
    best: tuple[str, bool, str] = ("", False, "?")
    for thread in sorted(frames, key=lambda ident: ident != main):
        if thread in own:
            continue
        function, is_ours, caller = find_call(frames[thread])
        where = "?" if caller is None else f"{caller.f_code.co_filename}:{caller.f_lineno}"
        if is_ours or thread == main:
            best = function, is_ours, where
        if is_ours:
            break
    return best


def _own_position(group: dist.ProcessGroup) -> str:
    function, _, where = _position()
    recent = order_of(group).recent()
    what = recent[-1][2] if recent else function
    return f"{what}, called at {where},"


def _find_difference(name: str, statements: dict[int, _Statement]) -> str | None:
    """Return a text about the first position at which ranks issued different collectives."""
    by_rank = {
        rank: {number: (call, text) for number, call, text in statement["groups"].get(name, ())}
        for rank, statement in statements.items()
    }
    for number in sorted({number for issued in by_rank.values() for number in issued}):
        sides: dict[str, list[int]] = {}
        calls: dict[str, int] = {}
        for rank, issued in by_rank.items():
            if number in issued:
                call, text = issued[number]
                sides.setdefault(text, []).append(rank)
                calls.setdefault(text, call)
        if len(sides) > 1:
            parts = []
            for text, ranks in sides.items():
                is_last = number == max(by_rank[ranks[0]])
                place = f", called at {statements[ranks[0]]['where']}" if is_last else ""
                parts.append(f"{are(ranks)} in {text}, call {calls[text]} of this step{place}")
            return f"the ranks are not in step: {'; '.join(parts)}. {ADVICE}"
    return None


def are(ranks: Sequence[int]) -> str:
    """Return the beginning of a sentence about ranks."""
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {list(ranks)} are"


def _describe_missing(
    name: str,
    ranks: Sequence[int],
    statements: dict[int, _Statement],
    silent: Sequence[int],
    error: str,
) -> str:
    """Return a text about ranks that did not come, or what is known where all did."""
    issued = {rank: statement["groups"].get(name, []) for rank, statement in statements.items()}
    counts = {rank: recent[-1][0] if recent else -1 for rank, recent in issued.items()}
    most = max(counts.values(), default=-1)
    gone = [rank for rank in silent if "ended" not in statements.get(rank, ())]
    late = [rank for rank in ranks if counts.get(rank, -1) < most and rank not in gone]
    waiting = [rank for rank in ranks if counts.get(rank) == most and rank not in gone]
    parts = []
    if waiting and most >= 0:
        first = waiting[0]
        _, call, text = issued[first][-1]
        statement = statements[first]
        parts.append(
            f"{are(waiting)} in {text}, call {call} of this step, called at "
            f"{statement['where']}, since {statement['since']}"
        )
    parts += [f"rank {rank} {_describe_rank(statements[rank], issued[rank])}" for rank in late]
    for rank in gone:
        last = issued.get(rank)
        about = f"; it last said that it was in {last[-1][2]}" if last else ""
        parts.append(f"rank {rank} is gone, or can't be reached{about}")
    if not late and not gone:
        return f"a collective has failed: {'; '.join(parts)}. {error}"
    return f"a collective has failed because not all ranks came: {'; '.join(parts)}. {ADVICE}"


def _describe_rank(statement: _Statement, issued: Sequence[Sequence[Any]]) -> str:
    """Return where a rank is that did not come."""
    if "ended" in statement:
        return str(statement["ended"])
    function = f" in {statement['function']}," if statement["function"] else ""
    last = f"; the last that it issued was {issued[-1][2]}" if issued else ""
    return f"is elsewhere:{function} at {statement['where']}, since {statement['since']}{last}"


def _close(group: dist.ProcessGroup, text: str) -> None:
    """Let all waits of a group fail, on all its ranks, if its backend can."""
    if backend_name(group, HOST) != "gloo":
        _logger.error(text)
        return
    other = 1 if group.rank() == 0 else 0
    with suppress(RuntimeError):
        # Gloo closes all connections of a group in which a wait takes too long.
        group.recv([torch.empty(1, device=HOST)], other, NUM_TAGS).wait(timedelta(milliseconds=1))


def fail(error: RuntimeError, group: dist.ProcessGroup) -> NoReturn:
    """Raise, for an error of a group's collective, one that says what each of its ranks does.

    Its connections are closed then, so all that comes later has the same reason.
    """
    try:
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise error  # not the backend's
        order = order_of(group)
        if str(error) == order.failure:
            raise error
        if order.failure is None:
            order.failure = _explain(group, str(error))
        raise RuntimeError(order.failure) from error
    finally:
        del error  # its traceback has this frame: a cycle


@contextmanager
def explained(group: dist.ProcessGroup) -> Iterator[None]:
    """Let errors of gloo say what each rank of the group does; those of a program stay."""
    try:
        yield
    except RuntimeError as error:
        if "gloo" in str(error) or "pair closure" in str(error):
            fail(error, group)
        raise


def make_exchange(
    group: dist.ProcessGroup, order: GroupOrder, device: torch.device
) -> Callable[[bool], None] | None:
    """Return what comes before each collective of a group's backend; None for messages.

    None too for torch's fake backend, which has no other ranks.
    """
    backend = backend_name(group, device)
    if backend == "fake" or is_exchange(group, device):
        return None
    if backend == "gloo":
        order.check_next()
    return partial(exchange_identity, group, order, device)


def exchange_identity(
    group: dist.ProcessGroup, order: GroupOrder, device: torch.device, is_rare: bool
) -> None:
    """Wait until all ranks are about to issue the collective that was entered last.

    [Note: First steps]
    Before a backend's collective the ranks exchange the identity of what they are about to issue,
    and its position: 16 bytes, always, so it can't fail as collectives of other sizes do. If they
    differ, all ranks raise, and nothing was written. The host waits for it. So it ends when twice
    as many as have come since it began have come again without another one, which all ranks see at
    the same position. It begins again when a step of any rank has had a new one, as after a change
    of structure: the flags of its backward tell all ranks. `check_order="always"` keeps it on. It
    always comes before what is rare: not a step asks for it, but a function that the program has
    called.

    Gloo aborts the process where tensors of different sizes meet. So there identities go ahead
    later too, where the next collective is not one that has always followed, or may be of another
    size as far as all ranks know. They travel by messages then, which never meet collectives: a
    rank that differs waits for an answer, the others in a collective, until the thread of [Note:
    Watch] finds out.
    """
    if not (is_rare or order.is_checked) or group.size() == 1 or is_capturing(device):
        return
    backend = backend_name(group, device)
    if backend == "fake" or not (is_rare or order.is_exchanged or not order.is_expected):
        return
    issued = order.issued
    own = hash((order.num_folded, len(issued), issued[-1])) % (1 << 62)
    is_known_to_come = backend != "gloo" or order.is_exchanged
    try:
        is_same = (_is_same if is_known_to_come else _is_same_by_messages)(own, group, device)
    except RuntimeError as error:
        fail(error, group)
    if not is_same:
        fail(RuntimeError("The ranks were about to issue different collectives."), group)
    if not is_rare:
        order.note_agreed()


def _is_same(own: int, group: dist.ProcessGroup, device: torch.device) -> bool:
    numbers = torch.tensor([own, -own], device=device)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    group.allreduce([numbers], options).wait()
    largest, smallest = numbers.tolist()
    return bool(largest == -smallest)


def _is_same_by_messages(own: int, group: dist.ProcessGroup, _: torch.device) -> bool:
    """Send a number to the first rank, which compares and answers."""
    sent = torch.tensor([own], device=HOST)
    tag = LOWEST_TAG - 1  # of no collective: those that differ meet
    answer, others = torch.zeros(1, device=HOST), range(1, group.size())
    if group.rank() == 0:
        found = [torch.empty_like(sent) for _ in others]
        for work in [
            group.recv([each], rank, tag) for rank, each in zip(others, found, strict=True)
        ]:
            work.wait()
        answer.fill_(all(int(each) == own for each in found))
        works = [group.send([answer], rank, tag) for rank in others]
    else:
        works = [group.send([sent], 0, tag), group.recv([answer], 0, tag)]
    for work in works:
        work.wait()
    return bool(answer)


def _explain(group: dist.ProcessGroup, error: str) -> str:
    watch = _watches.get(0)
    if watch is None or watch.world is not dist.group.WORLD:
        return f"{_own_position(group)} failed: {error}"
    return watch.explain(group, error)


# The one of the default process group, which a program may destroy and make anew.
_watches: dict[int, _Watch] = {}


def begin_watch() -> None:
    """Watch over the ranks of the default process group, unless that is done already."""
    world = dist.group.WORLD
    known = _watches.get(0)
    if world is None or world.size() == 1 or (known is not None and known.world is world):
        return
    store = side_store()
    if store is None:
        return
    if known is None:
        atexit.register(_end)
    else:
        known.stop()
    _watches[0] = _Watch(world, store)


def _end() -> None:
    """Tell the other ranks that the program ends: they may wait for this one."""
    error = getattr(sys, "last_value", None)
    how = "has ended" if error is None else f"has ended with {type(error).__name__}: {error}"
    watch = _watches.pop(0, None)
    if watch is not None:
        watch.stop(how)
