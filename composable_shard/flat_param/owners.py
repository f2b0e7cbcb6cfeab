"""The owners of whole parameters, and moves to other owners before a unit is used.

[Note: Owners of whole parameters]
Where parameters are owned whole, one unit can't be balanced: one rank holds its largest parameter.
So ranks are balanced over all such parameters of a tree that the same ranks share, in bytes, see
[Note: Balance]. Inner modules are sharded first, so a unit begins with owners planned for its own
parameters alone. A call of `fully_shard` on a module around it plans again, for all units inside
and the new one together, and parameters of the units inside move: one unit at a time, each gathered
once; on the meta device nothing is sent. Whether another plan is better is decided from facts that
all ranks know, and they compare the plan before anything moves.

So owners are settled when the outermost call has returned. `lazy_init`, or the first forward, fixes
them permanently: freezing, adding units around and copying do not change them after that.
Units that no call encloses together are balanced together only by a `lazy_init` of a module around
them. Parameters that are fixed, or that have a gradient, stay where they are and count as load.
Optimizer state of a parameter that moved is lost: torch's Adagrad, which makes its state at
construction, must be built after the outermost call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch

from composable_shard.comm import ShardGroup, compare_units
from composable_shard.flat_param.full_values import FullValues
from composable_shard.flat_param.gradients import in_layout
from composable_shard.flat_param.handle import FlatParamHandle
from composable_shard.flat_param.local_shard import LocalShard
from composable_shard.layout import FlatLayout, balance, fullest


def change_owners(handle: FlatParamHandle, owners: Sequence[int]) -> None:
    """Give parameters that are owned whole to other ranks, with their values.

    Before `attach`, while no parameter has a gradient. One all-gather of the main values, none
    on the meta device. The Parameter objects stay the same; if the allocation or the collective
    fails, the handle is as before.
    """
    with torch.inference_mode(False), torch.no_grad():
        handle.adopt_changes()
        order = sorted(range(len(owners)), key=lambda index: owners[index])
        old, shard = handle.layout, handle.shard
        layout = FlatLayout.plan(
            [old.numels[index] for index in order],
            old.world_size,
            old.alignment,
            owners=[owners[index] for index in order],
        )
        # Allocate all memory before the collective, so that nothing fails after it.
        full = None if shard.values.is_meta else shard.new_full()
        parts = handle.memory.allocate(
            layout, handle.guard, shard.values.dtype, shard.values.device
        )
        if full is not None:
            shard.gather_into(full, shard.values)
        _take_layout(handle, layout, order, *parts)
        if full is not None:
            for index, entry in zip(order, handle.entries, strict=True):
                start, end = old.offsets[index], old.offsets[index] + old.numels[index]
                if entry.spec.owner == handle.shard_group.rank:
                    entry.slice_of(handle.shard.values).copy_(full[start:end])


def remember_owners(handle: FlatParamHandle) -> Callable[[], None]:
    """Return a function that undoes `change_owners` on this rank, without a message.

    It holds the shard, whose values must not be written until then.
    """
    parts = handle.layout, handle.shard, handle.full, handle.grads
    entries = list(handle.entries)
    views = [(each, each.spec) for each in handle.shown.form.every]

    def restore() -> None:
        handle.layout, handle.shard, handle.full, handle.grads = parts
        handle.entries[:] = entries
        shard = handle.shard.values
        for each, spec in views:
            each.spec = spec
            each.view_in(shard, handle.guard)
        handle.shown.index_slots()

    return restore


def _take_layout(
    handle: FlatParamHandle,
    layout: FlatLayout,
    order: Sequence[int],
    shard: LocalShard,
    full: FullValues,
) -> None:
    """Bring the entries in the order of a new layout; they become views of its shard."""
    full.take_over(handle.full)
    handle.layout, handle.shard, handle.full = layout, shard, full
    handle.entries[:] = [handle.entries[index] for index in order]
    for index, entry in enumerate(handle.entries):
        entry.spec = replace(entry.spec, layout=layout, index=index)
    form = handle.shown.form
    form.follow_layout()
    for each in form.every:
        each.view_in(shard.values, handle.guard)
    handle.grads = in_layout(layout, handle.grads)
    handle.shown.index_slots()


@dataclass
class _Pool:
    """Parameters that the same ranks share, each owned by one of them."""

    shard_group: ShardGroup
    handles: list[FlatParamHandle] = field(default_factory=list)  # handles of existing units
    sizes: Sequence[int] = ()  # bytes of parameters without a unit yet


def balance_owners(
    handles: Sequence[FlatParamHandle],
    shard_group: ShardGroup | None = None,
    sizes: Sequence[int] = (),
    *,
    always_compare: bool = True,
    undo: ExitStack | None = None,
) -> list[int]:
    """Balance all whole parameters over their ranks; move existing ones where that is better.

    Return the owners of the parameters without a unit, of `sizes` in bytes. If the ranks have
    different plans, all raise, and nothing moves.

    Args:
        shard_group: The ranks that will share the parameters of a unit that is not formed yet.
        always_compare: Whether ranks compare the plan also where nothing is to move.
        undo: Gets a function for each handle whose parameters move, which undoes that.
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
            if undo is not None:
                handle.adopt_changes()  # what is remembered is the handle's own shard
                undo.callback(remember_owners(handle))
            change_owners(handle, found)
    return owners


