"""Which rank holds which elements of a parameter."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from composable_shard.flat_param import FlatParamHandle, slot_key
from composable_shard.runtime import get_handles
from composable_shard.torch_private import parameters_of


@dataclass(frozen=True)
class ParamRange:
    """The elements `[start, end)` of a parameter that one rank holds, in the order of memory.

    Attributes:
        rank: The rank's number in the world.
        start, end: Of the parameter's own elements.
        shard_start: Where they begin in the rank's shard of the flat parameter.
        flat_start: Where they begin in the flat parameter of all ranks.
    """

    rank: int
    start: int
    end: int
    shard_start: int
    flat_start: int


def get_param_ranges(module: nn.Module) -> dict[str, list[ParamRange]]:
    """Return the ranges of each managed parameter on the ranks that share it; no communication.

    Ranks without elements are left out, so a parameter with `granularity="param"` has one range,
    that of its owner, and so has one that every rank holds: this rank's. The ranges of a
    parameter follow one another and cover it. They are those of the parameter's local part where
    it is a DTensor. Owners may change until the first forward.

    Args:
        module: A module with sharded units; names are those of its `named_parameters()`.
    """
    places = {
        slot_key(slot): (handle, index)
        for handle in get_handles(module)
        for index, entry in enumerate(handle.entries)
        for slot in entry.slots
    }
    ranges: dict[str, list[ParamRange]] = {}
    seen: set[tuple[FlatParamHandle, int]] = set()
    for prefix, child in module.named_modules():
        for name in parameters_of(child):
            place = places.get((id(parameters_of(child)), name))
            if place is not None and place not in seen:
                seen.add(place)
                ranges[f"{prefix}.{name}".lstrip(".")] = _ranges_of(*place)
    return ranges


def _ranges_of(handle: FlatParamHandle, index: int) -> list[ParamRange]:
    layout, ranks = handle.layout, handle.shard_group.sharing_ranks
    found = []
    for number, rank in enumerate(ranks):
        start, end = layout.param_range(index, number)
        if end > start:
            shard_start, _ = layout.local_range(index, number)
            flat_start, _ = layout.world_range(index, number)
            found.append(ParamRange(rank, start, end, shard_start, flat_start))
    return found
