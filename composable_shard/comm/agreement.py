"""How ranks agree on messages, on flags, and on errors that all of them raise.

[Note: All ranks or none]
A rank that raises alone leaves the other ranks waiting in their next collective. So the ranks
exchange every problem that only some of them can find (a damaged file, a different shape, a failed
body) before any of them continues. `Ranks.agreed` runs a body and raises its error on all ranks,
`compare` finds different messages, `any_of` joins flags. If all messages are the same, this takes
one all-gather of 31 bytes for each process group. Otherwise the messages follow, as JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard.comm import collectives
from composable_shard.comm.calls import function_called
from composable_shard.comm.order import order_of
from composable_shard.comm.watch import join_few, list_ranks

# First, because a NotImplementedError is a RuntimeError too.
_KINDS = (ValueError, NotImplementedError, RuntimeError)
_UNITS = "the comparison of the units"
_DIGEST_NBYTES = 31  # one more makes a message of 32


def all_bytes(
    group: dist.ProcessGroup, device: torch.device, data: bytes, *, what: str | None = None
) -> list[bytes]:
    """Return every rank's bytes; two all-gathers, the first one of their lengths."""
    lengths = _gather_rows(group, device, len(data).to_bytes(8, "little"), what)
    sizes: list[int] = lengths.view(torch.int64).flatten().tolist()
    # At least one byte: backends refuse empty buffers.
    local = torch.frombuffer(bytearray(data or b"-"), dtype=torch.uint8)[: len(data)].to(device)
    joined: Tensor = collectives.all_gather_uneven(local, sizes, group, what=what).cpu()
    return [bytes(part.tolist()) for part in joined.split(sizes)]


def _gather_rows(
    group: dist.ProcessGroup, device: torch.device, data: bytes, what: str | None
) -> Tensor:
    """Return every rank's bytes, all of one length; shape `(ranks, bytes)`, on the CPU.

    No Python object is made for each rank, because there may be thousands.
    """
    local = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    output = local.new_empty(group.size() * len(data))
    collectives.all_gather(output, local, group, what=what).wait()
    return output.cpu().view(group.size(), -1)


def _digest_of(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_DIGEST_NBYTES]


class Agreeing:
    """Ranks that raise an error together."""

    def agree(self, problem: Exception | None) -> None:
        """Raise any rank's problem on all ranks. [Note: All ranks or none]"""
        raise NotImplementedError

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


class Ranks(Agreeing):
    """Ranks that reach each other through process groups. All of them must call its methods."""

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
            what: The purpose, for error texts. Default: the function that the program has called.

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

    def count_units_anew(self) -> None:
        """Number units from 1 again, on all ranks: they may have formed different numbers of them.

        So a model that is built alike after an error of the comparison is right.
        """
        for group in self.groups[:1]:
            order_of(group).num_units.clear()

    @property
    def num_collectives(self) -> int:
        """Number of collectives that they have issued; 0 if they do not share one group."""
        return order_of(self.groups[0]).num_issued if len(self.groups) == 1 else 0

    def all_messages(self, message: Any) -> list[Any]:
        """Return the messages of all ranks, or only this rank's if all are the same."""
        return self.compare(message)[0]

    def told_by_all(self, make: Callable[[], Any]) -> list[Any]:
        """Return the messages that `make` returns on all ranks, as `all_messages` does.

        Raise any rank's error in it on all of them, as `agree` does, without another all-gather.
        """
        message, problem = attempt(make)
        try:
            found = None if problem is None else describe_problem(problem, self.rank)
            messages = self.all_messages([message, found])
            raise_found([each for _, each in messages], problem)
        finally:
            problem = None  # as in `agreed`
        return [each for each, _ in messages]

    def agree(self, problem: Exception | None) -> None:
        """Raise any rank's problem on all ranks. [Note: All ranks or none]

        Raises:
            ValueError, NotImplementedError, RuntimeError: As the first rank's problem, with the
                texts of all ranks.
        """
        messages = self.all_messages(
            None if problem is None else describe_problem(problem, self.rank)
        )
        raise_found(messages, problem)

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
            problem: The error that this rank will raise. It then sends its flags, but may return
                without the other ranks' flags.
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
                # Ctrl-C: this rank must be able to end.
        return [int(flag) for flag in flags]


