"""Errors that say what each rank was doing, when a collective fails or ranks wait for ever.

[Note: Watch]
A thread checks twice a second whether this rank issues collectives. If it has issued none for a
second, the thread writes a statement into the store of the default process group: the last
collective, and the running line of the program. It also answers requests of other ranks. A rank
whose collective fails sends a request, waits a few seconds for the statements, and raises an error
made of all of them, the same on each rank. A rank that does not answer is gone.

If statements show two different collectives at the same position of a process group, its ranks
would wait for ever. Then the thread closes the group's connections, so that all ranks raise at once
and not after the group's timeout. If the backend can't close connections, the thread logs the
error.
"""

from __future__ import annotations

import atexit
import json
import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from composable_shard.comm.calls import find_call
from composable_shard.comm.devices import HOST, backend_name
from composable_shard.comm.order import NUM_TAGS, all_orders, order_of
from composable_shard.torch_private import frames_of_threads, side_store

_TICK_S = 0.5
_QUIET_S = 1.0
_ANSWER_S = 4.0
_STORE_S = 3.0  # for requests of the store meanwhile
_LONGEST_PAUSE_S = 30.0
_KEY = "composable_shard"
_MAX_RANKS = 16  # in a message
_MAX_PARTS = 6  # of a message, each about some ranks
ADVICE = "All ranks must run the same units and call the same functions, in the same order."

_logger = logging.getLogger(_KEY)
_Statement = dict[str, Any]


