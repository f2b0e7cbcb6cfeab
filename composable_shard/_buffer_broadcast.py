"""The first rank's buffers for all ranks before a forward, as DistributedDataParallel has it.

[Note: When buffers are broadcast]
Ranks see different data, so their batch statistics drift apart between two broadcasts. A forward
broadcasts if the one before it was trained on and synchronised its gradients, so that what
microbatches without synchronisation add to each rank's buffers stays until the step, and an
evaluation sees the same values everywhere at the cost of one broadcast. A unit that a call runs
several times broadcasts once; what a backward recomputes does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable_shard import _collectives
from composable_shard._mesh import ShardGroup

__all__ = ["BufferBroadcast", "check_can_broadcast"]


class BufferBroadcast:
    """The buffers of one unit, those that its modules hold when it runs.

    Refers to the modules' dicts of buffers, never to modules, which would refer back to it.

    Attributes:
        shard_group: The ranks that take part.
    """

    def __init__(self, modules: Sequence[nn.Module], shard_group: ShardGroup) -> None:
        self.shard_group = shard_group
        self._slots = [module._buffers for module in modules]
        self._is_due = True
        self._last_call: object = None

    def describe(self) -> list[str]:
        """Return a line for each buffer with all that the ranks must agree on."""
        return [
            f"buffer '{name}' shape {tuple(buffer.shape)} {buffer.dtype}"
            for slots in self._slots
            for name, buffer in slots.items()
            if buffer is not None
        ]

    def broadcast_if_due(self, call: object, *, is_followed: bool) -> None:
        """Broadcast, unless the rule says no: [Note: When buffers are broadcast].

        All buffers of the unit travel together, as bytes: one broadcast, on a 2-D mesh without a
        group of all its ranks one along each axis. None for a unit without buffers.

        Args:
            call: What is one object for all units that a call of the tree runs.
            is_followed: Whether the next forward broadcasts too, after this one.
        """
        if self._last_call is call:
            return
        if self._is_due:
            self._broadcast()
        self._last_call, self._is_due = call, is_followed

    @torch.no_grad()
    def _broadcast(self) -> None:
        buffers = self._collect()
        if not buffers or not self.shard_group.joint_groups:
            return
        flat = torch.cat([buffer.flatten().view(torch.uint8) for buffer in buffers])
        for group in self.shard_group.joint_groups:
            _collectives.broadcast(flat, 0, group).wait()
        if self.shard_group.is_first:
            return
        parts = flat.split([buffer.nbytes for buffer in buffers])
        received = [
            part.view(buffer.dtype).view(buffer.shape)
            for part, buffer in zip(parts, buffers, strict=True)
        ]
        torch._foreach_copy_(buffers, received)

    def _collect(self) -> list[Tensor]:
        """Return the buffers, each once, widest dtype first: their bytes are aligned then.

        As aliases with version counters of their own. A graph that waits for its backward may have
        saved a buffer, batch norm's running mean for example, which it does not read again.
        """
        found: dict[int, Tensor] = {}
        for slots in self._slots:
            for buffer in slots.values():
                if buffer is not None and buffer.numel():
                    local = buffer.to_local() if isinstance(buffer, DTensor) else buffer
                    found.setdefault(id(buffer), local.data)
        return sorted(found.values(), key=lambda buffer: -buffer.dtype.itemsize)


def check_can_broadcast(modules: Sequence[nn.Module]) -> None:
    """Check that the buffers of a unit can be broadcast.

    Raises:
        ValueError: For a sparse buffer, naming it.
    """
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.layout is not torch.strided:
                raise ValueError(
                    f"broadcast_buffers=True can't send buffer '{name}' of "
                    f"{type(module).__name__}, which has layout {buffer.layout}. Make it dense, or "
                    "leave broadcast_buffers out for its unit."
                )
