"""Give parameters that are owned whole to other ranks, before a unit is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from composable_shard.flat_param.entries import flat_spec
from composable_shard.flat_param.full_values import FullValues
from composable_shard.flat_param.gradients import FlatGradients
from composable_shard.flat_param.handle import FlatParamHandle
from composable_shard.flat_param.shard import LocalShard
from composable_shard.layout import FlatLayout


def change_owners(handle: FlatParamHandle, owners: Sequence[int]) -> None:
    """Give parameters that are owned whole to other ranks, with their values.

    Before `attach`, while no parameter has a gradient. One all-gather of the main values, none
    on the meta device. The Parameter objects stay the same; if the allocation or the collective
    fails, the handle is as before.

    Args:
        owners: A rank for each entry.
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
        # All memory before the collective: nothing fails after it.
        full = None if shard.values.is_meta else shard.new_full()
        parts = handle.memory.allocate(
            layout, handle.guard, shard.values.dtype, shard.values.device
        )
        if full is not None:
            work = shard.gather_into(full, shard.values, to_first=False)
            assert work is not None
            work.wait()
        _take_layout(handle, layout, order, *parts)
        if full is not None:
            for index, entry in zip(order, handle.entries, strict=True):
                start, end = old.offsets[index], old.offsets[index] + old.numels[index]
                if entry.spec.owner == handle.shard_group.rank:
                    entry.slice_of(handle.shard.values).copy_(full[start:end])


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
        entry.view_in(shard.values, handle.guard)
    flat = handle.shown.flat
    if flat is not None:
        specs = [entry.spec for entry in handle.entries]
        spec = flat_spec(specs, layout, handle.shard_group, flat.label.fqn)
        flat.spec = replace(spec, label=flat.label)
        flat.used = [flat.used[index] for index in order]
        flat.view_in(shard.values, handle.guard)
    grads = handle.grads
    handle.grads = FlatGradients(
        layout, handle.shard_group, handle.shown, is_persistent=grads.is_persistent
    )
    handle.grads.name = handle.name
    handle.grads.reduction.take_options(grads.reduction)
    handle.shown.index_slots()