def attempt(make: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return what a function returns, or its error: of any kind, because the other ranks wait."""
    try:
        return make(), None
    except Exception as error:
        return None, error


def describe_problem(problem: Exception, rank: int) -> list[Any]:
    """Return a message from which `raise_found` raises on all ranks."""
    kind = next((each for each in _KINDS if isinstance(problem, each)), RuntimeError)
    is_plain = type(problem) in _KINDS
    return [
        rank,
        kind.__name__,
        str(problem) if is_plain else f"{type(problem).__name__}: {problem}",
    ]


def raise_found(messages: list[Any], own: Exception | None) -> None:
    """Raise the problems from `describe_problem`; None stands for a rank without one."""
    if (problem := join_problems(messages)) is not None:
        kind = next(each for each in _KINDS if each.__name__ == problem[1])
        raise kind(problem[2]) from own


def join_problems(messages: list[Any]) -> list[Any] | None:
    """Return one problem that says what `describe_problem` said of all ranks; None if of none."""
    found = sorted(message for message in messages if message is not None)
    if not found:
        return None
    texts: dict[str, list[int]] = {}
    for rank, _, text in found:
        texts.setdefault(text, []).append(rank)
    joined = join_few([f"on ranks {list_ranks(ranks)}: {text}" for text, ranks in texts.items()])
    is_everywhere = len(texts) == 1 and None not in messages
    return [*found[0][:2], next(iter(texts)) if is_everywhere else joined]


def compare_units(
    ranks: Ranks,
    lines: list[str],
    has_hooks: bool = False,
    initial: Sequence[tuple[str, int | None]] = (),
) -> bool:
    """Check that all ranks describe their units in the same lines; return whether any has hooks.

    One all-gather of 32 bytes for each process group, always the same one, because some ranks may
    have reached lazy init when others are about to send tensors.

    Args:
        lines: One for each parameter.
        has_hooks: Whether this rank has hooks on gradients.
        initial: Names of parameters with checksums of their initial values, None for any.
    """
    messages, has_hooks = ranks.compare([lines, initial], has_hooks, what=_UNITS)
    if len(messages) > 1:
        ranks.count_units_anew()
        _raise_difference([lines for lines, _ in messages])
        _raise_other_values([values for _, values in messages])
    return has_hooks


def _raise_difference(all_lines: list[list[str]]) -> None:
    """Raise if the ranks describe their units differently, naming the first difference.

    Each rank has one line for each parameter.
    """
    longest = max(len(lines) for lines in all_lines)
    for index in range(longest):
        seen: dict[str, list[int]] = {}
        for rank, lines in enumerate(all_lines):
            line = lines[index] if index < len(lines) else "no such parameter"
            seen.setdefault(line, []).append(rank)
        if len(seen) > 1:
            detail = join_few([f"ranks {list_ranks(each)}: {line}" for line, each in seen.items()])
            raise RuntimeError(
                "the ranks of one mesh must shard the same model in the same way; the "
                f"first difference is at parameter {index}: {detail}. Build the model and call "
                "fully_shard alike on every rank."
            )


def _raise_other_values(all_values: list[list[tuple[str, int | None]]]) -> None:
    """Raise if checksums of a parameter differ between ranks; None matches any."""
    for each in zip(*all_values, strict=False):
        ranks: dict[int, list[int]] = {}
        for rank, (_, checksum) in enumerate(each):
            if checksum is not None:
                ranks.setdefault(checksum, []).append(rank)
        if len(ranks) > 1:
            one, other = [same[0] for same in ranks.values()][:2]
            raise RuntimeError(
                f"ranks {one} and {other} had different initial values of "
                f"parameter '{each[0][0]}' when fully_shard was called: each keeps a shard of its "
                "own, so the model would be a mixture. Pass sync_module_states=True to take the "
                "first rank's, seed all ranks alike before the model is built, or load the same "
                "values on all. check_initial_values=False leaves out this comparison."
            )
