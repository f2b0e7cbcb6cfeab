"""Vectors in parts: `cat` of flat shards, without communication.

[Note: Vectors in parts]
Libraries flatten all parameters or gradients into one vector (LBFGS, `parameters_to_vector`). In
memory a rank holds its slice of each part, one after another: 1/N of the vector, but no flat range
of it. Elementwise ops between vectors of the same parts run on what a rank holds, sums and norms
are reduced as those of a parameter, and a range of one part is a flat shard of this part again. All
other ops run on the whole vector, whose elements are gathered and put into order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import Tensor

from composable_shard.tensor.flat_shard import FlatShard, is_distributed, wrap
from composable_shard.tensor.labels import ParamLabel
from composable_shard.tensor.rule_table import NeedsWhole
from composable_shard.tensor.shard_spec import ShardSpec


@dataclass(frozen=True, slots=True)
class ConcatSpec(ShardSpec):
    """What a rank holds of a vector in parts: its range of each part.

    Attributes:
        parts: A 1-D spec for each part, in order.
        firsts: The first element of each part in the vector.
        helds: The first element of each part in what this rank holds.
        local_range: `(0, elements that this rank holds)`: the vector has no flat range.
    """

    parts: tuple[ShardSpec, ...] = field(kw_only=True)
    firsts: tuple[int, ...] = field(kw_only=True, compare=False)
    helds: tuple[int, ...] = field(kw_only=True, compare=False)

    @property
    def numels(self) -> list[int]:
        """Elements that each rank of the shard group holds."""
        return [sum(column) for column in zip(*(part.numels for part in self.parts), strict=True)]

    def range_of(self, rank: int) -> tuple[int, int]:
        """Return `(0, elements that the rank holds)`."""
        return 0, self.numels[rank]

    def slice(self, dense: Tensor) -> Tensor:
        """Return this rank's part of the whole vector, a copy."""
        pieces = dense.split([part.numel for part in self.parts])
        return torch.cat([part.slice(x) for part, x in zip(self.parts, pieces, strict=True)])

    def arrange(self, flat: Tensor) -> Tensor:
        """Return the vector, of what all ranks hold one after another."""
        held = [part.numels for part in self.parts]
        sizes = [numels[rank] for rank in range(self.world_size) for numels in held]
        pieces = flat.split(sizes)
        num_parts = len(self.parts)
        return torch.cat([piece for i in range(num_parts) for piece in pieces[i::num_parts]])

    def to_plain(self) -> tuple[Any, ...]:
        """Raise: a pickle would hold parts of this rank alone."""
        raise RuntimeError(f"{self.label} can't be pickled. Take full_tensor() on all ranks.")

    def check_has_region(self) -> NoReturn:
        """Raise: the parts are no region of a tensor."""
        raise RuntimeError(
            f"the vector of {self.label} can't be saved in parts. Use save_checkpoint, or take "
            "full_tensor() on all ranks; of optimizer state, get_optimizer_state_dict with "
            "full_state_dict=True."
        )


def _may_be_part(spec: ShardSpec) -> bool:
    return not spec.is_alone and spec.tensor_parallel is None and spec.owner is None


def is_joinable(shard: FlatShard) -> bool:
    """Return whether a shard's elements can be part of a vector without being gathered."""
    return _may_be_part(shard._shard_spec)


def _num_held(spec: ShardSpec) -> int:
    start, end = spec.local_range
    return end - start


def concatenated(shards: Sequence[FlatShard]) -> FlatShard:
    """Return 1-D shards one after another, as a vector in parts; no communication.

    Raises:
        NeedsWhole: If their parts are not those of one group of ranks.
    """
    parts: list[ShardSpec] = []
    for shard in shards:
        spec = shard._shard_spec
        parts += spec.parts if isinstance(spec, ConcatSpec) else (spec,)
    locals_ = [shard._local for shard in shards]
    first = parts[0]
    for part in parts:
        if (
            len(part.shape) != 1
            or not _may_be_part(part)
            or (part.group_name, part.world_size) != (first.group_name, first.world_size)
        ):
            raise NeedsWhole("vectors in parts need parts of one group of ranks")
    return wrap(torch.cat(locals_), _spec_of(parts))


def parts_of(vector: FlatShard) -> list[FlatShard]:
    """Return the parts of a vector in parts, which share its memory; of another shard, itself."""
    spec = vector._shard_spec
    if not isinstance(spec, ConcatSpec):
        return [vector]
    pieces = vector._local.split([_num_held(part) for part in spec.parts])
    return [wrap(piece, part) for piece, part in zip(pieces, spec.parts, strict=True)]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the vector of some tensors' elements: in parts if they are shards that allow it.

    Otherwise shards are gathered, on all ranks.
    """
    flat = [part.reshape(-1) for part in parts]
    shards = [part for part in flat if isinstance(part, FlatShard)]
    if len(shards) == len(flat):
        try:
            return concatenated(shards)
        except NeedsWhole:
            pass
    return torch.cat([x.full_tensor() if is_distributed(x) else x for x in flat])


def _spec_of(parts: Sequence[ShardSpec]) -> ShardSpec:
    first, last = parts[0], parts[-1]
    if len(parts) == 1:
        return first
    shape = torch.Size([sum(part.numel for part in parts)])
    return ConcatSpec(
        shape=shape,
        dense_shape=shape,
        dense_stride=(1,),
        layout=first.layout,
        index=None,
        rank=first.rank,
        group_name=first.group_name,
        label=ParamLabel(f"{first.label.fqn} to {last.label.fqn}"),
        is_split=first.is_split,
        parts=tuple(parts),
        firsts=tuple(accumulate((part.numel for part in parts[:-1]), initial=0)),
        helds=tuple(accumulate(map(_num_held, parts[:-1]), initial=0)),
    )


def run_of_parts(
    vector: FlatShard, start: int, numel: int, run: Callable[[FlatShard, int, int], FlatShard]
) -> FlatShard:
    """Return elements `[start, start + numel)` of a vector in parts, which share its memory.

    Args:
        vector: Whose spec is a ConcatSpec.
        start: The first element.
        numel: How many.
        run: Returns a range of one part's shard.
    """
    spec, local, end = vector._shard_spec, vector._local, start + numel
    assert isinstance(spec, ConcatSpec)
    found: list[FlatShard] = []
    first_held = None
    # From the part that has the first element, or one of no elements before it, on.
    index = max(bisect_left(spec.firsts, start) - 1, 0)
    for part, begin, held in zip(
        spec.parts[index:], spec.firsts[index:], spec.helds[index:], strict=True
    ):
        if begin > end:
            break
        low, high = max(start, begin), min(end, begin + part.numel)
        if low < high or (not numel and begin == start):
            shard = wrap(local[held : held + _num_held(part)], part)
            found.append(run(shard, low - begin, max(high - low, 0)))
            if first_held is None and found[-1]._local.numel():
                first_held = found[-1]._local.storage_offset() - local.storage_offset()
    if not found:
        raise NeedsWhole(f"no part of {spec.label} has elements from {start} on")
    if len(found) == 1:
        return found[0]
    held_numel = sum(shard._local.numel() for shard in found)
    begin_held = first_held or 0
    parts = [shard._shard_spec for shard in found]
    return wrap(local[begin_held : begin_held + held_numel], _spec_of(parts))
