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

    One all-reduce for each process group, which is started at once. Where a mesh has several
    groups, what the first one tells goes on to the next.
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
    """The exchange for the handles of one mesh."""

    def __init__(self, groups: _Groups, handles: list[FlatParamHandle]) -> None:
        self._handles = handles
        self._groups = list(groups)
        used = [flag for handle in handles for flag in handle.grad.used]
        device = handles[0].shard_group.device
        # A rank that used them all knows the answer, and reads nothing back from the device.
        self._all_used = all(used)
        if self._all_used:
            self._sent = torch.ones(len(used), dtype=torch.uint8, device=device)
        else:
            self._sent = torch.tensor(used, dtype=torch.uint8).to(device)
        self._work: dist.Work | None = None
        self._start()

    def _start(self) -> None:
        if self._groups:
            group = self._groups.pop(0)
            self._work = _collectives.all_reduce(self._sent, group, dist.ReduceOp.MAX)

    def finish(self) -> dict[FlatParamHandle, list[bool]]:
        while self._work is not None:
            work, self._work = self._work, None
            work.wait()
            self._start()
        if self._all_used:
            return {handle: [True] * len(handle.entries) for handle in self._handles}
        received = iter(self._sent.tolist())
        return {handle: [bool(next(received)) for _ in handle.entries] for handle in self._handles}

    def abandon(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            _collectives.abandon(work)
