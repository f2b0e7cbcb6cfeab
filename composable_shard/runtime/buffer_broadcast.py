"""`BufferBroadcast`: the buffers of a unit, sent to all ranks before a forward.

[Note: When buffers are broadcast]
Ranks see different data, so their batch statistics drift apart between two broadcasts. A forward
broadcasts if the forward before it was for training and its gradients were synchronised. So
microbatches without synchronisation keep what they add to each rank's buffers until the step, and
an evaluation sees the same values everywhere for one broadcast. A unit that runs several times in
a call broadcasts once; a recomputation in a backward broadcasts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from composable_shard.comm import ShardGroup, collectives
from composable_shard.dtensors import is_dtensor
from composable_shard.torch_private import (
    buffers_of,
    foreach_copy_,
)


class BufferBroadcast:
    """Broadcasts the buffers that a unit's modules hold when it runs.

    Refers to the modules' dicts of buffers, never to modules, which would refer back to it.
    """

    def __init__(self, modules: Sequence[nn.Module], shard_group: ShardGroup) -> None:
        self.shard_group = shard_group  # the ranks that take part
        # A ScriptModule's is no dict, and has no copy; `check_can_broadcast` found it empty.
        self._slots = [each for each in map(buffers_of, modules) if isinstance(each, dict)]
        self._is_due = True

    def describe(self) -> list[str]:
        """Return one line for each buffer: all that the ranks must agree on."""
        return [
            f"buffer '{name}' shape {tuple(buffer.shape)} {buffer.dtype}"
            for slots in self._slots
            for name, buffer in slots.items()
            if buffer is not None
        ]

    def run(self, *, is_followed: bool) -> None:
        """Broadcast if it is due, see [Note: When buffers are broadcast].

        Sends all buffers of the unit as bytes in one broadcast; on a 2-D mesh without a group of
        all its ranks in two, one along each axis. `is_followed`: the next forward broadcasts too.
        """
        if self._is_due:
            self._broadcast()
        self._is_due = is_followed

    @torch.no_grad()
    def _broadcast(self) -> None:
        buffers = self._collect()
        if not buffers or not self.shard_group.joint_groups:
            return
        flat = torch.cat([buffer.flatten().view(torch.uint8) for buffer in buffers])
        for group in self.shard_group.joint_groups:
            collectives.broadcast(flat, 0, group, what="the buffers of a unit").wait()
        if self.shard_group.is_first:
            return
        parts = flat.split([buffer.nbytes for buffer in buffers])
        received = [
            part.view(buffer.dtype).view(buffer.shape)
            for part, buffer in zip(parts, buffers, strict=True)
        ]
        foreach_copy_(buffers, received)

    def _collect(self) -> list[Tensor]:
        """Return the buffers, each once, widest dtype first, so that their bytes are aligned.

        Returns aliases with separate version counters: a pending graph may have saved a buffer that
        its backward does not read, for example batch norm's running mean.
        """
        found: dict[int, Tensor] = {}
        for slots in self._slots:
            for buffer in slots.values():
                if buffer is not None and buffer.numel():
                    local = buffer.to_local() if is_dtensor(buffer) else buffer
                    found.setdefault(id(buffer), local.data)
        return sorted(found.values(), key=lambda buffer: -buffer.dtype.itemsize)


def check_can_broadcast(modules: Sequence[nn.Module]) -> None:
    """Check that the buffers of a unit can be broadcast."""
    for module in modules:
        if isinstance(module, ScriptModule) and len(buffers_of(module)):
            raise NotImplementedError(
                f"broadcast_buffers=True can't find the buffers of a {type(module).__name__} "
                "(torch.jit.script or trace). Leave broadcast_buffers out for its unit."
            )
        for name, buffer in buffers_of(module).items():
            if buffer is not None and buffer.layout is not torch.strided:
                raise ValueError(
                    f"broadcast_buffers=True can't send buffer '{name}' of "
                    f"{type(module).__name__}, which has layout {buffer.layout}. Make it dense, or "
                    "leave broadcast_buffers out for its unit."
                )
