"""Norms over parameters that other ranks own.

[Note: Other parameters]
A rank passes its own parameters to `clip_grad_norm_`. Their norms are added up over the ranks that
share them. Other ranks may own other parameters: the next stages of a pipeline, other experts.
Their norms are added once, over groups in which each rank owns different parameters:

- the axis "pp" of the mesh that the mesh of a unit is part of;
- axes over which tensor parallelism splits a parameter, known from its spec;
- groups that the caller passes, for all parameters or for some.

Ranks that share one parameter must scale it by the same factor; without such a group they would
not. So if units of one model are shared by different numbers of ranks, and no group says which
ranks own other parameters in place of a unit, that is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from composable_shard.flat_param import FlatParamHandle, handle_of
from composable_shard.tensor import FlatShard

Owners = dist.ProcessGroup | DeviceMesh
OtherOwners = Owners | tuple[nn.Module | Iterable[nn.Module | Tensor], Owners]


class OwnedParams(NamedTuple):
    """The parameters of a call, by the groups whose ranks own different parameters.

    Attributes:
        parts: First the parameters without a given group, with (); then the others with their
            group's name. The same groups on all ranks.
        overall: Names of the groups whose ranks share no parameter.
        device: The device of norms on ranks without gradients.
        handles: The handles of all parameters.
    """

    parts: list[tuple[list[Tensor], tuple[str, ...]]]
    overall: tuple[str, ...]
    device: torch.device
    handles: list[FlatParamHandle]


def split_by_owners(params: list[Tensor], groups: Sequence[OtherOwners]) -> OwnedParams:
    """Return the parameters by their given groups; check that no group is missing.

    Args:
        params: Parameters whose gradients are clipped.
        groups: As `clip_grad_norm_` gets them.

    Raises:
        ValueError: If something else than a group is passed.
        RuntimeError: If units are shared by different ranks, and no group says who owns others.
    """
    overall: dict[tuple[int, ...], str] = {}  # by ranks: two meshes may have a group each
    parts: list[tuple[list[Tensor], tuple[str, ...]]] = []
    taken: set[int] = set()
    for given in groups:
        wanted, owners = given if isinstance(given, tuple) else (None, given)
        group = _group_of(owners)
        if wanted is None:
            if group.size() > 1:
                _add(overall, group)
            continue
        ids = _ids_of(wanted) - taken
        taken |= ids
        if group.size() > 1:
            part = [param for param in params if id(param) in ids]
            parts.append((part, (group.group_name,)))
    named = {id(param) for part, _ in parts for param in part}
    shared = [param for param in params if id(param) not in named] if parts else params
    handles = handles_of(params)
    for handle in handles:
        pipeline = handle.shard_group.pipeline_group
        if pipeline is not None:
            _add(overall, pipeline)
    if len({handle.shard_group.joint_groups for handle in handles}) > 1:
        _check_sharing(params, handles, taken)
    device = params[0].device if params else torch.device("cpu")
    return OwnedParams([(shared, ()), *parts], tuple(overall.values()), device, handles)


def _add(overall: dict[tuple[int, ...], str], group: dist.ProcessGroup) -> None:
    """Add a group; of several with the same ranks, keep the one whose name sorts first."""
    name = str(group.group_name)
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    overall[ranks] = min(overall.get(ranks, name), name)


def _group_of(owners: object) -> dist.ProcessGroup:
    if isinstance(owners, DeviceMesh) and owners.ndim == 1:
        owners = owners.get_group()
    if isinstance(owners, dist.ProcessGroup):
        return owners
    raise ValueError(
        "expected groups to hold process groups, meshes of one axis, and pairs (modules or "
        f"parameters, group or mesh), got {owners!r}"
    )


def _ids_of(wanted: nn.Module | Iterable[nn.Module | Tensor]) -> set[int]:
    items = [wanted] if isinstance(wanted, nn.Module | Tensor) else list(wanted)
    params: list[Tensor] = []
    for item in items:
        params += item.parameters() if isinstance(item, nn.Module) else [item]
    return set(map(id, params))


def handles_of(params: Iterable[Tensor]) -> list[FlatParamHandle]:
    """Return the handles of sharded parameters."""
    found = [handle_of(param) for param in params if isinstance(param, FlatShard)]
    return [handle for handle in dict.fromkeys(found) if handle is not None]


def _check_sharing(
    params: list[Tensor], handles: Iterable[FlatParamHandle], taken: set[int]
) -> None:
    """Check that all units have the same ranks, or that a group says who owns other parameters.

    Raises:
        RuntimeError: Naming the first parameter without such a group.
    """
    ranks = {dist.get_rank()}
    for handle in handles:
        for group in handle.shard_group.joint_groups:
            ranks.update(dist.get_process_group_ranks(group))
    # The ranks of all units are known before the first is compared with them. Of a DTensor the
    # ranks of its mesh count too, which are not in its handle's groups.
    for param in params:
        if not isinstance(param, FlatShard) or id(param) in taken:
            continue
        owner, spec = handle_of(param), param._shard_spec
        if owner is None:
            continue
        num_ranks = owner.shard_group.num_ranks
        num_parts = 1 if spec.tensor_parallel is None else spec.tensor_parallel[0].size()
        if num_ranks * num_parts < len(ranks):
            raise RuntimeError(
                f"parameter '{spec.label}' is shared by {num_ranks} ranks, and other units of the "
                f"model by {len(ranks)}: the ranks beside own other parameters in its place, such "
                "as experts, and each rank would clip by another norm. Pass clip_grad_norm_ "
                "groups=[(module, group)], with the module that holds the parameter and the "
                "process group, or axis of a mesh, over whose ranks others own others. If they "
                "hold copies, shard all units over the same ranks."
            )
