"""Tell all ranks what a backward did with each parameter: of which there are gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard import _collectives
from composable_shard._mesh import ShardGroup

__all__ = ["UseExchange"]

_Groups = tuple[dist.ProcessGroup, ...]


class UseExchange:
    """An exchange of small numbers, the largest of which counts; in flight until `finish`.

    A byte for each number. One all-reduce for each process group. Where a mesh has several groups,
    what the first one tells goes on to the next.
    """

    def __init__(self, values: Sequence[tuple[ShardGroup, list[int]]], *, highest: int) -> None:
        """Start the exchange.

        Args:
            values: For each flat parameter the ranks that share it or have copies, and numbers.
            highest: The highest number that any rank may have.
        """
        self._sizes = [len(numbers) for _, numbers in values]
        self._meshes: dict[_Groups, _MeshExchange] = {}
        self._keys = [group.joint_groups for group, _ in values]
        for key, (group, _) in zip(self._keys, values, strict=True):
            if key not in self._meshes:
                sent = [n for g, numbers in values if g.joint_groups == key for n in numbers]
                self._meshes[key] = _MeshExchange(key, sent, highest, group.device)

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


class _MeshExchange:
    """The exchange of one mesh.

    When this returns, the all-reduces of all groups have been issued, for they must come before
    the reductions on every rank.
    """

    def __init__(
        self, groups: _Groups, numbers: list[int], highest: int, device: torch.device
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
            self._works.append(_collectives.all_reduce(self._sent, group, dist.ReduceOp.MAX))

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
            _collectives.abandon(self._works.pop())


def _send(numbers: list[int], device: torch.device) -> Tensor:
    """Return small numbers on the device, shape `(len(numbers),)`; the host does not wait."""
    if len(set(numbers)) == 1:  # as in most backward passes
        return torch.full((len(numbers),), numbers[0], dtype=torch.uint8, device=device)
    is_pinned = device.type != "cpu"
    sent = torch.tensor(numbers, dtype=torch.uint8, pin_memory=is_pinned)
    return sent.to(device, non_blocking=True)
