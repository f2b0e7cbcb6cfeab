"""Groups of the parameters of a new unit: one for each handle, with its dtypes and its layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from composable_shard.construct.originals import Original, Plan
from composable_shard.flat_param import Precision, plan_layout
from composable_shard.layout import FlatLayout, cut_buckets
from composable_shard.options import UnitOptions

Group = tuple[Precision, list[Original]]

_MIB = 1 << 20


def group_params(plan: Plan, shard_size: int) -> list[Group]:
    """Return the original parameters of each handle that the unit will have, and its dtypes."""
    groups, cap_mb = _by_kind(plan), plan.options.bucket_cap_mb
    if cap_mb is None:
        return _sort_by_owner(groups)
    cap_nbytes = int(cap_mb * _MIB)
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
    """Lay out the parameters of one handle as their granularities require."""
    sized = [original.sized for original in members]
    if members[0].is_owned:
        owners = [original.owner for original in members]
        return plan_layout(sized, shard_size, precision, owners=owners)
    if precision.extension is not None:  # [Note: Extended gathers]
        return FlatLayout.plan([sized[0].numel()], shard_size, members[0].block_numel)
    blocks = [original.block_numel for original in members]
    return plan_layout(sized, shard_size, precision, blocks=blocks)


def _by_kind(plan: Plan) -> list[Group]:
    groups: dict[object, Group] = {}
    known: dict[object, Group] = {}  # by the facts that determine the kind: faster to compare
    for original in plan.originals:
        param, own = original.param, original.tensor_parallel
        given = (param.dtype, param.requires_grad, original.is_kept, original.is_owned)
        facts = (*given, own, original.extension)
        group = known.get(facts)
        if group is None:
            group = known[facts] = groups.setdefault(*_new_group(original, plan.options))
        group[1].append(original)
    return list(groups.values())


def _new_group(original: Original, options: UnitOptions) -> tuple[object, Group]:
    """Return the key that a handle's parameters share, and an empty group for them."""
    param, tensor_parallel = original.param, original.tensor_parallel
    mesh = None if tensor_parallel is None else tensor_parallel[0]
    precision = Precision.of(options.mp_policy, param.dtype, is_kept=original.is_kept)
    if original.extension is not None:
        precision = replace(precision, extension=original.extension)
    main_dtype = precision.main_dtype or param.dtype
    is_owned = original.is_owned
    kind = (main_dtype, precision, param.requires_grad, mesh, is_owned)
    return kind, (precision, [])


def _sort_by_owner(groups: list[Group]) -> list[Group]:
    """Sort whole parameters by owner, as `FlatLayout` requires."""
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
    # Whole parameters need no padding.
    blocks = () if members[0].is_owned else [original.block_numel for original in members]
    cap_numel = cap_nbytes // reduce_dtype.itemsize
    return cut_buckets(numels, cap_numel, shard_size, alignment, blocks=blocks)
