"""Which parameters any rank used in a backward, so that the others keep no gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from composable_shard import _collectives
from composable_shard._flat_param import FlatParamHandle

__all__ = ["UseExchange"]


class UseExchange:
    """One exchange of a byte for each parameter, in flight until `finish`.

    One all-reduce for each process group. Where a mesh has several groups, what the first one
    tells goes on to the next.
    """

    def __init__(self, handles: Sequence[FlatParamHandle]) -> None:
        self._handles = handles
        self._meshes = [
            _MeshExchange(groups, members) for groups, members in _by_mesh(handles).items()
        ]

    def finish(self) -> list[list[bool]]:
        """Wait, and return for each handle which of its parameters any rank used."""
        used: dict[FlatParamHandle, list[bool]] = {}
        for mesh in self._meshes:
            used.update(mesh.finish())
        return [used[handle] for handle in self._handles]

    def abandon(self) -> None:
        """Wait until nothing is in flight; errors of the collectives are ignored."""
        for mesh in self._meshes:
            mesh.abandon()


_Groups = tuple[dist.ProcessGroup, ...]


def _by_mesh(handles: Sequence[FlatParamHandle]) -> dict[_Groups, list[FlatParamHandle]]:
    meshes: dict[_Groups, list[FlatParamHandle]] = {}
    for handle in handles:
        meshes.setdefault(handle.shard_group.joint_groups, []).append(handle)
    return meshes


class _MeshExchange:
    """The exchange for the handles of one mesh.

    When this returns, the all-reduces of all groups have been issued, for they must come before
    the reductions on every rank.
    """

    def __init__(self, groups: _Groups, handles: list[FlatParamHandle]) -> None:
        self._handles = handles
        self._works: list[dist.Work] = []
        used = [flag for handle in handles for flag in handle.grad.used]
        device = handles[0].shard_group.device
        # A rank that used them all knows the answer: it waits for nothing, and reads nothing back
        # from the device.
        self._all_used = all(used)
        self._sent = torch.tensor(used, dtype=torch.uint8).to(device)
        for index, group in enumerate(groups):
            if index and self._all_used:
                self._sent = self._sent.clone()
            elif index:
                self._wait()
            self._works.append(_collectives.all_reduce(self._sent, group, dist.ReduceOp.MAX))

    def _wait(self) -> None:
        while self._works:
            self._works.pop().wait()

    def finish(self) -> dict[FlatParamHandle, list[bool]]:
        self._wait()
        if self._all_used:
            return {handle: [True] * len(handle.entries) for handle in self._handles}
        received = iter(self._sent.tolist())
        return {handle: [bool(next(received)) for _ in handle.entries] for handle in self._handles}

    def abandon(self) -> None:
        while self._works:
            _collectives.abandon(self._works.pop())
