"""What all ranks of a tree must agree on before the first forward; who owns whole parameters.

[Note: Owners]
Where parameters are owned whole, a unit alone can't be balanced: its largest parameter is on one
rank. So ranks are balanced over all such parameters of a tree that the same ranks share, in bytes,
see [Note: Balance]. As inner modules are sharded first, a unit begins with owners of its own
parameters alone. A call of `fully_shard` on a module around it plans anew, for all units inside and
the new one together, and those units' parameters move: one unit at a time, all of them gathered
once; on the meta device there is nothing to send. Whether another plan is better is decided from
what all ranks know, and they compare it before anything moves.

So owners are settled when the outermost call has returned. `lazy_init`, or the first forward, fixes
them for good: freezing, adding units around, copies and pickles do not change them after that.
Units that no call encloses together are balanced together only by a `lazy_init` of a module around
them. Parameters that are fixed, or that have a gradient, stay where they are and count as load.
What an optimizer made for a parameter that moved does not belong to it any more: torch's Adagrad,
which makes its state at construction, must be built after the outermost call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from composable_shard.comm import Ranks, ShardGroup, UseExchange
from composable_shard.flat_param import FlatParamHandle
from composable_shard.layout import balance, fullest
from composable_shard.runtime.state import ShardState

__all__ = ["check_agreement", "check_same", "copy_to_replicas", "settle_owners"]


_Groups = tuple[dist.ProcessGroup, ...]


def check_agreement(states: list[ShardState]) -> None:
    """Compare names, shapes, dtypes and options of all units over their data-parallel ranks.

    Also those of buffers that are broadcast.

    One all-gather of 32 bytes for each process group; only where it finds a difference are the
    descriptions themselves exchanged, as JSON. Where any rank has hooks on gradients, one
    all-reduce of a byte for each handle, so that all know. [Note: Early gradients]

    Raises:
        RuntimeError: On all ranks of the mesh alike, naming the first difference and the ranks.
    """
    meshes: dict[_Groups, _Mesh] = {}

    def mesh_of(shard_group: ShardGroup) -> _Mesh:
        return meshes.setdefault(shard_group.joint_groups, _Mesh(shard_group.ranks))

    for state in states:
        if state.buffers is not None:
            lines = mesh_of(state.buffers.shard_group).lines
            lines.extend(f"{line} {state.describe_options()}" for line in state.buffers.describe())
        for handle in state.handles:
            mesh = mesh_of(handle.shard_group)
            mesh.handles.append(handle)
            mesh.lines.extend(handle.describe_entries(state.describe_options()))
    for mesh in meshes.values():
        has_hooks = [handle.has_gradient_hooks for handle in mesh.handles]
        if _compare_lines(mesh.ranks, mesh.lines, any(has_hooks)):
            exchange = UseExchange(
                [
                    (handle.shard_group, [int(flag)])
                    for handle, flag in zip(mesh.handles, has_hooks, strict=True)
                ],
                highest=1,
            )
            for handle, (flag,) in zip(mesh.handles, exchange.finish(), strict=True):
                handle.has_early_hooks = bool(flag)


@dataclass
class _Mesh:
    """What ranks that are reached through the same groups have to agree on."""

    ranks: Ranks
    handles: list[FlatParamHandle] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def _compare_lines(ranks: Ranks, lines: list[str], has_hooks: bool) -> bool:
    """Compare descriptions; return whether any rank has hooks."""
    all_lines, has_hooks = ranks.compare(lines, has_hooks)
    _raise_difference(all_lines)
    return has_hooks


def check_same(shard_group: ShardGroup, lines: list[str]) -> None:
    """Check that all data-parallel ranks bring the same lines, one for each parameter.

    One all-gather of 32 bytes for each process group.

    Raises:
        RuntimeError: As `check_agreement`.
    """
    _compare_lines(shard_group.ranks, lines, False)


def copy_to_replicas(states: list[ShardState]) -> None:
    """Give all ranks that hold copies of a shard the first one's: one broadcast for each handle.

    Ranks that initialised differently would train different models for ever.
    """
    for state in states:
        for handle in state.handles:
            handle.copy_to_replicas()


def _raise_difference(all_lines: list[list[str]]) -> None:
    longest = max(len(lines) for lines in all_lines)
    for index in range(longest):
        seen: dict[str, list[int]] = {}
        for rank, lines in enumerate(all_lines):
            line = lines[index] if index < len(lines) else "no such parameter"
            seen.setdefault(line, []).append(rank)
        if len(seen) > 1:
            detail = "; ".join(f"ranks {ranks}: {line}" for line, ranks in seen.items())
            raise RuntimeError(
                "the ranks of one mesh must shard the same model in the same way; the "
                f"first difference is at parameter {index}: {detail}. Build the model and call "
                "fully_shard alike on every rank."
            )


@dataclass
class _Pool:
    """Parameters that the same ranks share, each owned by one of them.

    Attributes:
        handles: Those that have a unit already.
        sizes: Bytes of those that have none yet.
    """

    shard_group: ShardGroup
    handles: list[FlatParamHandle] = field(default_factory=list)
    sizes: Sequence[int] = ()


def settle_owners(
    handles: Sequence[FlatParamHandle],
    shard_group: ShardGroup | None = None,
    sizes: Sequence[int] = (),
    *,
    always_compare: bool = True,
) -> list[int]:
    """Balance all parameters that are owned whole; move those of handles where that is better.

    Args:
        handles: All handles of a tree, the same on all ranks.
        shard_group: The ranks that will share the parameters of a unit that is not formed yet.
        sizes: Bytes of each of these that will be owned whole.
        always_compare: Whether ranks compare the plan also where nothing is to move.

    Returns:
        The owners of the parameters that have no unit yet.

    Raises:
        RuntimeError: If the ranks have different plans; nothing has moved.
    """
    pools: dict[tuple[int, ...], _Pool] = {}
    for handle in handles:
        if handle.layout.owners:
            group = handle.shard_group
            pools.setdefault(group.sharing_ranks, _Pool(group)).handles.append(handle)
    owners = [0] * len(sizes)
    newcomers = None
    if sizes and shard_group is not None and shard_group.size > 1:
        newcomers = pools.setdefault(shard_group.sharing_ranks, _Pool(shard_group))
        newcomers.sizes = sizes
    planned: dict[FlatParamHandle, list[int]] = {}
    for pool in pools.values():
        whose, rest = _plan(pool)
        planned.update(whose)
        if pool is newcomers:
            owners = rest
    is_moved = any(tuple(found) != handle.layout.owners for handle, found in planned.items())
    if is_moved or always_compare:
        _compare_plans(planned)
    for handle, found in planned.items():
        if tuple(found) != handle.layout.owners:
            handle.change_owners(found)
    return owners


def _plan(pool: _Pool) -> tuple[dict[FlatParamHandle, list[int]], list[int]]:
    """Return the owners of all entries, and those of the parameters that have no unit yet."""
    num_ranks = pool.shard_group.size
    loads = [0] * num_ranks
    movable = [handle for handle in pool.handles if _is_movable(handle)]
    fixed = set(pool.handles).difference(movable)
    for handle in pool.handles:
        if handle in fixed:
            for nbytes, owner in zip(_sizes(handle), handle.layout.owners, strict=True):
                loads[owner] += nbytes
    sizes = [nbytes for handle in movable for nbytes in _sizes(handle)]
    current = [owner for handle in movable for owner in handle.layout.owners]
    everything = [*sizes, *pool.sizes]
    anew = balance(everything, num_ranks, loads)
    kept_loads = loads.copy()
    for nbytes, owner in zip(sizes, current, strict=True):
        kept_loads[owner] += nbytes
    kept = [*current, *balance(pool.sizes, num_ranks, kept_loads)]
    # To move nothing is better where it is as balanced.
    best = min((kept, anew), key=lambda owners: fullest(everything, owners, num_ranks, loads))
    planned = {handle: list(handle.layout.owners) for handle in pool.handles}
    position = 0
    for handle in movable:
        planned[handle] = best[position : position + len(handle.entries)]
        position += len(handle.entries)
    return planned, best[position:]


def _is_movable(handle: FlatParamHandle) -> bool:
    return not handle.has_fixed_owners and all(
        shown.sharded.grad is None for shown in handle.shown_at_rest
    )


def _sizes(handle: FlatParamHandle) -> list[int]:
    itemsize = handle.local_shard.dtype.itemsize
    return [numel * itemsize for numel in handle.layout.numels]


def _compare_plans(planned: dict[FlatParamHandle, list[int]]) -> None:
    """Check that all ranks are about to do the same."""
    by_mesh: dict[tuple[str, ...], list[FlatParamHandle]] = {}
    for handle in planned:
        names = tuple(group.group_name for group in handle.shard_group.joint_groups)
        by_mesh.setdefault(names, []).append(handle)
    for handles in by_mesh.values():
        lines = [
            f"'{entry.label}' shape {tuple(entry.spec.shape)} {handle.local_shard.dtype} "
            f"on meta={handle.local_shard.is_meta} owner {entry.spec.owner} to be {owner}"
            for handle in handles
            for entry, owner in zip(handle.entries, planned[handle], strict=True)
        ]
        check_same(handles[0].shard_group, lines)
