"""The ranks that share a unit, and their process groups."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_shard.comm import collectives
from composable_shard.comm.agreement import Ranks
from composable_shard.comm.devices import backend_name
from composable_shard.comm.order import order_of
from composable_shard.comm.watch import begin_watch, list_ranks
from composable_shard.torch_private import (
    backend_of,
    inherit_timeout,
    num_known_groups,
    root_mesh_of,
    timeout_of,
)

_Groups = tuple[dist.ProcessGroup, ...]


@dataclass(frozen=True)
class ShardGroup:
    """The ranks that share a flat parameter, and the ranks that hold copies of a shard.

    Deep copies share the process groups, which no pickle can hold.

    Attributes:
        group: The shard group. If nothing is sharded, any group that this rank is in.
        rank: This rank's number within the shard group, not within the world.
        size: Ranks that share the flat parameter; 1 where each rank holds all of it.
        device: The device on which the ranks compute.
        replicate_groups: A sum over these groups, one after another, is the sum over all ranks that
            hold a copy of the shard. Each has more than one rank.
        joint_groups: A message through these groups, one after another, reaches all data-parallel
            ranks. Each has more than one rank.
        pipeline_group: The group of the axis "pp" of the mesh that the unit's mesh is part of, if
            there is one. Its ranks own other parameters.
        reduce_group: A second group of the same ranks, if reductions have one of their own.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    device: torch.device
    replicate_groups: _Groups = ()
    joint_groups: _Groups = ()
    pipeline_group: dist.ProcessGroup | None = None
    reduce_group: dist.ProcessGroup | None = None

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, *, is_replicated: bool = False) -> ShardGroup:
        """Return the groups of a mesh.

        The ranks of a 1-D mesh share the flat parameter. A 2-D mesh `(replicate, shard)` shares it
        along its second axis and holds copies along the first.

        Args:
            is_replicated: Whether every rank of the mesh holds the whole flat parameter instead.
        """
        begin_watch()
        if mesh.ndim not in (1, 2):
            raise ValueError(
                "expected a 1-D mesh, or a 2-D one (replicate, shard), "
                f"got {mesh.ndim} axes {mesh.mesh_dim_names}. "
                "Pass one or two axes of it, for example mesh['dp']."
            )
        if mesh.get_coordinate() is None:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the mesh of ranks {mesh.mesh.tolist()}: "
                "call fully_shard only on the ranks of the mesh"
            )
        if mesh.ndim == 2 and not _is_ascending(mesh):
            raise ValueError(
                "expected the ranks of a 2-D mesh to ascend along both axes, got "
                f"{mesh.mesh.tolist()}: process groups are in ascending order, so its first rank "
                "would not be the first of its groups. Use init_device_mesh."
            )
        device = _device_of(mesh.device_type)
        *outer, inner = [mesh.get_group(axis) for axis in range(mesh.ndim)]
        for group in (inner, *outer):
            _inherit_timeout(group)
        joint = _joint_groups([inner, *outer], mesh, device)
        stages = _pipeline_group(mesh)
        if is_replicated:
            return cls(inner, 0, 1, device, joint, joint, pipeline_group=stages)
        replicate = tuple(group for group in outer if group.size() > 1)
        # Not the mesh's coordinate: torch sorts a group's ranks, whatever order the mesh has.
        rank, size = inner.rank(), inner.size()
        return cls(inner, rank, size, device, replicate, joint, pipeline_group=stages)

    @classmethod
    def of_all_ranks(cls, *, is_replicated: bool = False) -> ShardGroup:
        """Return all ranks, on the accelerator or the CPU; units that exist together share it.

        Makes the default process group if there is none.
        """
        if not dist.is_initialized():
            if dist.is_torchelastic_launched() or all(map(os.environ.get, _RENDEZVOUS)):
                dist.init_process_group()
            else:
                _init_one_process()
        begin_watch()
        world = dist.group.WORLD
        assert world is not None
        known = _groups_of_world.setdefault(world, WeakValueDictionary())
        device_type = _type_for(world)
        key = device_type, is_replicated
        found = known.get(key)
        if found is None or found.device != _device_of(device_type):
            if device_type != "cpu":
                init_device_mesh(device_type, (world.size(),))  # sets the device of the process
            rank, size, device = world.rank(), world.size(), _device_of(device_type)
            joint = (world,) if size > 1 else ()
            if is_replicated:
                found = cls(world, 0, 1, device, joint, joint)
            else:
                found = cls(world, rank, size, device, joint_groups=joint)
            known[key] = found
        return found

    def wait_for_interrupted(self) -> None:
        """Wait for the collectives that an interrupt may have lost, of all groups of these ranks.

        Call it before memory that they may write is freed.
        """
        groups = self.replicate_groups
        if self.size > 1:  # small groups, and one for reductions, are among those made
            groups = *self.groups, *_made_groups.get(self.group, {}).values()
        for group in dict.fromkeys(groups):
            collectives.wait_for_interrupted(group)

    def check_host_collectives(self) -> None:
        """Check that the ranks can also send tensors in host memory."""
        for group in (self.group, *self.joint_groups):
            try:
                backend_of(group, torch.device("cpu"))
            except RuntimeError:
                kind = self.device.type
                raise ValueError(
                    f"an OffloadPolicy needs process groups that work on the CPU too, for norms of "
                    f"gradients and full_tensor(), and '{group.group_name}' is for {kind} only. "
                    f"Call init_process_group('cpu:gloo,{kind}:...'), or leave its backend out."
                ) from None

    def with_reduce_group(self) -> ShardGroup:
        """Return the same ranks with a separate group for reductions, if ranks share a unit.

        The first call makes a group, which ends with the shard group; all ranks must make it
        together. It issues an all-gather of 31 bytes.
        """
        if self.size == 1:
            return self
        ranks = dist.get_process_group_ranks(self.group)
        group = _group_for("reductions", ranks, (self.group,), self.device)
        return replace(self, reduce_group=group)

    def group_of_this_rank(self) -> dist.ProcessGroup:
        """Return a group of this rank alone; the first call makes it, as in `SmallGroup.of`."""
        return SmallGroup.of(self, 1).group

    def next_unit_number(self) -> int:
        """Return the number of one more unit of all data-parallel ranks, which all of them form."""
        if not self.joint_groups:
            return 0
        names = tuple(group.group_name for group in self.joint_groups)
        return order_of(self.joint_groups[0]).num_units[names] + 1

    def count_unit(self, number: int) -> None:
        """Count a unit that has been formed: the next one gets the number after its own."""
        if self.joint_groups:
            names = tuple(group.group_name for group in self.joint_groups)
            order_of(self.joint_groups[0]).num_units[names] = number

    def copy_to_replicas(self, tensor: Tensor) -> None:
        """Give the ranks that hold copies of a shard the first one's tensor, and wait for it."""
        for group in self.replicate_groups:
            collectives.broadcast(tensor, 0, group).wait()

    @property
    def groups(self) -> _Groups:
        """All groups that send a unit's values and gradients."""
        own = (self.reduce_group,) if self.reduce_group else ()
        return self.group, *own, *self.replicate_groups

    @property
    def ranks(self) -> Ranks:
        """All data-parallel ranks, for agreement."""
        return Ranks(self.joint_groups, self.device)

    @property
    def num_replicas(self) -> int:
        """Ranks that hold a copy of the same shard, this one included."""
        return math.prod(group.size() for group in self.replicate_groups)

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks: those whose gradients are averaged."""
        return self.size * self.num_replicas

    @property
    def position(self) -> int:
        """This rank's number among all data-parallel ranks."""
        position, step = 0, 1
        for group in self.joint_groups:
            position += group.rank() * step
            step *= group.size()
        return position

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of all data-parallel ranks."""
        return self.rank == 0 and all(group.rank() == 0 for group in self.replicate_groups)

    @property
    def name(self) -> str:
        """The name under which the process group is registered."""
        return self.group.group_name

    @cached_property
    def sharing_ranks(self) -> tuple[int, ...]:
        """The ranks that share the flat parameter, by their numbers in the world."""
        if self.size == 1:
            return (dist.get_rank(),)
        return tuple(dist.get_process_group_ranks(self.group))

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardGroup:
        return self

    def __reduce__(self) -> NoReturn:
        raise RuntimeError(
            "a sharded module can't be pickled, for its process groups belong to this process. Use "
            "copy.deepcopy for a copy. To save it call save_checkpoint, or get_model_state_dict."
        )


@dataclass(frozen=True)
class SmallGroup:
    """Consecutive ranks of a shard group, this rank included; see [Note: Small group]."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, shard_group: ShardGroup, size: int) -> SmallGroup:
        """Return this rank's group of `size`, a divisor of the shard group's.

        The first call makes one group for each part of the shard group, whose ranks must call it
        together. It issues an all-gather of 31 bytes.
        """
        ranks = dist.get_process_group_ranks(shard_group.group)
        first = shard_group.group.rank() // size * size
        own, asking = ranks[first : first + size], (shard_group.group,)
        group = _group_for("a small group", own, asking, shard_group.device)
        return cls(group, group.rank(), size)

    def __deepcopy__(self, memo: dict[int, Any]) -> SmallGroup:
        return self


