"""Where each parameter of a unit lies in its flat parameter, and which part of it a rank owns.

Pure arithmetic on integers: no tensors, no process groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["FlatLayout", "cut_buckets", "intersect", "round_up"]


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def intersect(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    """Return the overlap of two half-open ranges; an empty one is `(start, start)`.

    Example: `intersect((0, 10), (4, 20))` is `(4, 10)`.
    """
    start = max(first[0], second[0])
    return start, max(start, min(first[1], second[1]))


def cut_buckets(
    numels: Sequence[int], cap_numel: int, world_size: int, alignment: int = 1
) -> list[range]:
    """Cut a sequence of parameters into buckets, the last parameter first: backward order.

    A bucket is a run of neighbours. Laid out as one `FlatLayout` it has a `padded_numel` of at most
    `cap_numel`, unless one of its parameters alone has more; then all others in it are empty.

    Args:
        numels: Elements of each parameter, in order.
        cap_numel: The most elements in a bucket.
        world_size: Number of ranks that share each flat parameter.
        alignment: That of the layouts.

    Example: numels `(5, 1, 3, 4)` and a cap of 8 give `[range(2, 4), range(0, 2)]`.
    """
    buckets = []
    end, filled = len(numels), 0
    for index in reversed(range(len(numels))):
        aligned = round_up(numels[index], alignment)
        if filled and aligned and round_up(filled + aligned, world_size * alignment) > cap_numel:
            buckets.append(range(index + 1, end))
            end, filled = index + 1, 0
        filled += aligned
    return [*buckets, range(end)] if end else buckets


@dataclass(frozen=True)
class FlatLayout:
    """Place parameters one after another and cut the sequence into equal shards.

    Parameter `i` occupies `[offsets[i], offsets[i] + numels[i])` of a flat index space. Starts are
    multiples of `alignment` elements, and so is `shard_numel`, so a slice that begins at a
    parameter's start or at a cut is aligned both in the unsharded buffer and in the local shard.
    Rank `r` owns `[r * shard_numel, (r + 1) * shard_numel)`.

    In blocks of `alignment` elements the padding is less than one block for each parameter plus
    less than `world_size` blocks at the end.

    Example: numels `(5, 3)`, two ranks, alignment 4, drawn to scale (`.` is padding):

        index   0   4   8   12
                aaaaa...bbb.....
        shards  |--r0--||--r1--|
    """

    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    world_size: int
    shard_numel: int
    alignment: int

    @classmethod
    def plan(cls, numels: Sequence[int], world_size: int, alignment: int = 1) -> FlatLayout:
        """Plan a layout in time proportional to the number of parameters, for any world size.

        Args:
            numels: Elements of each parameter, in order; zero is allowed.
            world_size: Number of ranks that share the flat parameter, at least 1.
            alignment: Elements that starts and the shard size are a multiple of, at least 1.

        Raises:
            ValueError: For a negative numel, or a world size or alignment below 1.
        """
        if world_size < 1 or alignment < 1:
            raise ValueError(
                "expected world_size >= 1 and alignment >= 1, "
                f"got world_size={world_size}, alignment={alignment}"
            )
        offsets = []
        end = 0
        for numel in numels:
            if numel < 0:
                raise ValueError(f"expected a parameter's numel >= 0, got {numel}")
            start = round_up(end, alignment)
            offsets.append(start)
            end = start + numel
        shard_numel = round_up(-(-end // world_size), alignment)
        return cls(tuple(numels), tuple(offsets), world_size, shard_numel, alignment)

    @property
    def padded_numel(self) -> int:
        """Elements of the unsharded buffer: `world_size * shard_numel`."""
        return self.world_size * self.shard_numel

    @property
    def unpadded_numel(self) -> int:
        """Elements of all parameters together, padding left out."""
        return sum(self.numels)

    @property
    def end(self) -> int:
        """Elements up to the end of the last parameter: without the padding behind it."""
        return self.offsets[-1] + self.numels[-1] if self.numels else 0

    def padding_ranges(self) -> list[tuple[int, int]]:
        """Return the flat ranges that belong to no parameter, without empty ones.

        Example: numels `(5, 3)`, two ranks, alignment 4 give `[(5, 8), (11, 16)]`.
        """
        ends = [offset + numel for offset, numel in zip(self.offsets, self.numels, strict=True)]
        starts = [*self.offsets[1:], self.padded_numel]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Return the flat range that `rank` owns."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

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
        base = rank * self.shard_numel
        low = min(max(start - base, 0), self.shard_numel)
        return low, low + end - start

    def piece_numels(self, rank: int) -> list[int]:
        """Return the sizes that cut a rank's local shard into gap, parameter, gap, ..., gap.

        Example: numels `(5, 3)`, two ranks, alignment 4 give rank 1 `[0, 0, 0, 3, 1]`.
        """
        sizes = []
        position = 0
        for index in range(len(self.numels)):
            start, end = self.local_range(index, rank)
            start, end = max(start, position), max(end, position)
            sizes += [start - position, end - start]
            position = end
        return [*sizes, self.shard_numel - position]
