"""Optimizer state of a class that wraps other tensors, as quantised state does.

[Note: Wrapped state]
Its tensors (codes, scales, lookup tables) have layouts of their own, which only the class knows. So
each rank's part of such an optimizer's state is saved apart: the region that it is of, the name of
its class, and all tensors in it. Ranks that hold the same regions get every bit back. For others
the class turns the parts into plain values, which is not what was saved, and needs `strict=False`.
Shards that are too small to be quantised are saved in the same way, as another rank's may not be.
The class is one that the program has allowed by `torch.serialization.add_safe_globals`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable_shard.checkpoint.reader import CheckpointReader, shaped_like
from composable_shard.layout import Region
from composable_shard.state_dict import json_tree
from composable_shard.tensor import FlatShard, find_places, local_part, region_of
from composable_shard.torch_private import is_traceable_wrapper_subclass


def wraps_state(optimizer: Optimizer) -> bool:
    """Return whether an optimizer makes its state in the way of torchao's; same on all ranks."""
    return callable(getattr(optimizer, "_new_buffer", None))


def take_parts(state: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Take this rank's parts of wrapped state out of an optimizer's. [Note: Wrapped state]

    Args:
        state: By FQN and name; loses what is taken.

    Returns:
        By FQN, and by a text that tells name and region.
    """
    taken: dict[str, dict[str, Any]] = {}
    for fqn, values in state.items():
        for name, value in list(values.items()):
            is_wrapped = isinstance(value, Tensor) and is_traceable_wrapper_subclass(value)
            if not is_wrapped or isinstance(value, DTensor):
                continue
            del values[name]
            local = value._local if isinstance(value, FlatShard) else value
            region = region_of(value)
            box = [list(ends) for ends in region.box]
            place = [box, list(region.order), region.start, region.end]
            part: dict[str, Any] = {"name": name, "place": place, "values": local}
            if is_traceable_wrapper_subclass(local):
                attributes, context = local.__tensor_flatten__()
                part["values"] = {each: getattr(local, each) for each in attributes}
                part |= {"kind": _name_of(type(local)), "context": context}
            if region.numel:
                taken.setdefault(fqn, {})[f"{name} {place}"] = part
    return taken


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def read_parts(
    reader: CheckpointReader,
    parts: dict[str, Any],
    target: Tensor,
    *,
    as_saved: bool,
    is_strict: bool,
) -> dict[str, Tensor]:
    """Read this rank's part of a parameter's wrapped state, by name.

    Args:
        reader: The checkpoint.
        parts: As `take_parts` has described them.
        target: The parameter.
        as_saved: Whether the optimizer takes state of the saved class.
        is_strict: Whether nothing but the saved state will do.

    Raises:
        ValueError: If this rank holds other regions than any rank that saved, or if the program
            does not know the class.
    """
    region = region_of(target)
    found: dict[str, Tensor] = {}
    by_name: dict[str, list[tuple[Region, dict[str, Any]]]] = {}
    for part in parts.values():
        box, order, start, end = part["place"]
        source = Region(tuple(map(tuple, box)), tuple(order), start, end)
        by_name.setdefault(part["name"], []).append((source, part))
    for name, sources in by_name.items():
        same = [part for source, part in sources if source == region and as_saved]
        if same:
            found[name] = _rebuild(reader, same[0])
            continue
        for source, part in sources:
            places, indices = find_places(region, source, 0, region.numel)
            if len(places) or name not in found:
                values = _rebuild(reader, part)
                found.setdefault(name, torch.empty(region.numel, dtype=values.dtype))
            if not len(places):
                continue
            if is_strict and "kind" in part:
                raise ValueError(
                    f"the optimizer state '{name}' was saved as {part['kind']}, which can be loaded"
                    f" bit by bit only where ranks hold the same parts of {tuple(target.shape)}: "
                    f"elements {source.start} to {source.end} were saved, and this rank holds "
                    f"{region.start} to {region.end}. Load with the world size and sharding of the "
                    "save, or pass strict=False, which loads plain values."
                )
            plain = torch.empty(values.shape, dtype=values.dtype).copy_(values)
            found[name][places] = local_part(plain)[indices]
    return {name: shaped_like(values, target) for name, values in found.items()}


def _rebuild(reader: CheckpointReader, part: dict[str, Any]) -> Tensor:
    values = json_tree.decode(part["values"], reader.read_whole)
    if "kind" not in part:
        return values  # type: ignore[no-any-return] # a plain shard
    known = torch.serialization.get_safe_globals()
    kinds = {_name_of(each): each for each in known if isinstance(each, type)}
    kind: Any = kinds.get(part["kind"])
    if kind is None or not issubclass(kind, Tensor):
        raise ValueError(
            f"the optimizer state '{part['name']}' was saved as {part['kind']}, which this program "
            "does not know. Import its library, or torch.serialization.add_safe_globals([class])."
        )
    shape = values[next(iter(values))].shape
    context = json_tree.decode(part["context"], reader.read_whole)
    return kind.__tensor_unflatten__(values, context, shape, None)  # type: ignore[no-any-return]
