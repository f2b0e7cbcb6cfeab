"""How ranks agree on messages, on flags, on a step, and on errors that all of them raise.

[Note: All ranks or none]
A rank that raises alone leaves the other ranks waiting in their next collective. So the ranks
exchange every problem that only some of them can find (a damaged file, a different shape, a failed
body) before any of them continues. `Ranks.agreed` runs a body and raises its error on all ranks,
`compare` finds different messages, `any_of` joins flags. If all messages are the same, this takes
one all-gather of 31 bytes for each process group. Otherwise the messages follow, as JSON.

A backward ends with the maximum of small numbers over all ranks, its flags, and the digest of the
step that travels with it: `FlagReduction`.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard.comm import collectives
from composable_shard.comm.devices import HOST, Waitable
from composable_shard.comm.lockstep import (
    ADVICE,
    LATE_STEPS,
    are,
    begin_watch,
    describe,
    function_called,
    identify,
    note_setting,
    order_of,
)
from composable_shard.comm.messages import MessageGroup
from composable_shard.torch_private import backend_of, timeout_of

# A NotImplementedError is a RuntimeError too, so it stands first.
_KINDS = (ValueError, NotImplementedError, RuntimeError)
UNITS = "the comparison of the units"  # the identity of what `compare_lines` may meet
_DIGEST_NBYTES = 31  # one more makes a message of 32


def all_bytes(
    group: dist.ProcessGroup, device: torch.device, data: bytes, *, what: str | None = None
) -> list[bytes]:
    """Return every rank's bytes; two all-gathers, the first one of their lengths."""
    lengths = _gather_rows(group, device, len(data).to_bytes(8, "little"), what)
    sizes: list[int] = lengths.view(torch.int64).flatten().tolist()
    # Of at least one byte, as a buffer without any is refused.
    local = torch.frombuffer(bytearray(data or b"-"), dtype=torch.uint8)[: len(data)].to(device)
    joined: Tensor = collectives.all_gather_uneven(local, sizes, group, what=what).cpu()
    return [bytes(part.tolist()) for part in joined.split(sizes)]


def _gather_rows(
    group: dist.ProcessGroup, device: torch.device, data: bytes, what: str | None
) -> Tensor:
    """Return every rank's bytes, all of one length; shape `(ranks, bytes)`, on the CPU.

    Without a Python object for each rank, because there may be thousands.
    """
    local = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    output = local.new_empty(group.size() * len(data))
    collectives.all_gather(output, local, group, what=what).wait()
    return output.cpu().view(group.size(), -1)


def _digest_of(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_DIGEST_NBYTES]


