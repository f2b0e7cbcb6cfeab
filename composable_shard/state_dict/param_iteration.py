"""Full parameters one after another, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from composable_shard.flat_param import FlatParamHandle
from composable_shard.runtime import check_whole
from composable_shard.state_dict.gathering import (
    Shares,
    copied,
    gather_full,
)
from composable_shard.state_dict.model_dict import converted
from composable_shard.state_dict.model_tensors import (
    ManagedParam,
    ModelRanks,
    ModelTensors,
    OtherTensor,
)
from composable_shard.tensor import FlatShard


def iter_full_params(
    model: nn.Module,
    names: Iterable[str] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    rank0_only: bool = False,
    max_nbytes: int = 1 << 30,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and full value of each parameter, for an inference engine or an export.

    A bucket is the parameters of one unit, or one parameter of a unit larger than `max_nbytes`.
    Besides its shards a rank holds at most two buckets, and copies of their values if `dtype` or
    `device` differ, as long as the caller keeps no value. One all-gather for each bucket. Call it
    and read it to the end on all ranks, and run no step meanwhile.

    Args:
        model: A model with sharded units, outside of forward, backward and `unshard_params`.
        names: Yield these parameters alone; the same on all ranks. A tied parameter is yielded
            once, under the first of its names that is wanted.
        dtype: Cast floating-point values to it.
        device: Of the values. Default: the unit's.
        rank0_only: Yield values on the first rank alone, and nothing on the others.
        max_nbytes: Units that have more bytes are gathered parameter by parameter.

    Raises:
        ValueError: For names that no parameter has, or a model without units.
        RuntimeError: Inside a forward, a backward or `unshard_params`, or after `unshard`.
        NotImplementedError: With `rank0_only`, if the meshes of the units begin with different
            ranks.
    """
    tensors, ranks = ModelTensors(model, "iter_full_params can't run"), ModelRanks(model)
    check_whole(model)
    if rank0_only:
        ranks.check_one_is_first()
    every: list[ManagedParam | OtherTensor] = [*tensors.sharded]
    every += [each for each in tensors.others if isinstance(each.tensor, nn.Parameter)]
    known = {name for each in every for name in each.names}
    wanted = known if names is None else set(names)
    if unknown := sorted(wanted - known):
        raise ValueError(f"expected names of the model's parameters, got {unknown[:8]}")
    found = [each for each in every if wanted.intersection(each.names)]
    where = None if device is None else torch.device(device)

    def convert() -> Iterator[tuple[str, Tensor]]:
        values = _gather_in_buckets(found, where, dtype, max_nbytes, to_first=rank0_only)
        while True:
            with torch.no_grad():  # not around the yield, where the caller's own code runs
                each, value = next(values, (None, None))
            if each is None or value is None:
                return
            if ranks.is_first or not rank0_only:
                name = next(name for name in each.names if name in wanted)
                yield name, cast(Tensor, converted(value, where, dtype))
            del value  # before the next unit is gathered

    return convert()


def _gather_in_buckets(
    found: Iterable[ManagedParam | OtherTensor],
    device: torch.device | None,
    dtype: torch.dtype | None,
    max_nbytes: int,
    *,
    to_first: bool,
) -> Iterator[tuple[ManagedParam | OtherTensor, Tensor]]:
    buckets: dict[FlatParamHandle, dict[int, ManagedParam]] = {}
    alone: list[ManagedParam | OtherTensor] = []
    for each in found:
        handle = each.handle if isinstance(each, ManagedParam) else None
        if handle is None or handle.layout.padded_numel * handle.shard.values.itemsize > max_nbytes:
            alone.append(each)
        elif isinstance(each, ManagedParam):
            buckets.setdefault(handle, {})[each.index] = each
    # All of `found` is sorted first, so that each handle is gathered once, in the same order on all
    # ranks. Values leave their dict as they are yielded: the caller alone keeps them alive.
    wanted = [Shares(handle, indices=sorted(each)) for handle, each in buckets.items()]
    for shares, values in gather_full(wanted, to_first=to_first, device=device, dtype=dtype):
        for index in sorted(values):
            yield buckets[shares.handle][index], values.pop(index)
    for each in alone:
        if isinstance(each, ManagedParam):
            assert each.entry.shard_view is not None
            yield each, FlatShard(each.entry.shard_view, each.entry.spec).full_tensor()
        else:
            yield each, copied(each.tensor, None)