class _Watch:
    """The thread of [Note: Watch], and its state shared with threads that communicate."""

    def __init__(self, world: dist.ProcessGroup, store: dist.Store) -> None:
        self.world = world
        self._rank = world.rank()
        self._store = store
        self._stopped = threading.Event()
        self._since = time.time()
        self._num_answered = 0
        self._counts: dict[str, int] = {}  # of collectives, by group
        self._used_last: set[str] = set()  # groups on which the last ones were
        self._stated: dict[str, int] | None = None  # the counts in the last statement
        # A store may outlive a process group and serve another one of the same name.
        self._key = f"{_KEY}/{store.add(f'{_KEY}/watches/{self._rank}', 1)}"
        self._next_look_s = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"{_KEY} watch")
        self._thread.start()

    def stop(self, how: str | None = None) -> None:
        """End the thread; write into the store how this rank has ended."""
        self._stopped.set()
        self._thread.join(timeout=2 * _TICK_S)
        if how is not None and not self._thread.is_alive():
            with suppress(RuntimeError):
                self._state(self._num_answered, ended=how)

    def _run(self) -> None:
        # An error of the store means that its rank is gone, so no rank can ask any more.
        with suppress(RuntimeError):
            while not self._stopped.wait(_TICK_S) and dist.group.WORLD is self.world:
                self._tick()

    def _tick(self) -> None:
        counts = _counts()
        if counts != self._counts:
            self._used_last = {name for name, n in counts.items() if n != self._counts.get(name, 0)}
            self._counts = counts
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
        function, where = _position()
        counts = _counts()
        statement: _Statement = {
            "answers": num_asked,
            "function": function,
            "where": where,
            "since": time.strftime("%H:%M:%S", time.localtime(self._since)),
            "groups": {group.group_name: order.recent() for group, order in all_orders()},
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
            # In an unused group the ranks may have stopped at different places long ago.
            is_used = order.failure is None and group.group_name in self._used_last
            ranks = _ranks_of(group) if is_used else []
            if len(ranks) < 2:
                continue
            found = _find_difference(group.group_name, self._read(ranks))
            if found is not None:
                self._give_up(set(ranks), self._agree(group, found))

    def _give_up(self, ranks: set[int], text: str) -> None:
        """Make all groups of these ranks fail, because each rank may wait in another group."""
        for group, order in all_orders():
            own = _ranks_of(group)
            if order.failure is None and len(own) > 1 and ranks.issuperset(own):
                order.failure = text
                _close(group, text)
        self._store.add(f"{self._key}/asked", 1)  # so that the other ranks know soon

    def _agree(self, group: dist.ProcessGroup, text: str) -> str:
        """Return the error text that a rank published first."""
        key = f"{self._key}/failure/{group.group_name}"
        return self._store.compare_set(key, "", text).decode()

    def explain(self, group: dist.ProcessGroup, error: str) -> str:
        """Return a text for a collective's error, in bounded time even without the store."""
        found: list[str] = []
        # If the network is cut, the store neither answers nor raises.
        run = partial(self._ask, group, error, found)
        asking = threading.Thread(target=run, daemon=True, name=f"{_KEY} question")
        asking.start()
        asking.join(_ANSWER_S + _STORE_S)
        lost = "the rank that hosts it (mostly rank 0) is gone, or the network"
        what = f"failed, and the store of the job can't be reached: {lost}. {error}"
        return found[0] if found else f"{_own_position(group)} {what}"

    def _ask(self, group: dist.ProcessGroup, error: str, found: list[str]) -> None:
        """Ask what the ranks of a group do, and publish a text for the error."""
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


def _position() -> tuple[str, str]:
    """Return the function in which the program is, and its line."""
    frames = frames_of_threads()
    own = {thread.ident for thread in threading.enumerate() if thread.name.startswith(_KEY)}
    main = threading.main_thread().ident
    best = "", "?"
    for thread in sorted(frames, key=lambda ident: ident != main):
        if thread in own:
            continue
        function, is_ours, caller = find_call(frames[thread])
        where = "?" if caller is None else f"{caller.f_code.co_filename}:{caller.f_lineno}"
        if is_ours or thread == main:
            best = function, where
        if is_ours:
            break
    return best


def _own_position(group: dist.ProcessGroup) -> str:
    function, where = _position()
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
                # Gathers that were started ahead come after it.
                when = "called" if number == max(by_rank[ranks[0]]) else "and is now"
                place = f"{when} at {statements[ranks[0]]['where']}"
                parts.append(f"{are(ranks)} in {text}, call {calls[text]} of this step, {place}")
            return f"the ranks are not in step: {join_few(parts)}. {ADVICE}"
    return None


def are(ranks: Sequence[int]) -> str:
    """Return the beginning of a sentence about ranks: "rank 1 is", "ranks 1, 2 are"."""
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {list_ranks(ranks)} are"


def list_ranks(ranks: Sequence[int]) -> str:
    """Return the first of these ranks, because there may be thousands."""
    more = len(ranks) - _MAX_RANKS
    return f"{list(ranks[:_MAX_RANKS])} and {more} more" if more > 0 else str(list(ranks))


def join_few(parts: Sequence[str]) -> str:
    """Join the first parts of a message, because there may be one for each rank."""
    more = len(parts) - _MAX_PARTS
    return "; ".join([*parts[:_MAX_PARTS], *([f"and {more} more"] if more > 0 else [])])


def _describe_missing(
    name: str,
    ranks: Sequence[int],
    statements: dict[int, _Statement],
    silent: Sequence[int],
    error: str,
) -> str:
    """Return a text about missing ranks, or about all ranks if none is missing."""
    issued = {rank: statement["groups"].get(name, []) for rank, statement in statements.items()}
    counts = {rank: recent[-1][0] for rank, recent in issued.items() if recent}
    most = max(counts.values(), default=-1)
    away = {rank for rank in ranks if rank in silent or "ended" in statements.get(rank, ())}
    # After `away`: a rank that gave up waiting and ended has issued as many as those that wait.
    waiting = [rank for rank in ranks if counts.get(rank) == most and rank not in away]
    parts = []
    if waiting:
        _, call, text = issued[waiting[0]][-1]
        place = _describe_place(statements[waiting[0]])
        parts.append(f"{are(waiting)} in {text}, call {call} of this step, called {place}")
    others = [each for each in ranks if each not in waiting]
    if len(others) > _MAX_PARTS:
        others.sort(key=lambda each: each not in away)  # those that are gone are the cause
    for rank in others:
        recent, statement = issued.get(rank, []), statements.get(rank, {})
        last = f"; the last that it issued was {recent[-1][2]}" if recent else ""
        if "ended" in statement:
            parts.append(f"rank {rank} {statement['ended']}")
        elif rank in silent:
            parts.append(f"rank {rank} is gone, or can't be reached{last}")
        else:
            function = f" in {statement['function']}," if statement["function"] else ""
            parts.append(f"rank {rank} is elsewhere:{function} {_describe_place(statement)}{last}")
    if len(waiting) == len(ranks):
        return f"a collective has failed: {join_few(parts)}. {error}"
    return f"a collective has failed because not all ranks came: {join_few(parts)}. {ADVICE}"


def _describe_place(statement: _Statement) -> str:
    return f"at {statement['where']}, since {statement['since']}"


def _close(group: dist.ProcessGroup, text: str) -> None:
    """Make all waits of a group fail on all its ranks, if its backend can."""
    if backend_name(group, HOST) != "gloo":
        _logger.error(text)
        return
    other = 1 if group.rank() == 0 else 0
    with suppress(RuntimeError):
        # Gloo closes all connections of a group after a wait that times out.
        group.recv([torch.empty(1, device=HOST)], other, NUM_TAGS).wait(timedelta(milliseconds=1))


def fail(error: RuntimeError, group: dist.ProcessGroup) -> NoReturn:
    """For an error of a group's collective, raise one that says what each rank does.

    The group's connections are closed then, so later collectives fail for the same reason.
    """
    try:
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise error  # not the backend's
        order = order_of(group)
        if order.has_told and str(error).endswith(str(order.failure)):
            raise error
        if order.failure is None:
            order.failure = _explain(group, str(error))
        again, order.has_told = "stopped by an earlier error: " * order.has_told, True
        raise RuntimeError(f"{again}{order.failure}") from error
    finally:
        del error  # its traceback has this frame: a cycle


@contextmanager
def explained(group: dist.ProcessGroup) -> Iterator[None]:
    """Make errors of gloo say what each rank of the group does; errors of the program stay."""
    try:
        yield
    except RuntimeError as error:
        if "gloo" in str(error) or "pair closure" in str(error):
            fail(error, group)
        raise


def _explain(group: dist.ProcessGroup, error: str) -> str:
    watch = _watches.get(0)
    if watch is None or watch.world is not dist.group.WORLD:
        return f"{_own_position(group)} failed: {error}"
    return watch.explain(group, error)


# Of the default process group, which a program may destroy and make again.
_watches: dict[int, _Watch] = {}


def begin_watch() -> None:
    """Start the watch of the default process group, unless it runs."""
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
    """Tell the other ranks that the program ends, because they may wait for this one."""
    error = getattr(sys, "last_value", None)
    how = "has ended" if error is None else f"has ended with {type(error).__name__}: {error}"
    watch = _watches.pop(0, None)
    if watch is not None:
        watch.stop(how)