def _pipeline_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the group of the axis "pp", if the mesh is part of a mesh with such an axis."""
    root = root_mesh_of(mesh)
    names = root.mesh_dim_names or ()
    if _PIPELINE_AXIS not in names or _PIPELINE_AXIS in (mesh.mesh_dim_names or ()):
        return None
    group = root.get_group(_PIPELINE_AXIS)
    return group if group.size() > 1 else None


def _inherit_timeout(group: dist.ProcessGroup) -> None:
    """Give a mesh's groups the job's timeout; torch's default for them is 30 minutes."""
    world = dist.group.WORLD
    timeout = None if world is None else inherit_timeout(group, world)
    if timeout is not None:
        order_of(group).timeout = timeout  # gloo's messages keep the one that the group began with


def _is_ascending(mesh: DeviceMesh) -> bool:
    ranks = mesh.mesh
    return all(bool((ranks.diff(dim=dim) > 0).all()) for dim in range(ranks.ndim))


def _joint_groups(axes: list[dist.ProcessGroup], mesh: DeviceMesh, device: torch.device) -> _Groups:
    """Return the groups of the mesh's axes, or the one group of all ranks if it exists."""
    groups = tuple(group for group in axes if group.size() > 1)
    world = dist.group.WORLD
    if len(groups) < 2 or world is None or mesh.size() != world.size():
        return groups
    try:
        backend_of(world, device)
    except RuntimeError:  # the world group may have been set up for other devices
        return groups
    return (world,)


