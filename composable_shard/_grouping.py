"""Which parameters of a unit share a flat parameter: those of one kind, cut into buckets."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from composable_shard._flat_param import plan_layout
from composable_shard._layout import FlatLayout, cut_buckets
from composable_shard._plan import Original, Plan
from composable_shard._precision import Precision

__all__ = ["group_params"]

Group = tuple[Precision, list[Original]]
_MIB = 1 << 20
_MAX_IMBALANCE = 1.25  # the largest shard of a unit and the mean


def group_params(
    plan: Plan, use_orig_params: bool, *, shard_size: int, is_alone: bool
) -> list[Group]:
    """Return the original parameters of each handle that the unit will have, and its dtypes.

    Args:
        plan: The unit's; the owners of its parameters are known.
        use_orig_params: Whether it shows them at rest.
        shard_size: The ranks that share a flat parameter.
        is_alone: No other rank has gradients: nothing is reduced, so there are no buckets.
    """
    groups = _by_kind(plan, use_orig_params, shard_size)
    if plan.bucket_cap_mb is None or is_alone:
        return _sort_by_owner(groups)
    cap_nbytes = int(plan.bucket_cap_mb * _MIB)
    buckets = [
        (precision, [members[index] for index in bucket])
        for precision, members in groups
        for bucket in _cut(precision, members, cap_nbytes, shard_size)
    ]
    # [Note: Buckets] The order of reductions, across kinds.
    position = {id(original): index for index, original in enumerate(plan.originals)}
    in_order = sorted(buckets, key=lambda bucket: -position[id(bucket[1][-1])])
    return _sort_by_owner(in_order)


def lay_out(members: Sequence[Original], shard_size: int, precision: Precision) -> FlatLayout:
    """Lay out the parameters of one handle as their granularities ask for.

    Warns where blocks are so large that a rank gets much more than the mean.
    """
    dense = [original.dense for original in members]
    if members[0].is_owned:
        owners = [original.owner for original in members]
        return plan_layout(dense, shard_size, precision, owners=owners)
    blocks = [original.block_numel for original in members]
    layout = plan_layout(dense, shard_size, precision, blocks=blocks)
    if layout.blocks:
        _warn_of_imbalance(members, layout)
    return layout


def _warn_of_imbalance(members: Sequence[Original], layout: FlatLayout) -> None:
    """Warn where the largest shard is well above the mean, and the difference counts."""
    mean = layout.span / layout.world_size
    nbytes = (layout.shard_numel - mean) * (members[0].nbytes / max(1, members[0].dense.numel()))
    if layout.shard_numel <= _MAX_IMBALANCE * mean or nbytes < _MIB:
        return
    # As many as explain it: a cut is off by half of a block.
    coarse = [each for each in members if each.block_numel > (_MAX_IMBALANCE - 1) * mean]
    names = ", ".join(f"'{each.fqn}' ({each.block_numel})" for each in coarse)
    warnings.warn(
        f"one of {layout.world_size} ranks holds {layout.shard_numel / mean:.2f} times the mean of "
        f"a unit's shards, {mean:.0f} elements, because these parameters are cut in blocks of as "
        f"many elements: {names}. Pass a finer granularity for them, make the unit larger, or use "
        'granularity="param", which balances over all units.',
        stacklevel=2,
    )


def _by_kind(plan: Plan, use_orig_params: bool, shard_size: int) -> list[Group]:
    groups: dict[object, Group] = {}
    for original in plan.originals:
        param, tensor_parallel = original.param, original.tensor_parallel
        mesh = None if tensor_parallel is None else tensor_parallel[0]
        placements = None if use_orig_params or mesh is None else tensor_parallel
        precision = Precision.of(plan.policy, param.dtype, is_kept=original.is_kept)
        main_dtype = precision.main_dtype or param.dtype
        is_owned = original.is_owned
        kind = (main_dtype, precision, param.requires_grad, mesh, placements, is_owned)
        groups.setdefault(kind, (precision, []))[1].append(original)
    return list(groups.values())


def _sort_by_owner(groups: list[Group]) -> list[Group]:
    """Bring parameters that are owned whole into the order that `FlatLayout` wants."""
    for _, members in groups:
        if members[0].is_owned:
            members.sort(key=lambda original: original.owner)
    return groups


def _cut(
    precision: Precision, members: list[Original], cap_nbytes: int, shard_size: int
) -> list[range]:
    dense = [original.dense for original in members]
    if not members[0].param.requires_grad:
        return [range(len(members))]  # nothing to reduce
    reduce_dtype = precision.reduces_in(precision.main_dtype or dense[0].dtype)
    alignment = plan_layout(dense, shard_size, precision).alignment
    numels = [tensor.numel() for tensor in dense]
    return cut_buckets(numels, cap_nbytes // reduce_dtype.itemsize, shard_size, alignment)
