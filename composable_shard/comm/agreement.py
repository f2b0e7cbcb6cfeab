"""What ranks tell each other: texts, errors, and which parameters were used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard.comm import collectives
from composable_shard.comm.groups import ShardGroup

__all__ = [
    "FlagReduction",
    "all_messages",
    "compare_rows",
    "digest_of",
    "gather_bytes",
    "gather_rows",
    "gather_texts",
    "raise_together",
]


_GroupSequence = Sequence[dist.ProcessGroup]
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, RuntimeError, NotImplementedError)
}


def digest_of(data: bytes) -> bytes:
    """Return 31 bytes, so that one more makes a message of 32."""
    return hashlib.sha256(data).digest()[:31]


def gather_bytes(
    group: dist.ProcessGroup, device: torch.device, data: bytes, sizes: list[int]
) -> list[bytes]:
    """Return what every rank of the group sent; one all-gather of the largest size.

    Args:
        group: The ranks that take part.
        device: Where they communicate.
        data: This rank's.
        sizes: Of what each rank sends, the same list on all ranks.
    """
    # Of at least one byte, as a buffer without any is refused.
    local = torch.frombuffer(bytearray(data or b"-"), dtype=torch.uint8)[: len(data)].to(device)
    joined: Tensor = collectives.all_gather_uneven(local, sizes, group).cpu()
    return [bytes(part.tolist()) for part in joined.split(sizes)]


def gather_rows(group: dist.ProcessGroup, device: torch.device, data: bytes) -> Tensor:
    """Return what every rank of the group sent, as many bytes each, shape (ranks, bytes).

    One all-gather; what follows it takes no Python object for each rank, as there may be thousands.

    Args:
        group: The ranks that take part.
        device: Where they communicate.
        data: This rank's.
    """
    local = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    output = local.new_empty(group.size() * len(data))
    collectives.all_gather(output, local, group).wait()
    return output.cpu().view(group.size(), -1)


def compare_rows(rows: Tensor, digest: bytes) -> tuple[bool, bytes]:
    """Compare the digests of all ranks of a group.

    Args:
        rows: From `gather_rows`, each beginning with a digest.
        digest: This rank's.

    Returns:
        Whether all are the same, and what to tell the ranks of the next group: of a difference in
        this one too.
    """
    digests = rows[:, : len(digest)]
    if bool((digests == digests[0]).all()):
        return True, digest
    return False, digest_of(bytes(digests.flatten().tolist()))


def all_messages(groups: _GroupSequence, device: torch.device, message: Any) -> list[Any]:
    """Return the different messages of all ranks; this rank's alone where all have the same.

    One all-gather of 31 bytes for each group; only where messages differ two more, of them.

    Args:
        groups: What goes through them, one after another, reaches all ranks concerned.
        device: Where the ranks communicate.
        message: Anything that JSON can say; tuples come back as lists.
    """
    text = json.dumps(message)
    digest, is_same = digest_of(text.encode()), True
    for group in groups:
        is_alike, digest = compare_rows(gather_rows(group, device, digest), digest)
        is_same &= is_alike
    if is_same:
        return [json.loads(text)]
    texts = dict.fromkeys(gather_texts(groups, device, text))
    return [json.loads(each) for each in texts]


def gather_texts(groups: _GroupSequence, device: torch.device, text: str) -> list[str]:
    """Return every rank's text; two all-gathers for each group."""
    texts = [text]
    for group in groups:
        payload = json.dumps(texts).encode()
        sizes = gather_bytes(group, device, len(payload).to_bytes(8, "little"), [8] * group.size())
        numels = [int.from_bytes(size, "little") for size in sizes]
        gathered = gather_bytes(group, device, payload, numels)
        texts = [text for part in gathered for text in json.loads(part)]
    return texts


