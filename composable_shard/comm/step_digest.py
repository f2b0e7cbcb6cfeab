"""The flags that a backward reduces, and the digest of the step that is sent with them."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard.comm import collectives
from composable_shard.comm.agreement import Ranks
from composable_shard.comm.devices import Waitable
from composable_shard.comm.groups import ShardGroup
from composable_shard.comm.order import LATE_STEPS, GroupOrder, describe, order_of
from composable_shard.comm.watch import ADVICE, are, join_few

_GroupTuple = tuple[dist.ProcessGroup, ...]


class Proposal(NamedTuple):
    """A change that a rank would make from the next step on, if all ranks agree."""

    digest: int  # of it, 32 bits
    accept: Callable[[], None]  # called on all ranks if they have sent the same


class OptimizerNumbers(NamedTuple):
    """What an optimizer holds in its parameter groups."""

    kind: tuple[str, int]  # its class, and how many groups it has
    groups: Sequence[Mapping[str, Any]]
    digest: int  # of both, 32 bits


class StepFacts(NamedTuple):
    """Facts about the program since the last backward.

    Attributes:
        line: The facts in words, the same on all ranks.
        numbers: For each flat parameter the ranks that share it or have copies, and
            the number of the collective in which the ranks have compared it.
        optimizers: Those that have stepped.
    """

    line: str
    numbers: Sequence[tuple[ShardGroup, int]]
    optimizers: Sequence[OptimizerNumbers] = ()


class _StepRecord:
    """The record that the ranks of a mesh compare when a backward ends.

    [Note: Digest of a step]
    The flag reduction of every backward carries a digest of four bytes and its complement. The
    maximum over the ranks equals each rank's own bytes only if all ranks have the same digest;
    otherwise no rank publishes gradients. The digest covers the collectives that all data-parallel
    ranks issue in a step, and facts that the program determines: whether parameters were written
    since the last backward, whether gradients of earlier backwards exist, which model this is (two
    models of one class have units of the same names), and the numbers in the groups of the
    optimizers that have stepped. A rank may have no optimizer, or no group, for parameters of which
    it holds nothing: once the ranks differ in how many optimizers of a class and a number of groups
    have stepped with a model, the numbers of these are not compared any more. A proposal has a
    separate digest, in which ranks may differ. One byte says whether a rank has issued a new
    collective; then all ranks exchange identities again. [Note: First steps]

    On an accelerator the host reads the result two backwards later, in the same backward on all
    ranks, when the device has usually passed it. By then the gradients of two steps are published;
    those of the third are not.
    """

    NBYTES = 8

    def __init__(
        self,
        shard_groups: Sequence[ShardGroup],
        facts: StepFacts,
        proposal: Proposal | None,
    ) -> None:
        """Begin a new step of the process groups of a mesh, and digest the last one."""
        joint = shard_groups[0].joint_groups
        groups = dict.fromkeys(each for one in shard_groups for each in (*one.groups, *joint))
        self._facts, self.proposal = facts, proposal
        self._orders: list[GroupOrder] = []
        self._issued: list[list[int]] = []
        digest, has_news = zlib.crc32(facts.line.encode()), False
        for order in map(order_of, groups):
            digest = zlib.crc32(order.fold().to_bytes(4, "little"), digest)
            has_news = has_news or order.has_news
            self._orders.append(order)
            self._issued.append(order.last_step)  # on an accelerator other steps follow
        self._numbers = sorted(
            {each for group, each in facts.numbers if group.joint_groups == joint}
        )
        digest = zlib.crc32(str(self._numbers).encode(), digest)
        self._order = order_of(joint[0]) if joint else GroupOrder()
        self._optimizers = facts.optimizers
        if left_out := self._order.left_out.get(tuple(self._numbers)):
            self._optimizers = [each for each in facts.optimizers if each.kind not in left_out]
        if len(self._optimizers) > 1:  # ranks that lack some may have the others in another order
            self._optimizers = sorted(self._optimizers, key=attrgetter("kind"))
        for each in self._optimizers:
            digest = zlib.crc32(each.digest.to_bytes(4, "little"), digest)
        self.sent = [*_with_complement(digest), int(has_news)]
        if proposal is not None:
            self.sent += _with_complement(proposal.digest)

    def lines(self) -> list[str]:
        """Return the record as lines of text, for the error."""
        issued = [describe(each).rpartition(" (")[0] for each in chain(*self._issued)]
        model = ", ".join(map(str, self._numbers))
        model = f"a backward of the model whose first call was at collective {model}"
        return [self._facts.line, *issued, model]

    def optimizers(self) -> list[tuple[str, list[dict[str, str]]]]:
        """Return classes, and the numbers of each group as text."""
        return [
            (
                one.kind[0],
                [{key: repr(value) for key, value in each.items()} for each in one.groups],
            )
            for one in self._optimizers
        ]

    def leave_out(self, kinds: Iterable[tuple[str, int]]) -> None:
        """Do not compare numbers of these kinds of optimizers with this model from now on."""
        self._order.left_out.setdefault(tuple(self._numbers), set()).update(kinds)

    def exchange_again(self) -> None:
        """Exchange identities on all groups."""
        for order in self._orders:
            order.exchange_again()


_ALL_BITS = (1 << 32) - 1


def _with_complement(digest: int) -> list[int]:
    return [*digest.to_bytes(4, "little"), *(digest ^ _ALL_BITS).to_bytes(4, "little")]


def _is_same(received: Sequence[int]) -> bool:
    """Return whether all ranks have sent the same, given the maximum."""
    digest, complement = received[:4], received[4:]
    both = int.from_bytes(digest, "little") ^ int.from_bytes(complement, "little")
    return both == _ALL_BITS


def _describe_difference(
    lines: Sequence[Sequence[str]],
    ranks: Sequence[int],
    *,
    is_late: bool,
    advice: str = ADVICE,
) -> str | None:
    """Return a text about the first line of `_StepRecord.lines` in which ranks differ, or None."""
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
                f"{join_few(parts)}. {ending}. {advice}"
            )
    return None


_ADVICE_ON_NUMBERS = (
    "Set it alike on all ranks. An optimizer that computes it from all of its parameters needs a "
    'granularity other than "param", where each rank sees only those that it owns.'
)
_Optimizers = Sequence[Sequence[Any]]  # of one rank, as `_StepRecord.optimizers` returns them


def _kinds_that_differ(optimizers: Sequence[_Optimizers]) -> set[tuple[str, int]]:
    """Return the kinds of optimizers of which the ranks have different numbers."""
    counts = [Counter((name, len(groups)) for name, groups in own) for own in optimizers]
    return {kind for kind in set().union(*counts) if len({own[kind] for own in counts}) > 1}


def _lines_of_numbers(optimizers: Sequence[_Optimizers]) -> list[list[str]]:
    """Return the numbers of each rank as lines of text; the ranks have the same optimizers."""
    # One index is the same optimizer and group on all ranks. Keys are those of any rank, so that
    # lines at one position are about one number.
    lines: list[list[str]] = [[] for _ in optimizers]
    kinds = [(name, len(groups)) for name, groups in optimizers[0]]
    for index, (name, num_groups) in enumerate(kinds):
        which = f"{name} (number {index + 1})" if len(kinds) > 1 else name
        for number in range(num_groups):
            groups = [own[index][1][number] for own in optimizers]
            for key in dict.fromkeys(chain(*groups)):
                for own, group in zip(lines, groups, strict=True):
                    value = f"= {group[key]}" if key in group else "missing"
                    own.append(f"a step of {which} with param_groups[{number}][{key!r}] {value}")
    return lines


class FlagReduction:
    """The maximum over all ranks of small numbers, one byte each; in flight until `finish`.

    One all-reduce for each process group. Where a mesh has several groups, the result of the first
    one goes on to the next.
    """

    def __init__(
        self,
        values: Sequence[tuple[ShardGroup, Sequence[int]]],
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
        self._meshes: dict[_GroupTuple, _MeshReduction] = {}
        self._places: list[tuple[_GroupTuple, int, int]] = []  # of each flat parameter's numbers
        sent: dict[_GroupTuple, list[int]] = {}
        groups: dict[int, ShardGroup] = {}  # few; to hash one takes long
        for group, numbers in values:
            own = sent.setdefault(group.joint_groups, [])
            self._places.append((group.joint_groups, len(own), len(own) + len(numbers)))
            own.extend(numbers)
            groups[id(group)] = group
        for group in groups.values():
            if (key := group.joint_groups) in self._meshes:
                continue
            step = None
            if facts is not None:
                same = [each for each in groups.values() if each.joint_groups == key]
                step = _StepRecord(same, facts, proposal if len(sent) == 1 else None)
            self._meshes[key] = _MeshReduction(key, sent[key], highest, group.device, step)

    def finish(self) -> list[list[int]]:
        """Wait, and return the largest numbers of all ranks, in the order of `values`."""
        received = {key: mesh.finish() for key, mesh in self._meshes.items()}
        return [received[key][start:end] for key, start, end in self._places]

    def check_step(self) -> None:
        """Check, after `finish`, that all ranks were in step. [Note: Digest of a step]"""
        for mesh in self._meshes.values():
            mesh.check_step()

    def abandon(self) -> None:
        """Wait until nothing is in flight; errors of the collectives are ignored."""
        for mesh in self._meshes.values():
            mesh.abandon()


_FLAGS = "the flags of a backward"
_WERE_NOT_IN_STEP = (
    "the ranks differed in an earlier step and agree now; that step's gradients were published. "
    "Load a checkpoint from before it."
)


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
        before = order_of(self._groups[0]).delayed(step, received)
        if before is None:
            return
        step, received = before
        numbers, size = received.tolist(), _StepRecord.NBYTES
        if not _is_same(numbers[:size]):
            self._refuse(step)
        if numbers[size]:
            step.exchange_again()
        if step.proposal is not None and _is_same(numbers[-size:]):
            step.proposal.accept()

    def _refuse(self, step: _StepRecord) -> None:
        """Raise an error on all ranks, unless they differ only in which optimizers they have."""
        ranks, is_late = Ranks(self._groups, self._device), self._device.type != "cpu"
        messages = ranks.all_messages([ranks.rank, step.lines(), step.optimizers()])
        numbers, lines, optimizers = zip(*messages, strict=True)
        text = _describe_difference(lines, numbers, is_late=is_late)
        if text is None:
            odd = _kinds_that_differ(optimizers)
            step.leave_out(odd)
            same = [[x for x in own if (x[0], len(x[1])) not in odd] for own in optimizers]
            text = _describe_difference(
                _lines_of_numbers(same), numbers, is_late=is_late, advice=_ADVICE_ON_NUMBERS
            )
            if text is None and odd:
                return
        raise RuntimeError(text or _WERE_NOT_IN_STEP)

    def abandon(self) -> None:
        while self._works:
            collectives.abandon(self._works.pop())


def _send(numbers: list[int], device: torch.device) -> Tensor:
    """Return small numbers on the device, shape `(len(numbers),)`; the host does not wait."""
    if len(set(numbers)) == 1:  # as in most backward passes
        return torch.full((len(numbers),), numbers[0], dtype=torch.uint8, device=device)
    sent = torch.frombuffer(bytearray(numbers), dtype=torch.uint8)
    return sent if device.type == "cpu" else sent.pin_memory().to(device, non_blocking=True)
