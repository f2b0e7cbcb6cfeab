"""The maximum of small numbers over all ranks, and the digest of a step that travels with it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import add
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard.comm import collectives
from composable_shard.comm.agreement import Ranks
from composable_shard.comm.devices import Waitable
from composable_shard.comm.lockstep import ADVICE, are
from composable_shard.comm.order import describe, order_of

_GroupTuple = tuple[dist.ProcessGroup, ...]


class _HasGroups(Protocol):
    """A ShardGroup: its module imports this one."""

    @property
    def group(self) -> dist.ProcessGroup: ...
    @property
    def replicate_groups(self) -> _GroupTuple: ...
    @property
    def joint_groups(self) -> _GroupTuple: ...
    @property
    def device(self) -> torch.device: ...


@dataclass(frozen=True)
class Proposal:
    """What a rank would do from the next step on, if all ranks would do the same.

    Attributes:
        digest: Of it, 32 bits.
        accept: Called on all ranks, if they have sent the same.
    """

    digest: int
    accept: Callable[[], None]


class _Named(Protocol):
    """A parameter."""

    @property
    def label(self) -> object: ...
    @property
    def is_owned(self) -> bool: ...


MAX_COUNT = 250  # at which a number of `StepFacts.writes` begins anew; even


@dataclass(frozen=True)
class StepFacts:
    """What a program has done since the last backward.

    Attributes:
        line: The same on all ranks.
        writes: For each flat parameter the ranks that share it or have copies; for each parameter
            of which several ranks hold parts 1, 2 for each time that this rank has written it, and
            1 if it has a gradient, or just 0 for anything; for each that one rank owns 1, and 2 for
            each step of an optimizer that has it, and behind these 1 if this rank has cleared the
            gradients that it stepped with, 2 if not; and these parameters.
    """

    line: str
    writes: Sequence[tuple[_HasGroups, list[int], Sequence[_Named]]]


class _StepRecord:
    """What the ranks of a mesh compare when a backward ends.

    [Note: Digest of a step]
    The flag reduction that every backward makes carries four bytes more and their complements. The
    maximum over the ranks is the same as each rank's own only if all ranks have the same: no rank
    publishes gradients otherwise. The digest is that of the collectives that all data-parallel
    ranks issue in a step, and of facts that only a program can make different: whether parameters
    were written since the last backward. How often a parameter was, and whether it has a gradient,
    is compared where several ranks hold parts of it: those that don't send 0 for the number and 0
    for its complement. So are the steps of optimizers that have a parameter of one owner. An
    accelerator's host does not wait: it looks when the next backward ends. A proposal has a digest
    of its own, in which ranks may differ. A byte says whether a rank has issued something new, so
    that all of them exchange identities again. [Note: First steps]
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
        self._writes = [each for each in facts.writes if each[0].joint_groups == key]
        self._counts = [*chain.from_iterable([counts for _, counts, _ in self._writes])]
        complements = [255 - count if count else 0 for count in self._counts]
        self.sent = [*_with_complement(digest), int(has_news), *self._counts, *complements]
        if proposal is not None:
            self.sent += _with_complement(proposal.digest)

    def lines(self) -> list[str]:
        """Return all of it as text, for the error."""
        steps = [each for order in self._orders for each in order.last_step]
        issued = [describe(each).rpartition(" (")[0] for each in steps]
        return [self._facts.line, *issued]

    def other_writes(self, received: Sequence[int]) -> list[str]:
        """Return what this rank has done with the first parameter that ranks wrote unequally often.

        Args:
            received: The maximum of what the ranks have sent.
        """
        start, num = self.NBYTES + 1, len(self._counts)
        highest = received[start : start + num]
        lowest = received[start + num : start + 2 * num]
        sums = [*map(add, highest, lowest)]
        if max(sums, default=0) <= 255:
            return []
        index = next(index for index, total in enumerate(sums) if total > 255)
        params = [
            param
            for _, counts, params in self._writes
            for param in (*params, *[None] * (len(counts) - len(params)))
        ]
        param, number = params[index], self._counts[index]
        times, has_grad = divmod(number - 1, 2)
        if param is None:
            found = (
                "without gradients",
                "with gradients that it has cleared",
                "whose gradients stay",
            )
            return [f"a backward after a step {found[number]}"]
        if times < 0:
            return [f"a backward, and holds nothing of '{param.label}'"]
        if param.is_owned:
            return [f"a backward after {times} steps of the optimizer of '{param.label}'"]
        return [
            f"a backward after {times} writes to '{param.label}' (by optimizer.step() or edits), "
            f"which had {'an earlier' if has_grad else 'no'} gradient"
        ]

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


def _describe_difference(lines: Sequence[Sequence[str]], ranks: Sequence[int]) -> str:
    """Return a text about the first line in which ranks differ, of `_StepRecord.lines`."""
    for index in range(max(map(len, lines))):
        sides: dict[str, list[int]] = {}
        for rank, own in zip(ranks, lines, strict=True):
            sides.setdefault(own[index] if index < len(own) else "nothing more", []).append(rank)
        if len(sides) > 1:
            parts = [f"{are(those)} in {text}" for text, those in sides.items()]
            return (
                f"the ranks are not in step: in the step that ends with this backward, "
                f"{'; '.join(parts)}. No gradient was published. {ADVICE}"
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
        """Check that all ranks were in step, see [Note: Digest of a step]; after `finish`.

        Raises:
            RuntimeError: If not, on all ranks.
        """
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
    return [each for one in found for each in (one.group, *one.replicate_groups, *key)]


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
        lines = step.lines() if not _is_same(numbers[:size]) else step.other_writes(numbers)
        if lines:
            ranks = Ranks(self._groups, self._device)
            found = ranks.all_messages([ranks.rank, lines])
            text = _describe_difference([own for _, own in found], [rank for rank, _ in found])
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
