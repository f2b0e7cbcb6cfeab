"""Where parameters lie in a flat parameter, how finely they are cut, and where ranks cut it.

Pure arithmetic on integers, the same on every rank: no tensors, no process groups.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from math import lcm, prod
from typing import Any

from torch import Tensor

from composable_shard.layout.regions import intersect
from composable_shard.options import Block, Granularity

_MAX_EQUAL_PADDING = 1.03  # of the buffer of a layout with blocks of one element
_MAX_ATTEMPTS = 4


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def snap(position: int, numel: int, block_numel: int) -> int:
    """Return the boundary nearest to a position in a tensor that is cut into blocks.

    Boundaries are the multiples of `block_numel`, and `numel`: the last block may be shorter.

    Example: `snap(7, 10, 4)` is 8, `snap(9, 10, 4)` is 8, `snap(11, 10, 4)` is 10.
    """
    if position <= 0:
        return 0
    return min((2 * position + block_numel) // (2 * block_numel) * block_numel, numel)


@dataclass(frozen=True)
class FlatLayout:
    """Place parameters one after another and cut the sequence into one shard for each rank.

    Parameter `i` occupies `[offsets[i], offsets[i] + numels[i])` of a flat index space. Starts are
    multiples of `alignment` elements. Rank `r` owns `[cut(r), cut(r + 1))`, see [Note: Cuts].

    In blocks of `alignment` elements the padding is less than one block for each parameter plus
    less than `world_size` blocks at the end. [Note: Cuts] says where it may be more.

    Example: numels `(5, 3)`, two ranks, alignment 4, drawn to scale (`.` is padding):

        index   0   4   8   12
                aaaaa...bbb.....
        shards  |--r0--||--r1--|

    [Note: Cuts]
    A parameter may ask for blocks that no cut divides. Blocks begin at its first element; the last
    may be shorter. Cuts are equal, so that single-tensor collectives serve, if

    - all blocks are of one element, or
    - padding before parameters moves every block that a cut would go through, and the whole buffer
      is at most 1.03 times as large as with blocks of one element. Only parameters that span two
      cuts or more constrain the shard size; there is no least common multiple over all.

    Otherwise each equal cut moves to the nearest block boundary. This needs no padding, and a
    shard's size differs from the mean by at most one block: half a block at each end. Owners of
    whole parameters are in the order of the parameters.

    Attributes:
        numels: Elements of each parameter.
        offsets: Where each begins.
        world_size: Ranks that share the flat parameter.
        span: Elements up to the last cut.
        alignment: Starts and equal cuts are multiples of this number of elements.
        blocks: Elements in a block of each parameter, if cuts are uneven; otherwise empty.
        owners: The rank that owns each parameter, ascending, if parameters are owned whole;
            otherwise empty.
        base: The layout of which this one keeps some parameters, see `keep`; otherwise None.
    """

    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    world_size: int
    span: int
    alignment: int
    blocks: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()
    base: FlatLayout | None = None

    @classmethod
    def plan(
        cls,
        numels: Sequence[int],
        world_size: int,
        alignment: int = 1,
        *,
        blocks: Sequence[int] = (),
        owners: Sequence[int] = (),
    ) -> FlatLayout:
        """Plan a layout in time proportional to the number of parameters, for any world size.

        Args:
            numels: Elements of each parameter, in order; zero is allowed.
            world_size: Number of ranks that share the flat parameter, at least 1.
            alignment: Starts and equal cuts are multiples of this number of elements, at least 1.
            blocks: Elements in a block of each parameter, at least 1. Default: 1 for all.
            owners: The rank that owns each whole parameter, ascending. Default: parameters are cut.

        Raises:
            ValueError: For a negative numel, a world size, alignment or block below 1, or owners
                that are not ranks or not in order.
        """
        if world_size < 1 or alignment < 1:
            raise ValueError(
                "expected world_size >= 1 and alignment >= 1, "
                f"got world_size={world_size}, alignment={alignment}"
            )
        _check_per_param(numels, world_size, blocks, owners)
        offsets = []
        end = 0
        for numel in numels:
            if numel < 0:
                raise ValueError(f"expected a parameter's numel >= 0, got {numel}")
            start = round_up(end, alignment)
            offsets.append(start)
            end = start + numel
        shard_numel = round_up(-(-end // world_size), alignment)
        even = cls(tuple(numels), tuple(offsets), world_size, world_size * shard_numel, alignment)
        if owners:
            span = round_up(end, alignment)
            return replace(even, span=span, owners=tuple(owners))
        if world_size == 1 or end == 0 or all(block == 1 for block in blocks):
            return even
        # Cuts in a parameter without blocks stay aligned.
        blocks = tuple(alignment if block == 1 else block for block in blocks)
        return _plan_equal_cuts(even, blocks) or replace(
            even, span=round_up(end, alignment), blocks=blocks
        )

    def keep(self, flags: Sequence[bool]) -> FlatLayout:
        """Return a layout in which only some parameters have elements, owned by the same ranks.

        Args:
            flags: For each parameter, whether it keeps its elements.

        Example: of numels `(5, 3)` on two ranks, alignment 4, `keep([False, True])` has numels
        `(0, 3)`, offsets `(0, 0)`, and rank 1 owns all three elements.
        """
        numels = tuple(numel * flag for numel, flag in zip(self.numels, flags, strict=True))
        if numels == self.numels:
            return self
        offsets, end = [], 0
        for numel in numels:
            offsets.append(round_up(end, self.alignment))
            end = offsets[-1] + numel
        span, base = round_up(end, self.alignment), None if self.owners else self
        places = numels, tuple(offsets), self.world_size, span
        return FlatLayout(*places, self.alignment, (), self.owners, base)

    def as_tuple(self) -> tuple[Any, ...]:
        """Return plain data for `from_tuple`; a pickle stores it once for all parameters."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @classmethod
    @cache  # one object for equal layouts: specs are compared by identity first
    def from_tuple(cls, values: tuple[Any, ...]) -> FlatLayout:
        """Return the layout that `as_tuple` was called on, or an equal one."""
        return cls(*values)

    @property
    def is_even(self) -> bool:
        """Whether all shards have the same number of elements."""
        return not (self.blocks or self.owners or self.base)

    @cached_property
    def shard_numel(self) -> int:
        """Elements of a shard; if shards are uneven, of the largest one: no rank's shape then."""
        return self.span // self.world_size if self.is_even else max(self.shard_numels)

    @cached_property
    def shard_numels(self) -> tuple[int, ...]:
        """Elements of each rank's shard, in rank order."""
        cuts = [self.cut(rank) for rank in range(self.world_size + 1)]
        return tuple(end - start for start, end in itertools.pairwise(cuts))

    @cached_property
    def uneven_numels(self) -> tuple[int, ...] | None:
        """Elements of each rank's shard for collectives; None if all are equal."""
        return None if self.is_even else self.shard_numels

    @property
    def padded_numel(self) -> int:
        """Elements of the unsharded buffer; a multiple of `world_size * alignment`."""
        return round_up(self.span, self.world_size * self.alignment)

    @property
    def unpadded_numel(self) -> int:
        """Elements of all parameters together, padding left out."""
        return sum(self.numels)

    @property
    def end(self) -> int:
        """Elements up to the end of the last parameter, without the padding behind it."""
        return self.offsets[-1] + self.numels[-1] if self.numels else 0

    def padding_ranges(self) -> list[tuple[int, int]]:
        """Return the flat ranges that belong to no parameter, without empty ones.

        Example: numels `(5, 3)`, two ranks, alignment 4 give `[(5, 8), (11, 16)]`.
        """
        ends = [offset + numel for offset, numel in zip(self.offsets, self.numels, strict=True)]
        ranges = zip([0, *ends], [*self.offsets, self.padded_numel], strict=True)
        return [(end, start) for end, start in ranges if end < start]

    def cut(self, rank: int) -> int:
        """Return where the shard of `rank` begins; for `world_size`, where the last one ends."""
        if self.owners:
            return self._start_of(bisect_left(self.owners, rank)) if rank else 0
        # Before equal cuts: of the parameters that `keep` kept, ranks own what they own in the
        # base.
        if self.base is not None:
            cut = self.base.cut(rank)
            index = bisect_right(self.base.offsets, cut) - 1
            inside = cut - self.base.offsets[index]
            if index < 0 or inside >= self.base.numels[index]:
                return self._start_of(index + 1)
            return self.offsets[index] + min(inside, self.numels[index])
        equal = rank * self.span // self.world_size
        if not self.blocks or equal == self.span:
            return equal
        index = bisect_right(self.offsets, equal) - 1
        inside = snap(equal - self.offsets[index], self.numels[index], self.blocks[index])
        is_end = inside == self.numels[index]
        return self._start_of(index + 1) if is_end else self.offsets[index] + inside

    def _start_of(self, index: int) -> int:
        return self.offsets[index] if index < len(self.offsets) else self.span

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Return the flat range that `rank` owns."""
        return self.cut(rank), self.cut(rank + 1)

    def world_range(self, index: int, rank: int) -> tuple[int, int]:
        """Return the part of parameter `index` that `rank` owns, as a flat range."""
        start = self.offsets[index]
        return intersect((start, start + self.numels[index]), self.shard_range(rank))

    def param_range(self, index: int, rank: int) -> tuple[int, int]:
        """Return the part of parameter `index` that `rank` owns, counted from its first element.

        A parameter that does not touch the rank's shard gives `(k, k)` for some `k` in
        `[0, numel]`.
        """
        start, end = self.world_range(index, rank)
        base = self.offsets[index]
        low = min(max(start - base, 0), self.numels[index])
        return low, low + end - start

    def local_range(self, index: int, rank: int) -> tuple[int, int]:
        """Return the part of parameter `index` that `rank` owns, counted in its local shard."""
        start, end = self.world_range(index, rank)
        base, stop = self.shard_range(rank)
        low = min(max(start - base, 0), stop - base)
        return low, low + end - start

    def owned_numel(self, rank: int) -> int:
        """Return how many elements of parameters `rank` owns: its shard without padding."""
        start, end = self.shard_range(rank)
        first, last = bisect_right(self.offsets, start) - 1, bisect_left(self.offsets, end)
        places = zip(self.offsets[first:last], self.numels[first:last], strict=True)
        return sum(max(0, min(end, low + numel) - max(start, low)) for low, numel in places)

    def piece_numels(self, rank: int) -> list[int]:
        """Return the sizes that cut a rank's local shard into gap, parameter, gap, ..., gap.

        Example: numels `(5, 3)`, two ranks, alignment 4 give rank 1 `[0, 0, 0, 3, 1]`.
        """
        sizes = []
        position, stop = self.shard_range(rank)
        for offset, numel in zip(self.offsets, self.numels, strict=True):
            start = min(max(offset, position), stop)
            end = min(max(offset + numel, start), stop)
            sizes += [start - position, end - start]
            position = end
        return [*sizes, stop - position]


def _check_per_param(
    numels: Sequence[int], world_size: int, blocks: Sequence[int], owners: Sequence[int]
) -> None:
    for each in (blocks, owners):
        if each and len(each) != len(numels):
            raise ValueError(f"expected one value for each of {len(numels)} parameters, got {each}")
    if any(block < 1 for block in blocks):
        raise ValueError(f"expected blocks of at least one element, got {list(blocks)}")
    if any(not 0 <= owner < world_size for owner in owners) or list(owners) != sorted(owners):
        raise ValueError(
            f"expected owners in ascending order, each below {world_size}, got {list(owners)}"
        )


def _plan_equal_cuts(even: FlatLayout, blocks: tuple[int, ...]) -> FlatLayout | None:
    """Return a layout with equal cuts that go through no block, or None; [Note: Cuts]."""
    limit = int(_MAX_EQUAL_PADDING * even.span)
    shard_numel = even.shard_numel
    multiple = even.alignment
    for _ in range(_MAX_ATTEMPTS):
        for numel, block in zip(even.numels, blocks, strict=True):
            # It may span a whole shard, with a cut at each end.
            if numel > shard_numel and block <= limit:
                multiple = lcm(multiple, block)
        shard_numel = round_up(shard_numel, multiple)
        if shard_numel * even.world_size > limit:
            return None
        offsets, end = _place(even.numels, blocks, shard_numel, even.alignment)
        span = shard_numel * even.world_size
        if offsets is None:
            return None
        if end <= span:
            return replace(even, offsets=tuple(offsets), span=span)
        shard_numel = round_up(-(-end // even.world_size), multiple)
    return None


def _place(
    numels: Sequence[int], blocks: Sequence[int], shard_numel: int, alignment: int
) -> tuple[list[int] | None, int]:
    """Return starts and the end, such that cuts every `shard_numel` elements divide no block.

    Returns no starts if a parameter spans several cuts that can't all be block boundaries.
    """
    offsets: list[int] = []
    end = 0
    for numel, block in zip(numels, blocks, strict=True):
        start = round_up(end, alignment)
        cut = round_up(start, shard_numel)
        if start < cut < start + numel:
            # The nearest start that is a number of blocks before the cut.
            distance = (cut - start) // block * block
            while (cut - distance) % alignment:
                distance -= block
            start = cut - max(distance, 0)
        first = round_up(start + 1, shard_numel)
        if first + shard_numel < start + numel and shard_numel % block:
            return None, end
        if first < start + numel and (first - start) % block:
            return None, end
        offsets.append(start)
        end = start + numel
    return offsets, end


def is_owned(granularity: Granularity) -> bool:
    """Return whether one rank holds the whole parameter; its owner is balanced over the ranks."""
    return granularity == "param"


def block_numel(dense: Tensor, granularity: Granularity) -> int:
    """Return how many consecutive elements of a dense tensor, in memory order, stay together.

    A row is selected by one index of the outermost dimension in memory. This is the first
    dimension, except for other layouts (channels_last, a transposed weight).
    """
    if isinstance(granularity, Block):
        return granularity.numel
    if granularity == "element" or dense.numel() == 0:
        return 1
    if is_owned(granularity):
        return dense.numel()
    outermost = max(range(dense.dim()), key=lambda dim: dense.stride(dim), default=None)
    if outermost is None:
        return 1
    return prod(size for dim, size in enumerate(dense.shape) if dim != outermost)
