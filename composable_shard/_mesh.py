"""The ranks that share a flat parameter: their process group, this rank's place, the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_shard._collectives import resolve_group

__all__ = ["ShardGroup"]


@dataclass(frozen=True)
class ShardGroup:
    """A process group and this rank's place in it.

    `rank` counts within the group, never within the world. Deep copies and pickles refer to the
    group by name.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    device: torch.device

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh | None) -> ShardGroup:
        """Return the group of a 1-D mesh; without one, of all ranks on the accelerator or CPU.

        Raises:
            RuntimeError: If torch.distributed is not initialised and was not launched by torchrun.
            ValueError: If the mesh has more than one axis, or this rank is not in it.
        """
        mesh = _default_mesh() if mesh is None else mesh
        if mesh.ndim != 1:
            raise ValueError(
                f"expected a 1-D mesh, got {mesh.ndim} axes {mesh.mesh_dim_names}. "
                "Pass one axis of it, for example mesh['dp']."
            )
        if mesh.get_coordinate() is None:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the mesh of ranks {mesh.mesh.tolist()}: "
                "call fully_shard only on the ranks of the mesh"
            )
        return cls(
            mesh.get_group(), mesh.get_local_rank(), mesh.size(), _device_of(mesh.device_type)
        )

    @property
    def name(self) -> str:
        """The name under which the process group is registered."""
        return self.group.group_name

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardGroup:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.name, self.device)


def _restore(name: str, device: torch.device) -> ShardGroup:
    group = resolve_group(name)
    return ShardGroup(group, group.rank(), group.size(), device)


def _device_of(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        if not dist.is_torchelastic_launched():
            raise RuntimeError(
                "torch.distributed is not initialised. Call "
                "torch.distributed.init_process_group() first, or start the script with torchrun."
            )
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator()
    backend = dist.get_backend()
    device_type = "cpu" if accelerator is None or backend == "gloo" else accelerator.type
    return init_device_mesh(device_type, (dist.get_world_size(),))