class Ranks:
    """Ranks that reach each other through process groups. Call its methods on all of them."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        # A message reaches all ranks when it passes through the groups one by one
        self.groups = groups
        self.device = device  # for the groups' collectives
        self.rank = dist.get_rank() if groups else 0  # this rank's number in messages

    def compare(
        self, message: Any, flag: bool | None = None, *, what: str | None = None
    ) -> tuple[list[Any], bool]:
        """Return the messages of all ranks, and whether any rank has set a flag.

        One all-gather of 31 bytes for each group, of 32 with a flag. Two more if messages differ.

        Args:
            message: A JSON value; tuples become lists.
            what: What it is for, for messages. Default: the function that the program has called.

        Returns:
            The messages in rank order, only this rank's if all are the same; the joined flag.
        """
        what = what or function_called(with_arguments=False)
        text = json.dumps(message)
        digest, is_same = _digest_of(text.encode()), True
        for group in self.groups:
            sent = digest if flag is None else digest + bytes([flag])
            rows = _gather_rows(group, self.device, sent, what)
            flag = None if flag is None else bool(rows[:, -1].any())
            digests = rows[:, :_DIGEST_NBYTES]
            if not bool((digests == digests[0]).all()):
                # The digest of digests differs too, so the ranks of the next group see it.
                is_same, digest = False, _digest_of(bytes(digests.flatten().tolist()))
        texts = [text]
        for group in () if is_same else self.groups:
            parts = all_bytes(group, self.device, json.dumps(texts).encode(), what=what)
            texts = [each for part in parts for each in json.loads(part)]
        decoded = {each: json.loads(each) for each in dict.fromkeys(texts)}
        return [decoded[each] for each in texts], bool(flag)

    @property
    def num_collectives(self) -> int:
        """How many they have issued; 0 where they do not share one group, so can't know it."""
        return order_of(self.groups[0]).num_issued if len(self.groups) == 1 else 0

    def all_messages(self, message: Any) -> list[Any]:
        """Return the messages of all ranks, or only this rank's if all are the same."""
        return self.compare(message)[0]

    def agree(self, problem: Exception | None) -> None:
        """Raise any rank's problem on all ranks. [Note: All ranks or none]

        Raises:
            ValueError, NotImplementedError, RuntimeError: As the first rank's problem, with the
                texts of all ranks.
        """
        messages = self.all_messages(None if problem is None else _describe(problem, self.rank))
        _raise_found(messages, problem)

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Raise on all ranks if the body raises on any rank. [Note: All ranks or none]"""
        problem: Exception | None = None
        try:
            yield
        except Exception as error:  # of any kind, because the other ranks wait
            problem = error
        try:
            self.agree(problem)
        finally:
            problem = None  # its traceback holds this frame: a cycle would keep the body's values

    def copy_from_first(self, tensor: Tensor) -> Tensor:
        """Overwrite a tensor, on any device, with the first rank's, and return it.

        One broadcast for each group.
        """
        sent = tensor.to(self.device).contiguous()
        for group in self.groups:
            collectives.broadcast(sent, 0, group).wait()
        return tensor if sent is tensor else tensor.copy_(sent)

    def any_of(self, flags: list[bool], problem: BaseException | None = None) -> list[int]:
        """Return for each flag whether any rank has set it; one all-reduce for each group.

        Args:
            flags: Of the same length on all ranks.
            problem: The error that this rank is about to raise. It sends its flags, but may return
                them as they are.
        """
        sent = torch.tensor(flags, dtype=torch.uint8, device=self.device)
        if problem is None:
            for group in self.groups:
                collectives.all_reduce(sent, group, dist.ReduceOp.MAX).wait()
            return sent.tolist()
        for group in self.groups:
            with suppress(RuntimeError):  # must not hide the first error
                work = collectives.all_reduce(sent, group, dist.ReduceOp.MAX)
                if isinstance(problem, Exception):
                    work.wait()
                # Ctrl-C: nothing must keep this rank from ending.
        return [int(flag) for flag in flags]


def _describe(problem: Exception, rank: int) -> list[Any]:
    kind = next((each for each in _KINDS if isinstance(problem, each)), RuntimeError)
    is_plain = type(problem) in _KINDS
    return [
        rank,
        kind.__name__,
        str(problem) if is_plain else f"{type(problem).__name__}: {problem}",
    ]


def _raise_found(messages: list[Any], own: Exception | None) -> None:
    """Raise the described problems; a message is None where a rank has none."""
    found = sorted(message for message in messages if message is not None)
    if not found:
        return
    texts: dict[str, list[int]] = {}
    for rank, _, text in found:
        texts.setdefault(text, []).append(rank)
    joined = "; ".join(f"on ranks {ranks}: {text}" for text, ranks in texts.items())
    is_everywhere = len(texts) == 1 and None not in messages
    kind = next(each for each in _KINDS if each.__name__ == found[0][1])
    raise kind(next(iter(texts)) if is_everywhere else joined) from own


def compare_lines(ranks: Ranks, lines: list[str]) -> None:
    """Check that all ranks bring the same lines, before something is sent that they describe.

    One all-gather of 32 bytes for each process group: as lazy init sends its lines, which ranks
    that have nothing to send here may have reached already.
    """
    messages, _ = ranks.compare([lines, []], False, what=UNITS)
    raise_difference([each for each, _ in messages])


def raise_difference(all_lines: list[list[str]]) -> None:
    """Raise if the ranks describe their units differently, naming the first difference.

    Each rank has one line for each parameter; only one rank's come if all are the same.
    """
    longest = max(len(lines) for lines in all_lines)
    for index in range(longest):
        seen: dict[str, list[int]] = {}
        for rank, lines in enumerate(all_lines):
            line = lines[index] if index < len(lines) else "no such parameter"
            seen.setdefault(line, []).append(rank)
        if len(seen) > 1:
            detail = "; ".join(f"ranks {ranks}: {line}" for line, ranks in seen.items())
            raise RuntimeError(
                "the ranks of one mesh must shard the same model in the same way; the "
                f"first difference is at parameter {index}: {detail}. Build the model and call "
                "fully_shard alike on every rank."
            )


class HostGroup(Ranks):
    """All ranks of the default process group, or this process alone, for work in the background.

    A thread's messages must not change the order of training's collectives. So this group has a
    process group of its own, and its messages are not counted as collectives of training. Call all
    methods but `is_first` on all ranks in the same order, from one thread at a time.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__([], torch.device("cpu"))
        self._group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        self._pending: Any = None
        self.run = uuid.uuid4().hex[:12]  # a random name of the run; rank 0's counts

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def has_failed(self) -> bool:
        """Whether one of its messages has failed on this rank: then all later ones do."""
        return self._group is not None and order_of(self._group).failure is not None

    def continue_run(self, run: str) -> None:
        """Take the name of an earlier run over; "" leaves the name as it is."""
        self.run = run or self.run

    def take_pending(self, save: Any) -> Any:
        """Note the save that runs in the background, or None; return the one noted before."""
        before, self._pending = self._pending, save
        return before

    def all_messages(self, message: Any) -> list[Any]:
        """Return the messages of all ranks, or one None where all are None."""
        has_message = torch.tensor([int(message is not None)], device=HOST)
        if self._group is not None and not self._all_gather(has_message).any():
            return [None]
        return self.broadcast(self.gather(message))  # type: ignore[no-any-return]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's JSON value on rank 0, in rank order; an empty list elsewhere."""
        if self._group is None:
            return [value]
        data = _to_tensor(value)
        sizes = self._all_gather(torch.tensor([data.numel()], device=HOST)).tolist()
        largest = max(sizes)
        padded = torch.zeros(largest, dtype=torch.uint8, device=HOST)
        padded[: data.numel()] = data
        parts = [torch.empty_like(padded) for _ in sizes] if self.is_first else []
        self._collect(padded, parts)
        return [_from_tensor(part[:n]) for part, n in zip(parts, sizes, strict=False)]

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
        value, found, error = None, None, None
        if self.is_first:
            try:
                value = function()
            except Exception as caught:
                error, found = caught, _describe(caught, 0)
        value, found = self.broadcast([value, found])
        _raise_found([found], error)
        return value

    def _all_gather(self, numbers: Tensor) -> Tensor:
        output = numbers.new_empty(self.size, numbers.numel())
        self._collect(numbers, list(output))
        self._broadcast(output)
        return output.flatten()

    def _collect(self, tensor: Tensor, parts: list[Tensor]) -> None:
        """Send a tensor to rank 0, where `parts` receive those of all ranks."""
        outputs = [parts] if self.is_first else []
        self._messages().gather(outputs, [tensor], dist.GatherOptions()).wait()

    def _broadcast(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._messages().broadcast([tensor], options).wait()

    def _messages(self) -> MessageGroup:
        """Return what sends messages, which carry an identity as those of training do."""
        assert self._group is not None
        order = order_of(self._group)
        order.note(identify(function_called(with_arguments=False), "message", 0))
        return MessageGroup(self._group, order)


def get_host_group() -> HostGroup:
    """Return the group of all ranks of the default process group.

    The first call makes it, on all ranks, with the timeout of the default group. Without a default
    process group it is this process alone. Each call counts as a collective of the default group,
    so that ranks that differ find out; one all-gather tells whether any rank has seen the group
    fail, which is then made anew.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    known = _groups.get(os.getpid())
    is_usable = known is not None and known[0] is world
    if world is not None:
        begin_watch()
        note_setting(function_called(with_arguments=False), [world])
        if known is not None and is_usable:
            ranks = Ranks([world], _device_of(world))
            is_usable = not ranks.compare(None, known[1].has_failed)[1]
    if known is None or not is_usable:
        group = None
        if world is not None:
            # Named, if a rank does not come: to make a group says nothing.
            Ranks([world], _device_of(world)).all_messages(None)
            group = dist.new_group(backend="gloo", timeout=timeout_of(world))
        before = None if known is None else known[1]
        _groups[os.getpid()] = known = world, HostGroup(group)
        if before is not None:
            known[1].take_pending(before.take_pending(None))  # it continues on the earlier group
            known[1].continue_run(before.run)
    return known[1]


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Return a device on which a group can communicate, the CPU if it can be that."""
    try:
        backend_of(group, HOST)
    except RuntimeError:
        return torch.accelerator.current_accelerator(check_available=True) or HOST
    return HOST


# By process, as one that was forked is a run of its own: the one in use with its default group,
# which a program may destroy and make anew.
_groups: dict[int, tuple[dist.ProcessGroup | None, HostGroup]] = {}


def _to_tensor(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_tensor(data: Tensor) -> Any:
    # Not `bytes(storage)`, which asks for one byte at a time.
    return json.loads(ctypes.string_at(data.data_ptr(), data.numel()))


_GroupTuple = tuple[dist.ProcessGroup, ...]


class _HasGroups(Protocol):
    """A ShardGroup: its module imports this one."""

    @property
    def group(self) -> dist.ProcessGroup: ...
    @property
    def groups(self) -> _GroupTuple: ...
    @property
    def joint_groups(self) -> _GroupTuple: ...
    @property
    def device(self) -> torch.device: ...


@dataclass(frozen=True)
class Proposal:
    """What a rank would do from the next step on, if all ranks would do the same."""

    digest: int  # of it, 32 bits
    accept: Callable[[], None]  # called on all ranks, if they have sent the same


@dataclass(frozen=True)
class StepFacts:
    """What a program has done since the last backward.

    Attributes:
        line: In words, the same on all ranks.
        numbers: For each flat parameter the ranks that share it or have copies, and
            `handle.number`.
    """

    line: str
    numbers: Sequence[tuple[_HasGroups, int]]


class _StepRecord:
    """What the ranks of a mesh compare when a backward ends.

    [Note: Digest of a step]
    The flag reduction that every backward makes carries four bytes more and their complements. The
    maximum over the ranks is the same as each rank's own only if all ranks have the same: no rank
    publishes gradients otherwise. The digest is that of the collectives that all data-parallel
    ranks issue in a step, and of facts that only a program can make different: whether parameters
    were written since the last backward, whether there are gradients of earlier ones, and which
    model this is: two of one class have units of the same names. A proposal has a digest of its
    own, in which ranks may differ. A byte says whether a rank has issued something new, so that all
    of them exchange identities again. [Note: First steps]

    An accelerator's host looks two backwards later, at the same one on all ranks, when the device
    is mostly past it. The gradients of two steps have been published by then; the third's are not.
    """

    NBYTES = 8

    def __init__(
        self,
        groups: Iterable[dist.ProcessGroup],
        key: _GroupTuple,
        facts: StepFacts,
        proposal: Proposal | None,
    ) -> None:
        """Begin a new step of the groups, and sum up the last one."""
        orders = [order_of(group) for group in dict.fromkeys(groups)]
        digest = zlib.crc32(facts.line.encode())
        has_news = False
        for order in orders:
            digest = zlib.crc32(order.fold().to_bytes(4, "little"), digest)
            has_news = has_news or order.has_news
        self._orders, self._facts, self.proposal = orders, facts, proposal
        self._issued = [order.last_step for order in orders]  # on an accelerator others follow
        self._numbers = sorted({each for group, each in facts.numbers if group.joint_groups == key})
        digest = zlib.crc32(str(self._numbers).encode(), digest)
        self.sent = [*_with_complement(digest), int(has_news)]
        if proposal is not None:
            self.sent += _with_complement(proposal.digest)

    def lines(self) -> list[str]:
        """Return all of it as text, for the error."""
        issued = [describe(each).rpartition(" (")[0] for each in chain(*self._issued)]
        model = ", ".join(map(str, self._numbers))
        model = f"a backward of the model whose first call was at collective {model}"
        return [self._facts.line, *issued, model]

    def exchange_again(self) -> None:
        """Exchange identities on all groups."""
        for order in self._orders:
            order.exchange_again()


def _with_complement(digest: int) -> list[int]:
    own = digest.to_bytes(4, "little")
    return [*own, *(255 - byte for byte in own)]


def _is_same(received: Sequence[int]) -> bool:
    """Return whether all ranks have sent the same, of the maximum of what they sent."""
    half = _StepRecord.NBYTES // 2
    return all(a + b == 255 for a, b in zip(received[:half], received[half:], strict=True))


def _describe_difference(
    lines: Sequence[Sequence[str]], ranks: Sequence[int], *, is_late: bool
) -> str:
    """Return a text about the first line in which ranks differ, of `_StepRecord.lines`."""
    step, ending = "that ends with this backward", "No gradient was published"
    if is_late:
        step = f"that ended {LATE_STEPS} backwards ago"
        ending = "The gradients of this backward are not published; those since that step were"
    for index in range(max(map(len, lines))):
        sides: dict[str, list[int]] = {}
        for rank, own in zip(ranks, lines, strict=True):
            sides.setdefault(own[index] if index < len(own) else "nothing more", []).append(rank)
        if len(sides) > 1:
            parts = [f"{are(those)} in {text}" for text, those in sides.items()]
            return (
                f"the ranks are not in step: in the step {step}, "
                f"{'; '.join(parts)}. {ending}. {ADVICE}"
            )
    return "the ranks were not in step, and are again"


class FlagReduction:
    """The maximum over all ranks of small numbers, one byte each; in flight until `finish`.

    One all-reduce for each process group. Where a mesh has several groups, the result of the first
    one goes on to the next.
    """

    def __init__(
        self,
        values: Sequence[tuple[_HasGroups, Sequence[int]]],
        *,
        highest: int,
        facts: StepFacts | None = None,
        proposal: Proposal | None = None,
    ) -> None:
        """Start the all-reduces.

        Args:
            values: For each flat parameter the ranks that share it or have copies, and numbers.
            highest: The highest number that any rank may have.
            facts: What the ranks compare at the end of a step, None where none ends.
            proposal: Accepted by `check_step` if all ranks have the same. Ranks that share more
                than one mesh might not all hear of it, so there it is not sent.
        """
        self._sizes = [len(numbers) for _, numbers in values]
        self._meshes: dict[_GroupTuple, _MeshReduction] = {}
        self._keys = [group.joint_groups for group, _ in values]
        first = {id(group): group for group, _ in values}
        if len({group.joint_groups for group in first.values()}) > 1:
            proposal = None
        for group in first.values():
            if (key := group.joint_groups) not in self._meshes:
                own = [numbers for g, numbers in values if g.joint_groups == key]
                sent = [*chain.from_iterable(own)]
                step = None
                if facts is not None:
                    step = _StepRecord(_groups_of(values, key), key, facts, proposal)
                self._meshes[key] = _MeshReduction(key, sent, highest, group.device, step)

    def finish(self) -> list[list[int]]:
        """Wait, and return the largest numbers of all ranks, in the order of `values`."""
        received = {key: mesh.finish() for key, mesh in self._meshes.items()}
        ends = dict.fromkeys(received, 0)
        largest = []
        for key, size in zip(self._keys, self._sizes, strict=True):
            start = ends[key]
            ends[key] = end = start + size
            largest.append(received[key][start:end])
        return largest

    def check_step(self) -> None:
        """Check, after `finish`, that all ranks were in step. [Note: Digest of a step]"""
        for mesh in self._meshes.values():
            mesh.check_step()

    def abandon(self) -> None:
        """Wait until nothing is in flight; errors of the collectives are ignored."""
        for mesh in self._meshes.values():
            mesh.abandon()


def _groups_of(
    values: Sequence[tuple[_HasGroups, Sequence[int]]], key: _GroupTuple
) -> list[dist.ProcessGroup]:
    """Return all process groups of the flat parameters whose flags travel together."""
    groups = {id(group): group for group, _ in values}  # few; to hash one takes long
    found = [group for group in groups.values() if group.joint_groups == key]
    return [each for one in found for each in (*one.groups, *key)]


_FLAGS = "the flags of a backward"


class _MeshReduction:
    """The reduction over one mesh.

    When this returns, the all-reduces of all groups have been issued, for they must come before
    the reductions on every rank.
    """

    def __init__(
        self,
        groups: _GroupTuple,
        numbers: list[int],
        highest: int,
        device: torch.device,
        step: _StepRecord | None,
    ) -> None:
        self._groups, self._device, self._step = groups, device, step
        self._num_flags = len(numbers)
        self._numbers = numbers
        self._works: list[Waitable] = []
        # A rank that gives nothing but the highest knows the answer: it waits for nothing before
        # the end, and reads nothing back from the device.
        self._is_known = numbers.count(highest) == len(numbers)
        self._sent = _send(numbers if step is None else [*numbers, *step.sent], device)
        digest_nbytes = 0 if step is None else len(step.sent)
        for index, group in enumerate(groups):
            if index and self._is_known:
                self._sent = self._sent.clone()
            elif index:
                self._wait()
            self._works.append(
                collectives.all_reduce(
                    self._sent, group, dist.ReduceOp.MAX, what=_FLAGS, digest_nbytes=digest_nbytes
                )
            )

    def _wait(self) -> None:
        while self._works:
            self._works.pop().wait()

    def finish(self) -> list[int]:
        self._wait()
        if not self._is_known:
            self._numbers, self._is_known = self._sent.tolist()[: self._num_flags], True
        return self._numbers

    def check_step(self) -> None:
        step, self._step = self._step, None
        if step is None or not self._groups:
            return
        received = self._sent[self._num_flags :]
        before = order_of(self._groups[0]).take_late(step, received)
        if before is None:
            return
        step, received = before
        numbers, size = received.tolist(), _StepRecord.NBYTES
        if not _is_same(numbers[:size]):
            ranks = Ranks(self._groups, self._device)
            found = ranks.all_messages([ranks.rank, step.lines()])
            text = _describe_difference(
                [own for _, own in found],
                [rank for rank, _ in found],
                is_late=self._device.type != "cpu",
            )
            raise RuntimeError(text)
        if numbers[size]:
            step.exchange_again()
        if step.proposal is not None and _is_same(numbers[-size:]):
            step.proposal.accept()

    def abandon(self) -> None:
        while self._works:
            collectives.abandon(self._works.pop())


def _send(numbers: list[int], device: torch.device) -> Tensor:
    """Return small numbers on the device, shape `(len(numbers),)`; the host does not wait."""
    if len(set(numbers)) == 1:  # as in most backward passes
        return torch.full((len(numbers),), numbers[0], dtype=torch.uint8, device=device)
    sent = torch.frombuffer(bytearray(numbers), dtype=torch.uint8)
    return sent if device.type == "cpu" else sent.pin_memory().to(device, non_blocking=True)
