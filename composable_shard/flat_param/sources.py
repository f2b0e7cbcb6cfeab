"""`Source`: how the shards of a flat parameter become its full values, chosen once.

In the plain case an `AllGather` is the source: it brings all shards to their places in the
unsharded buffer. A class of parameters may bring a source of its own, `extended_gathers`.

[Note: Main and compute dtype]
A unit may compute in another dtype than that of its shards, the main dtype. A gather then casts the
shard straight into this rank's part of the unsharded buffer and goes on in place; a kept buffer has
a local shard beside it. Where shards travel in a third dtype, or quantised, they do so through
memory that is freed as soon as it has been cast into the unsharded buffer: the owner too computes
with what the others receive. No value ever goes the other way.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from composable_shard.comm import AllGather, Waitable, gather_in
from composable_shard.flat_param.local_shard import LocalShard
from composable_shard.tensor import UnitLabel


class Source(Protocol):
    """Fills the unsharded buffer, which has memory, from the shards."""

    def start(self, when: str, /) -> Waitable | None:
        """Start filling; the values are there after the wait, or at once where None is returned.

        Args:
            when: What the values are for, the same on all ranks.
        """
        ...


class OnlyShard:
    """The shard of the one rank that holds all values: it is copied, and cast."""

    def __init__(self, shard: LocalShard, output: Tensor) -> None:
        self._shard, self._output = shard, output

    def start(self, when: str) -> None:
        """Fill the buffer."""
        self._shard.fill(self._output)


class CastShards:
    """Shards in another dtype or on the host: each rank casts its own into place, to gather it."""

    def __init__(self, shard: LocalShard, own_part: Tensor, gather: AllGather) -> None:
        self._shard, self._own_part, self._gather = shard, own_part, gather

    def start(self, when: str) -> Waitable:
        """Start gathering."""
        self._shard.fill(self._own_part)
        return self._gather.start(when)


class WireShards:
    """Shards that travel in a dtype in which nobody computes."""

    def __init__(self, shard: LocalShard, output: Tensor, label: UnitLabel) -> None:
        self._shard, self._output, self._label = shard, output, label

    def start(self, when: str) -> Waitable:
        """Start gathering."""
        shard, what = self._shard, f"the {when} gather of {self._label}"
        group, numels = shard.shard_group.group, shard.layout.uneven_numels
        return gather_in(
            shard.wire_dtype, self._output, shard.on_device(), group, numels, what=what
        )


def choose_source(
    shard: LocalShard,
    output: Tensor,
    own_part: Tensor,
    label: UnitLabel,
    *,
    has_separate_shard: bool,
) -> Source:
    """Return what fills a buffer that has memory; issues nothing.

    Args:
        shard: This rank's.
        output: Shape `(layout.padded_numel,)`, the buffer.
        own_part: Shape `(own_numel,)`, this rank's part of it.
        label: Label of the unit, for messages.
        has_separate_shard: The shard must be copied to `own_part` first.
    """
    if shard.shard_group.size == 1:
        return OnlyShard(shard, own_part)
    if shard.wire_dtype != output.dtype:
        return WireShards(shard, output, label)
    sent = own_part if has_separate_shard else shard.values
    group, numels = shard.shard_group.group, shard.layout.uneven_numels
    gather = AllGather(output, sent, group, numels, name=label)
    return CastShards(shard, own_part, gather) if has_separate_shard else gather
