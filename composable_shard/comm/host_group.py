"""A group of all ranks for work in the background, such as writing checkpoints."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard.comm.agreement import (
    Agreeing,
    Ranks,
    attempt,
    describe_problem,
    join_problems,
    raise_found,
)
from composable_shard.comm.calls import function_called
from composable_shard.comm.devices import HOST
from composable_shard.comm.messages import MessageGroup
from composable_shard.comm.order import enter_setting, identify, order_of
from composable_shard.comm.watch import begin_watch
from composable_shard.torch_private import backend_of, timeout_of

Messages = list[tuple[Any, list[int]]]  # each once, with the ranks that have it


class HostGroup(Agreeing):
    """All ranks of the default process group, or one process without a group, for background work.

    A background thread must not change the order of training's collectives. So it has its own
    process group, whose messages are not counted as collectives of training. Call all methods
    except `is_first` on all ranks in the same order, from one thread at a time.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        self._pending: Any = None
        self._staging: dict[str, Tensor] = {}
        self._plan: Any = None
        self.run = uuid.uuid4().hex[:12]  # a random name of the run; rank 0's counts

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def has_failed(self) -> bool:
        """Whether a message has failed on this rank; then all later ones fail too."""
        return self._group is not None and order_of(self._group).failure is not None

    def continue_run(self, run: str) -> None:
        """Take over the name of an earlier run; "" keeps the name."""
        self.run = run or self.run

    def swap_pending(self, save: Any) -> Any:
        """Note the save that runs in the background, or None; return the one noted before."""
        before, self._pending = self._pending, save
        return before

    def swap_staging(self, copies: dict[str, Tensor]) -> dict[str, Tensor]:
        """Keep the memory of a save's copies, by name; return what was kept before."""
        before, self._staging = self._staging, copies
        return before

    def swap_plan(self, plan: Any) -> Any:
        """Keep the plan of a save, or None; return the one kept before."""
        before, self._plan = self._plan, plan
        return before

    def agree(self, problem: Exception | None) -> None:
        """Raise any rank's problem on all ranks. [Note: All ranks or none]"""
        message = None if problem is None else describe_problem(problem, self.rank)[1:]
        raise_found([self.join(message, _join_problems)], problem)

    def join(self, message: Any, function: Callable[[Messages], Any]) -> Any:
        """Return what `function` makes of the messages of all ranks, or raise its error.

        A rank sends a digest of 32 bytes, and learns whether all ranks have the same message. Then
        it calls the function. Otherwise rank 0 does, and of each message the lowest rank that has
        it sends it. So what a rank sends and receives does not grow with the ranks.

        Args:
            message: A JSON value.
            function: Gets each message once, with the ranks that have it; returns a JSON value.
        """
        if self._group is None:
            return function([(message, [0])])
        text = json.dumps(message)
        digest = bytearray(hashlib.sha256(text.encode()).digest())
        num_rows = self.size if self.is_first else 0
        rows = torch.empty(num_rows, len(digest), dtype=torch.uint8, device=HOST)
        self._collect(torch.frombuffer(digest, dtype=torch.uint8), list(rows))
        digests = list(map(bytes, rows.tolist()))
        is_same = torch.tensor([len(set(digests)) <= 1], device=HOST)
        self._broadcast(is_same)
        if is_same:
            return function([(message, list(range(self.size)))])
        holders: dict[bytes, list[int]] = {}
        for rank, each in enumerate(digests):
            holders.setdefault(each, []).append(rank)
        firsts = self.broadcast([ranks[0] for ranks in holders.values()])
        # Of JSON, as those of the others: tuples are lists.
        told = self.gather(json.loads(text) if self.rank in firsts else None)
        return self.on_first(
            lambda: function([(told[ranks[0]], ranks) for ranks in holders.values()])
        )

    def join_made(self, make: Callable[[], Any], function: Callable[[Messages], Any]) -> Any:
        """Return what `function` makes of the messages that `make` returns on all ranks.

        Raise any rank's error in `make` on all of them, as `agree` does, in the same messages.
        """
        message, problem = attempt(make)
        try:
            found = None if problem is None else describe_problem(problem, self.rank)[1:]
            joined, value = self.join([found, message], partial(_join_made, function))
            raise_found([joined], problem)
        finally:
            problem = None  # its traceback holds this frame: a cycle would keep values
        return value

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's JSON value on rank 0, in rank order; an empty list elsewhere.

        Rank 0's own is the very object.
        """
        if self._group is None:
            return [value]
        data = _to_tensor(value)
        parts = [data.new_empty(numel) for numel in self._numbers(data.numel())]
        self._collect(data, parts)
        return [value, *map(_from_tensor, parts[1:])] if self.is_first else []

    def scatter(self, function: Callable[[], Sequence[Any]]) -> Any:
        """Run `function` on rank 0, which returns a JSON value for each rank, in rank order.

        Return this rank's, or raise the function's error on every rank.
        """
        values, found, error = self._call_on_first(function)
        told = [[value, found] for value in ([None] * self.size if values is None else values)]
        if self._group is None:
            value, found = told[0]
        else:
            value, found = self._scatter(told)
        raise_found([found], error)
        return value

    def _scatter(self, values: Sequence[Any]) -> Any:
        parts = list(map(_to_tensor, values)) if self.is_first else []
        numel = torch.zeros(1, dtype=torch.int64, device=HOST)
        self._distribute(numel, [torch.tensor([part.numel()], device=HOST) for part in parts])
        data = torch.empty(int(numel), dtype=torch.uint8, device=HOST)
        self._distribute(data, parts)
        return _from_tensor(data)

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's JSON value on every rank."""
        if self._group is None:
            return value
        data = _to_tensor(value if self.is_first else None)
        size = torch.tensor([data.numel()], device=HOST)
        self._broadcast(size)
        if not self.is_first:
            data = torch.empty(int(size), dtype=torch.uint8, device=HOST)
        self._broadcast(data)
        return _from_tensor(data)

    def on_first(self, function: Callable[[], Any]) -> Any:
        """Run `function` on rank 0; return its JSON value, or raise its error, on every rank."""
        value, found, error = self._call_on_first(function)
        value, found = self.broadcast([value, found])
        raise_found([found], error)
        return value

    def _call_on_first(
        self, function: Callable[[], Any]
    ) -> tuple[Any, list[Any] | None, Exception | None]:
        """Return rank 0's value, its problem, and the error; None of all on other ranks."""
        if not self.is_first:
            return None, None, None
        try:
            return function(), None, None
        except Exception as error:
            return None, describe_problem(error, 0), error

    def _numbers(self, number: int) -> list[int]:
        """Return each rank's number on rank 0; an empty list elsewhere."""
        own = torch.tensor([number], device=HOST)
        parts = [torch.empty_like(own) for _ in range(self.size)] if self.is_first else []
        self._collect(own, parts)
        return [int(part) for part in parts]

    def _collect(self, tensor: Tensor, parts: list[Tensor]) -> None:
        """Send a tensor to rank 0, which receives all ranks' tensors in `parts`."""
        outputs = [parts] if self.is_first else []
        self._messages().gather(outputs, [tensor], dist.GatherOptions()).wait()

    def _distribute(self, tensor: Tensor, parts: list[Tensor]) -> None:
        """Receive a tensor from rank 0, which sends each rank one of `parts`."""
        inputs = [parts] if self.is_first else []
        self._messages().scatter([tensor], inputs, dist.ScatterOptions()).wait()

    def _broadcast(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._messages().broadcast([tensor], options).wait()

    def _messages(self) -> MessageGroup:
        """Return the verbs that send its messages; they carry identities, as in training."""
        assert self._group is not None
        order = order_of(self._group)
        order.enter(identify(function_called(with_arguments=False), "message", 0))
        return MessageGroup(self._group, order)


def _join_problems(told: Messages) -> list[Any] | None:
    return join_problems([each and [rank, *each] for each, ranks in told for rank in ranks])


def _join_made(function: Callable[[Messages], Any], told: Messages) -> list[Any]:
    problem = _join_problems([(found, ranks) for (found, _), ranks in told])
    made = [(message, ranks) for (_, message), ranks in told]
    return [problem, None if problem else function(made)]


def get_host_group(check: Callable[[HostGroup], None] | None = None) -> HostGroup:
    """Return the group of all ranks of the default process group.

    The first call makes it, on all ranks, with the timeout of the default group. Without a default
    process group it has one rank. Each call counts as a collective of the default group, so that
    ranks that differ find out. One all-gather tells whether the group has failed on any rank; if it
    has, a new one is made.

    Args:
        check: Gets the group of the call before; in the same all-gather any rank's error in it is
            raised on all of them.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    known = _groups.get(os.getpid())

    def needs_new() -> bool:
        if known is not None and check is not None:
            check(known[1])
        return known is None or known[0] is not world or known[1].has_failed

    if world is not None:
        begin_watch()
        enter_setting(function_called(with_arguments=False), [world])
    worlds = [] if world is None else [world]
    # Also before a group is made, which raises no error that names a rank that does not come.
    is_new = any(Ranks(worlds, _device_of(world)).told_by_all(needs_new))
    if known is not None and not is_new:
        return known[1]
    timeout = None if world is None else timeout_of(world)
    group = None if world is None else dist.new_group(backend="gloo", timeout=timeout)
    before = None if known is None else known[1]
    made = HostGroup(group)
    _groups[os.getpid()] = world, made
    if before is not None:
        made.swap_pending(before.swap_pending(None))  # it continues on the earlier group
        made.continue_run(before.run)
    return made


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return a device on which a group can communicate, the CPU if it can be that."""
    try:
        if group is not None:
            backend_of(group, HOST)
    except RuntimeError:
        return torch.accelerator.current_accelerator(check_available=True) or HOST
    return HOST


# By process, because a forked process is a run of its own: the group in use, with its default
# group, which a program may destroy and make again.
_groups: dict[int, tuple[dist.ProcessGroup | None, HostGroup]] = {}


def _to_tensor(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_tensor(data: Tensor) -> Any:
    # Not `bytes(storage)`, which reads one byte at a time.
    return json.loads(ctypes.string_at(data.data_ptr(), data.numel()))