def _plan(pool: _Pool) -> tuple[dict[FlatParamHandle, list[int]], list[int]]:
    """Return the owners of all entries, and of the parameters without a unit."""
    num_ranks = pool.shard_group.size
    loads = [0] * num_ranks
    movable = [handle for handle in pool.handles if _is_movable(handle)]
    fixed = set(pool.handles).difference(movable)
    for handle in pool.handles:
        if handle in fixed:
            for nbytes, owner in zip(_sizes(handle), handle.layout.owners, strict=True):
                loads[owner] += nbytes
    # By name rather than by handle: where a model has frozen parameters and its average is frozen
    # as a whole, both have the same owners, and an average combines them without communication.
    places = [(handle, index) for handle in movable for index in range(len(handle.entries))]
    places.sort(key=lambda place: place[0].entries[place[1]].label.fqn)
    nbytes_of = {handle: _sizes(handle) for handle in movable}
    sizes = [nbytes_of[handle][index] for handle, index in places]
    current = [handle.layout.owners[index] for handle, index in places]
    everything = [*sizes, *pool.sizes]
    anew = balance(everything, num_ranks, loads)
    kept_loads = loads.copy()
    for nbytes, owner in zip(sizes, current, strict=True):
        kept_loads[owner] += nbytes
    kept = [*current, *balance(pool.sizes, num_ranks, kept_loads)]
    # Prefer the plan that moves nothing if it is as balanced.
    best = min((kept, anew), key=lambda owners: fullest(everything, owners, num_ranks, loads))
    planned = {handle: list(handle.layout.owners) for handle in pool.handles}
    for (handle, index), owner in zip(places, best, strict=False):
        planned[handle][index] = owner
    return planned, best[len(places) :]


def _is_movable(handle: FlatParamHandle) -> bool:
    return not handle.has_fixed_owners and all(
        shown.sharded.grad is None for shown in handle.shown.at_rest
    )


def _sizes(handle: FlatParamHandle) -> list[int]:
    itemsize = handle.shard.values.dtype.itemsize
    return [numel * itemsize for numel in handle.layout.numels]


def _compare_plans(planned: dict[FlatParamHandle, list[int]]) -> None:
    """Check that all ranks are about to do the same."""
    by_mesh: dict[tuple[str, ...], list[FlatParamHandle]] = {}
    for handle in planned:
        names = tuple(group.group_name for group in handle.shard_group.joint_groups)
        by_mesh.setdefault(names, []).append(handle)
    for handles in by_mesh.values():
        lines = [
            f"'{entry.label}' shape {tuple(entry.spec.shape)} {handle.shard.values.dtype} "
            f"on meta={handle.shard.values.is_meta} owner {entry.spec.owner} to be {owner}"
            for handle in handles
            for entry, owner in zip(handle.entries, planned[handle], strict=True)
        ]
        compare_units(handles[0].shard_group.ranks, lines)
