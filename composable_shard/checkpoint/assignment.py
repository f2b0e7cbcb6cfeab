"""Which rank writes which part of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composable_shard.checkpoint.file_format import dtype_name
from composable_shard.layout import Region
from composable_shard.state_dict import json_tree
from composable_shard.tensor import FlatShard, region_of

_Piece = tuple[str, tuple[Any, ...], int, int]  # tensor, box, start, end


@dataclass
class Item:
    """A region of a tensor that this rank writes."""

    name: str
    region: Region
    shape: torch.Size
    values: Tensor  # the tensor itself; once assigned to this rank, shape (region.numel,)

    @property
    def line(self) -> list[Any]:
        """Its description for rank 0."""
        region, is_shard = self.region, isinstance(self.values, FlatShard | DTensor)
        place = [region.box, region.order, region.start, region.end]
        return [self.name, list(self.shape), dtype_name(self.values.dtype), *place, is_shard]


@dataclass(frozen=True)
class SaveArguments:
    """Arguments of `save_checkpoint` that all ranks must agree on, beside the step."""

    path: str
    keep_last: int | None
    async_op: bool


def list_items(tensors: dict[str, Tensor]) -> list[Item]:
    """Return this rank's region of each tensor.

    Raises:
        ValueError: For a DTensor of an unknown layout.
    """
    return [Item(name, region_of(tensor), tensor.shape, tensor) for name, tensor in tensors.items()]


def assign_pieces(ranks: list[Any]) -> tuple[dict[str, Any], list[list[int]]]:
    """Return the content of the metadata, and for each rank the indices of its lines to write."""
    for name in ("step", *SaveArguments.__dataclass_fields__):
        values = [rank[name] for rank in ranks]
        if any(value != values[0] for value in values):
            raise ValueError(f"the ranks passed different values of {name}: {values}")
    tensors: dict[str, dict[str, Any]] = {}
    holders: dict[_Piece, list[tuple[int, int]]] = {}
    for number, rank in enumerate(ranks):
        for index, line in enumerate(rank["lines"]):
            name, shape, dtype, box, order, start, end, is_shard = line
            entry = {"shape": shape, "dtype": dtype}
            if order != sorted(order):
                entry["order"] = order
            if tensors.setdefault(name, entry) != entry:
                raise ValueError(
                    f"rank {number} has '{name}' as {entry}, another rank as {tensors[name]}: all "
                    "ranks must save the same model, optimizer and extra values"
                )
            if end > start:
                known = holders.setdefault((name, tuple(map(tuple, box)), start, end), [])
                if is_shard or not known:
                    known.append((number, index))
    tree = reduce(json_tree.merge, [rank["tree"] for rank in ranks])
    return {"tree": tree, "tensors": tensors}, _share(holders, len(ranks), tensors)


def _share(
    holders: dict[_Piece, list[tuple[int, int]]],
    world_size: int,
    tensors: dict[str, dict[str, Any]],
) -> list[list[int]]:
    """Choose one rank for each piece, the largest first: the holder with the least to write.

    Raises:
        ValueError: If the pieces of a tensor do not cover it exactly.
    """
    numels = dict.fromkeys(tensors, 0)
    for name, _, start, end in holders:
        numels[name] += end - start
    for name, numel in numels.items():
        expected = torch.Size(tensors[name]["shape"]).numel()
        if numel != expected:
            raise ValueError(
                f"expected the ranks to hold the {expected} elements of '{name}' once, found "
                f"{numel}: all ranks of its mesh, and all of the default process group, must save"
            )
    chosen: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0] * world_size

    def nbytes(piece: _Piece) -> int:
        name, _, start, end = piece
        dtype: torch.dtype = getattr(torch, tensors[name]["dtype"])
        return int((end - start) * dtype.itemsize)

    # Those without a choice first.
    for piece in sorted(holders, key=lambda piece: (len(holders[piece]) > 1, -nbytes(piece))):
        rank, index = min(holders[piece], key=lambda holder: (loads[holder[0]], holder))
        loads[rank] += nbytes(piece)
        chosen[rank].append(index)
    return [sorted(indices) for indices in chosen]
