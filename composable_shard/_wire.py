"""How shards travel in another dtype than that of the buffer that is gathered into."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard import _collectives
from composable_shard._collectives import Waitable
from composable_shard._parts import cut_in_parts
from composable_shard._quantise import QUANTISED, decode, encode, encoded_nbytes, round_trip

__all__ = ["as_received", "gather_in", "wire_nbytes"]


def wire_nbytes(wire_dtype: torch.dtype, shard_numel: int) -> int:
    """Return the bytes in which a shard travels."""
    if wire_dtype in QUANTISED:
        return encoded_nbytes(shard_numel)
    return shard_numel * wire_dtype.itemsize


def gather_in(
    wire_dtype: torch.dtype,
    output: Tensor,
    shard: Tensor,
    group: dist.ProcessGroup,
    numels: Sequence[int] | None = None,
) -> Waitable:
    """Start gathering every rank's shard into `output`, this rank's own one included.

    One all-gather: of `output.numel()` elements of the dtype, or, where that is an 8-bit one, of
    bytes, `encoded_nbytes(shard_numel)` of each rank: payload and scales together, see
    [Note: Quantised wire]. As many bytes are allocated for it, and freed by `wait`.

    Args:
        wire_dtype: In which shards travel.
        output: Shape `(group.size() * shard_numel,)`.
        shard: Shape `(shard_numel,)`, this rank's, of any dtype.
        group: The ranks that take part.
        numels: As in `all_gather`.
    """
    if wire_dtype not in QUANTISED:
        staging = torch.empty_like(output, dtype=wire_dtype)
        own = cut_in_parts(staging, group, numels)[group.rank()].copy_(shard)
        work = _collectives.all_gather(staging, own, group, numels)
        return _StagedGather(work, staging, output.copy_)
    each = numels or [shard.numel()] * group.size()
    sizes = [encoded_nbytes(numel) for numel in each]
    staging = output.new_empty(sum(sizes), dtype=torch.uint8)
    encoded_sizes = None if numels is None else sizes
    own = cut_in_parts(staging, group, encoded_sizes)[group.rank()]
    encode(shard, own, wire_dtype)

    def decode_all(encoded: Tensor) -> None:
        encoded_parts = cut_in_parts(encoded, group, encoded_sizes)
        for part, values in zip(encoded_parts, cut_in_parts(output, group, numels), strict=True):
            decode(part, values, wire_dtype)

    work = _collectives.all_gather(staging, own, group, encoded_sizes)
    return _StagedGather(work, staging, decode_all)


def as_received(wire_dtype: torch.dtype, shard: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what ranks gather for a shard, shape `(shard_numel,)`, of dtype `dtype`."""
    if wire_dtype in QUANTISED:
        return round_trip(shard, wire_dtype, dtype)
    return shard.to(wire_dtype).to(dtype)


class _StagedGather:
    """A gather into memory of another dtype, which is freed when the values have been cast."""

    def __init__(self, work: Waitable, staging: Tensor, unpack: Callable[[Tensor], object]) -> None:
        self._work = work
        self._staging: Tensor | None = staging
        self._unpack = unpack

    def wait(self) -> None:
        """Wait for the values, and cast them into the output."""
        staging, self._staging = self._staging, None
        self._work.wait()
        if staging is not None:
            self._unpack(staging)