# Groups are costly to make, so equal units share one. The key is the group that asked first (they
# end with it), the purpose and the ranks.
_made_groups: WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], dist.ProcessGroup]
] = WeakKeyDictionary()


def _group_for(
    purpose: str, ranks: list[int], asking: _Groups, device: torch.device
) -> dist.ProcessGroup:
    """Return a process group that only these ranks know; the first call makes it.

    Other ranks may make other groups meanwhile. Torch names a group after its ranks and the number
    of groups that a rank knows, so ranks that know different numbers would wait for ever.

    Args:
        purpose: Each has a group of its own.
        ranks: Of the group.
        asking: Groups that together reach all ranks that make a group now.
        device: The device of their messages now.
    """
    known_groups, key = _made_groups.setdefault(asking[0], {}), (purpose, tuple(ranks))
    if key in known_groups:
        return known_groups[key]
    num_known = num_known_groups()
    known = Ranks(asking, device).all_messages(num_known)
    if len(known) > 1:
        raise RuntimeError(
            f"the ranks of this mesh know different numbers of process groups ({min(known)} to "
            f"{max(known)}), so torch can't make one of ranks {list_ranks(ranks)}. Let all ranks "
            "be in equally many groups, as after init_device_mesh over all ranks of the job, or "
            "use neither a number for reshard_after_forward nor separate_reduce_group."
        )
    known_groups[key] = made = dist.new_group(
        ranks, timeout=timeout_of(asking[0]), use_local_synchronization=True
    )
    return made  # type: ignore[no-any-return]


def _device_of(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def _type_for(group: dist.ProcessGroup) -> str:
    """Return the accelerator's type if a group communicates there by more than gloo, or "cpu"."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or backend_name(group, accelerator) in ("", "gloo"):
        return "cpu"
    return accelerator.type


def _init_one_process() -> None:
    """Make a process group of this process alone, as in a notebook."""
    found = {name: os.environ[name] for name in _NUM_PROCESSES if name in os.environ}
    several = [f"{name}={value}" for name, value in found.items() if value != "1"]
    if several:
        raise RuntimeError(
            f"torch.distributed is not initialised, and {several[0]} says that this is one of "
            "several processes. Call torch.distributed.init_process_group() first, start the "
            f"script with torchrun, or set all of {', '.join(_RENDEZVOUS)}."
        )
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    _logger.warning(
        "torch.distributed was not initialised: this process trains alone, on one rank. For "
        "several start the script with torchrun."
    )


_PIPELINE_AXIS = "pp"  # its name in torchtitan and in torch's documentation
_logger = logging.getLogger("composable_shard")
# What `init_process_group` needs, as Kubernetes' PyTorchJob and hand-written launchers set it.
_RENDEZVOUS = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")
# Variables of launchers: torchrun, Slurm, Open MPI, MPICH.
_NUM_PROCESSES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")

# Weak, so that a process group ends with the units that use it.
_groups_of_world: WeakKeyDictionary[
    dist.ProcessGroup, WeakValueDictionary[tuple[str, bool], ShardGroup]
] = WeakKeyDictionary()
