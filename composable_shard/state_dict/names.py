"""Names of parameters as users see them, and ranks that need values."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from composable_shard.comm import HOST, Ranks, collectives
from composable_shard.flat_param import FlatParamHandle, ParamEntry, slot_key
from composable_shard.runtime import ShardState, get_states

__all__ = [
    "ManagedParam",
    "ModelRanks",
    "find_params",
    "flat_names",
    "handles_of",
    "mesh_groups",
    "tensor_meshes",
    "unwrapped",
]


_WRAPPER = "_checkpoint_wrapped_module."


def unwrapped(name: str) -> str:
    """Return a name without what torch's checkpoint wrapper takes out of state dicts."""
    return name.replace(_WRAPPER, "")


@dataclass(frozen=True)
class ManagedParam:
    """A parameter that a unit manages."""

    handle: FlatParamHandle
    index: int

    @property
    def entry(self) -> ParamEntry:
        """The parameter itself."""
        return self.handle.entries[self.index]


def handles_of(module: nn.Module, around: ShardState | None = None) -> list[FlatParamHandle]:
    """Return the handles whose parameters `module` shows, of units outside of it too.

    Args:
        module: Any module.
        around: The unit that `module` is a part of, if it is none itself.
    """
    states = [*get_states(module), *([] if around is None else [around])]
    return list(dict.fromkeys(h for state in states for h in state.needed))


def find_params(module: nn.Module, around: ShardState | None = None) -> dict[str, ManagedParam]:
    """Return every managed parameter by name, a tied one by each of its names, in order.

    Args:
        module: Any module.
        around: As in `handles_of`.
    """
    places = {
        slot_key(slot): ManagedParam(handle, index)
        for handle in handles_of(module, around)
        for index, entry in enumerate(handle.entries)
        for slot in entry.slots
    }
    found: dict[str, ManagedParam] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name in child._parameters:
            place = places.get((id(child._parameters), name))
            if place is not None:
                found[f"{prefix}.{name}".lstrip(".")] = place
    return found


def flat_names(module: nn.Module) -> dict[str, FlatParamHandle]:
    """Return the names of the flat parameters that are shown instead of originals."""
    handles = {id(h.flat.sharded): h for h in handles_of(module) if h.flat is not None}
    handles |= {id(h.unsharded_flat): h for h in handles_of(module) if h.unsharded_flat is not None}
    found: dict[str, FlatParamHandle] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, param in child._parameters.items():
            if param is not None and id(param) in handles:
                found[f"{prefix}.{name}".lstrip(".")] = handles[id(param)]
    return found


def mesh_groups(handles: list[FlatParamHandle]) -> list[dist.ProcessGroup]:
    """Return groups through which, one after another, a message reaches all ranks concerned.

    Those of the data-parallel meshes, then the axes of the tensor-parallel ones.
    """
    groups = [group for handle in handles for group in handle.shard_group.joint_groups]
    groups += [mesh.get_group(axis) for mesh in tensor_meshes(handles) for axis in range(mesh.ndim)]
    return list(dict.fromkeys(groups))


def tensor_meshes(handles: list[FlatParamHandle]) -> list[DeviceMesh]:
    """Return the tensor-parallel meshes of parameters, each once."""
    meshes = (
        entry.spec.tensor_parallel[0]
        for handle in handles
        for entry in handle.entries
        if entry.spec.tensor_parallel is not None
    )
    return list(dict.fromkeys(meshes))


class ModelRanks(Ranks):
    """The ranks that share a model.

    Attributes:
        handles: Of the model.
        meshes: The tensor-parallel ones.
        is_first: Whether this rank is the first of them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.handles = handles_of(model)
        for handle in self.handles:
            if not handle.is_in_scope:
                handle.adopt_changes()
        self.meshes = tensor_meshes(self.handles)
        device = self.handles[0].shard_group.device if self.handles else HOST
        super().__init__(mesh_groups(self.handles), device)
        self.is_first = not dist.is_initialized() or dist.get_rank() == 0
        self._is_first_part = all(not any(mesh.get_coordinate() or ()) for mesh in self.meshes)
        if self.handles:
            self.is_first = self._is_first_part and self.handles[0].shard_group.is_first

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
        self.agree(problem)

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

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Give all ranks the first one's tensor; return it where it was."""
        sent = tensor.to(self.device).contiguous()
        for group in self.groups:
            collectives.broadcast(sent, 0, group).wait()
        return tensor.copy_(sent)
