"""The ranks that share a model: what they tell each other, and which of them is the first."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from composable_shard import _collectives
from composable_shard._host_copies import HOST
from composable_shard._param_names import handles_of, mesh_groups, tensor_meshes
from composable_shard._rank_messages import all_messages, raise_together

__all__ = ["Ranks"]


class Ranks:
    """The ranks that share a model.

    Attributes:
        handles: Of the model.
        meshes: The tensor-parallel ones.
        groups: What goes through them, one after another, reaches all ranks.
        device: Where they communicate.
        is_first: Whether this rank is the first of them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.handles = handles_of(model)
        for handle in self.handles:
            if not handle.is_in_scope:
                handle.adopt_changes()
        self.meshes = tensor_meshes(self.handles)
        self.groups = mesh_groups(self.handles)
        self.device = HOST
        self.is_first = not dist.is_initialized() or dist.get_rank() == 0
        self._is_first_part = all(not any(mesh.get_coordinate() or ()) for mesh in self.meshes)
        if self.handles:
            self.device = self.handles[0].shard_group.device
            self.is_first = self._is_first_part and self.handles[0].shard_group.is_first

    def raise_together(self, problem: Exception | None) -> None:
        """Raise on all ranks what any of them has found."""
        raise_together(self.groups, self.device, problem)

    def check_one_is_first(self) -> None:
        """Check that the first rank is the first of every unit's.

        An all-gather of 31 bytes for each process group, where units have different ones.

        Raises:
            NotImplementedError: On all ranks alike.
        """
        if len({handle.shard_group.joint_groups for handle in self.handles}) < 2:
            return
        odd = [h.name for h in self.handles if h.shard_group.is_first != self.is_first]
        problem = None
        if odd and self._is_first_part:
            problem = NotImplementedError(
                "full values come from, and go to, one rank only where the meshes of all units "
                f"begin with it, and those of {odd} and '{self.handles[0].name}' begin with "
                "different ranks. Pass StateDictOptions(rank0_only=False) to get a state dict, and "
                "give every rank the whole one to load it."
            )
        self.raise_together(problem)

    def check_can_broadcast(self) -> None:
        """Check that the first rank can give values to all others.

        Raises:
            NotImplementedError: On all ranks alike.
        """
        if not self.handles and dist.is_initialized() and dist.get_world_size() > 1:
            raise NotImplementedError(
                "broadcast_from_rank0 needs a model with sharded units, which say who the ranks "
                "are, and this one has none. Give every rank the whole state dict."
            )
        self.check_one_is_first()

    def all_messages(self, message: Any) -> list[Any]:
        """Return the different messages of all ranks."""
        return all_messages(self.groups, self.device, message)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Give all ranks the first one's tensor; return it where it was."""
        sent = tensor.to(self.device).contiguous()
        for group in self.groups:
            _collectives.broadcast(sent, 0, group).wait()
        return tensor.copy_(sent)