def raise_together(groups: _GroupSequence, device: torch.device, problem: Exception | None) -> None:
    """Raise on all ranks the errors that any of them has found; one all-gather of 31 bytes each.

    Raises:
        ValueError, RuntimeError, NotImplementedError: Of the first rank's kind, with the texts of
            all ranks.
    """
    rank = dist.get_rank() if groups else 0
    mine = None if problem is None else [rank, type(problem).__name__, str(problem)]
    messages = all_messages(groups, device, mine)
    found = [each for each in messages if each is not None]
    if not found:
        return
    texts: dict[str, list[int]] = {}
    for where, _, text in sorted(found):
        texts.setdefault(text, []).append(where)
    joined = "; ".join(f"on ranks {ranks}: {text}" for text, ranks in texts.items())
    is_everywhere = len(texts) == 1 and None not in messages
    kind = _KINDS.get(min(found)[1], RuntimeError)
    raise kind(next(iter(texts)) if is_everywhere else joined) from problem


_GroupTuple = tuple[dist.ProcessGroup, ...]


class FlagReduction:
    """The maximum over all ranks of small numbers, one byte each; in flight until `finish`.

    One all-reduce for each process group. Where a mesh has several groups, the result of the first
    one goes on to the next.
    """

    def __init__(self, values: Sequence[tuple[ShardGroup, list[int]]], *, highest: int) -> None:
        """Start the all-reduces.

        Args:
            values: For each flat parameter the ranks that share it or have copies, and numbers.
            highest: The highest number that any rank may have.
        """
        self._sizes = [len(numbers) for _, numbers in values]
        self._meshes: dict[_GroupTuple, _MeshReduction] = {}
        self._keys = [group.joint_groups for group, _ in values]
        for key, (group, _) in zip(self._keys, values, strict=True):
            if key not in self._meshes:
                sent = [n for g, numbers in values if g.joint_groups == key for n in numbers]
                self._meshes[key] = _MeshReduction(key, sent, highest, group.device)

    def finish(self) -> list[list[int]]:
        """Wait, and return the largest numbers that any rank gave, in the order of `values`."""
        received = {key: mesh.finish() for key, mesh in self._meshes.items()}
        ends = dict.fromkeys(received, 0)
        largest = []
        for key, size in zip(self._keys, self._sizes, strict=True):
            start = ends[key]
            ends[key] = end = start + size
            largest.append(received[key][start:end])
        return largest

    def abandon(self) -> None:
        """Wait until nothing is in flight; errors of the collectives are ignored."""
        for mesh in self._meshes.values():
            mesh.abandon()


class _MeshReduction:
    """The reduction over one mesh.

    When this returns, the all-reduces of all groups have been issued, for they must come before
    the reductions on every rank.
    """

    def __init__(
        self, groups: _GroupTuple, numbers: list[int], highest: int, device: torch.device
    ) -> None:
        self._numbers = numbers
        self._works: list[dist.Work] = []
        # A rank that gives nothing but the highest knows the answer: it waits for nothing before
        # the end, and reads nothing back from the device.
        self._is_known = numbers.count(highest) == len(numbers)
        self._sent = _send(numbers, device)
        for index, group in enumerate(groups):
            if index and self._is_known:
                self._sent = self._sent.clone()
            elif index:
                self._wait()
            self._works.append(collectives.all_reduce(self._sent, group, dist.ReduceOp.MAX))

    def _wait(self) -> None:
        while self._works:
            self._works.pop().wait()

    def finish(self) -> list[int]:
        self._wait()
        if not self._is_known:
            self._numbers, self._is_known = self._sent.tolist(), True
        return self._numbers

    def abandon(self) -> None:
        while self._works:
            collectives.abandon(self._works.pop())


def _send(numbers: list[int], device: torch.device) -> Tensor:
    """Return small numbers on the device, shape `(len(numbers),)`; the host does not wait."""
    if len(set(numbers)) == 1:  # as in most backward passes
        return torch.full((len(numbers),), numbers[0], dtype=torch.uint8, device=device)
    is_pinned = device.type != "cpu"
    sent = torch.tensor(numbers, dtype=torch.uint8, pin_memory=is_pinned)
    return sent.to(device, non_blocking=True)
