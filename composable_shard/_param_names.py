"""The parameters of a model by the names they have in its state dict, shown or hidden."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable_shard._flat_param import FlatParamHandle, ParamEntry
from composable_shard._state import ShardState
from composable_shard._storage import slot_key
from composable_shard._traversal import get_states

__all__ = [
    "ManagedParam",
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
