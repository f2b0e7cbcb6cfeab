"""Gathers in another dtype than the shards'.

[Note: Quantised wire]
A shard is cut into blocks of `BLOCK_NUMEL` elements, from its own start; the last one may be
shorter. A block is sent as one byte for each element and one fp32 scale, `absmax / top`, where
`top` is the largest number of the 8-bit dtype: 127 for int8, 448 for float8_e4m3fn, 57344 for
float8_e5m2. An element x becomes the 8-bit number nearest to `x / scale` (ties to even), and comes
back as that number times the scale, computed in fp32 and rounded once to the dtype it is wanted in.

In fp32 the error is at most half the distance between 8-bit numbers there, times the scale:

| dtype | error of x at most | that is at absmax |
|---|---|---|
| int8 | scale / 2, everywhere | absmax / 254 |
| float8_e4m3fn | the larger of abs(x) / 16 and scale / 2**10 | absmax / 28 |
| float8_e5m2 | the larger of abs(x) / 8 and scale / 2**17 | absmax / 14 |

each times 1 + 2**-14 at most, for the rounding of scale, quotient and product to fp32. A scale is
never below 2**-126, the smallest normal number: blocks whose absmax is below `top * 2**-126` have
that larger step. Zero is exact. A block with an element that is not finite becomes NaN as a whole:
one scale can't mark the element, and a model that has diverged must not look healthy.

Shards of fp64 are rounded to fp32 first; values beyond its range count as not finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard.comm import collectives
from composable_shard.comm.devices import Then, Waitable, cut_in_parts

BLOCK_NUMEL = 128
# The largest number of each dtype.
_TOP = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
QUANTISED = tuple(_TOP)
_MIN_SCALE = torch.finfo(torch.float32).tiny
_MAX_SCALE = (
    torch.finfo(torch.float32).max / 127 * (1 - 2.0**-22)
)  # int8's absmax must not overflow
_CHUNK_NUMEL = 1 << 16  # on CPU: what is computed in between takes memory for so many elements


def encoded_nbytes(numel: int) -> int:
    """Return the bytes of `numel` encoded elements, a multiple of 4: payload, then scales.

    Example: 1000 elements have 8 blocks and take 1000 + 8 * 4 = 1032 bytes.
    """
    return _payload_nbytes(numel) + 4 * -(-numel // BLOCK_NUMEL)


def _payload_nbytes(numel: int) -> int:
    return -(-numel // 4) * 4  # scales must be aligned


def encode(values: Tensor, encoded: Tensor, dtype: torch.dtype) -> None:
    """Quantise values, see [Note: Quantised wire].

    Args:
        values: Shape `(numel,)`, floating-point.
        encoded: Shape `(encoded_nbytes(numel),)`, uint8, at an address that is a multiple of 4.
        dtype: One of `QUANTISED`.
    """
    numbers, scales = _parts(encoded, values.numel(), dtype)
    for block_range, element_range in _chunks(values):
        chunk = _in_blocks(values[element_range]).float()
        low, high = chunk.aminmax(dim=1)
        scale = torch.maximum(high, low.neg_()).div_(_TOP[dtype])
        # NaN if an element is not finite; arithmetic passes NaN on.
        bounded = scale.clamp(_MIN_SCALE, _MAX_SCALE)
        scale = torch.where(scale.isfinite(), bounded, torch.nan)
        scales[block_range] = scale
        # A cast of NaN depends on the machine; the scale makes the result NaN.
        quotient = chunk.div(scale[:, None]).nan_to_num_(0.0)
        _in_blocks(numbers[element_range]).copy_(
            quotient if dtype.is_floating_point else quotient.round_()
        )


def decode(encoded: Tensor, output: Tensor, dtype: torch.dtype) -> None:
    """Write quantised values into `output`, rounded once to its dtype.

    Args:
        encoded: Shape `(encoded_nbytes(numel),)`, as `encode` has written it.
        output: Shape `(numel,)`, floating-point.
        dtype: That of `encode`.
    """
    numbers, scales = _parts(encoded, output.numel(), dtype)
    for block_range, element_range in _chunks(output):
        chunk = _in_blocks(output[element_range])
        # Every 8-bit number is exact in every dtype of the output.
        chunk.copy_(_in_blocks(numbers[element_range]))
        chunk.mul_(scales[block_range, None])


def round_trip(values: Tensor, dtype: torch.dtype, output_dtype: torch.dtype) -> Tensor:
    """Return the values that ranks compute with, shape `(numel,)`, if a shard holds `values`."""
    encoded = values.new_empty(encoded_nbytes(values.numel()), dtype=torch.uint8)
    encode(values, encoded, dtype)
    output = torch.empty_like(values, dtype=output_dtype)
    decode(encoded, output, dtype)
    return output


def _parts(encoded: Tensor, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if numel == 0:  # an empty part need not be aligned
        return encoded.new_empty(0, dtype=dtype), encoded.new_empty(0, dtype=torch.float32)
    scales = encoded[_payload_nbytes(numel) :].view(torch.float32)
    return encoded[:numel].view(dtype), scales


def _chunks(values: Tensor) -> Iterator[tuple[slice, slice]]:
    """Cut values into whole blocks and a shorter last one; yield ranges of blocks and of elements.

    On CPU torch copies its whole argument, so values are processed in chunks.
    """
    numel = values.numel()
    step = _CHUNK_NUMEL if values.device.type == "cpu" else max(numel, 1)
    whole = numel // BLOCK_NUMEL
    end = whole * BLOCK_NUMEL
    for start in range(0, end, step):
        stop = min(start + step, end)
        yield slice(start // BLOCK_NUMEL, stop // BLOCK_NUMEL), slice(start, stop)
    if end < numel:
        yield slice(whole, whole + 1), slice(end, numel)


def _in_blocks(values: Tensor) -> Tensor:
    return values.view(-1, min(BLOCK_NUMEL, values.numel()))


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
    *,
    what: str | None = None,
) -> Waitable:
    """Start gathering every rank's shard into `output`, this rank's own one included.

    One all-gather: of `output.numel()` elements of the dtype, or, where that is an 8-bit one, of
    bytes, `encoded_nbytes(shard_numel)` of each rank: payload and scales together, see
    [Note: Quantised wire]. As many bytes are allocated for it, and freed by `wait`.

    Args:
        output: Shape `(group.size() * shard_numel,)`.
        shard: Shape `(shard_numel,)`, this rank's, of any dtype.
        numels: As in `all_gather`.
        what: Likewise.
    """
    if wire_dtype not in QUANTISED:
        staging = torch.empty_like(output, dtype=wire_dtype)
        own = cut_in_parts(staging, group, numels)[group.rank()].copy_(shard)
        work = collectives.all_gather(staging, own, group, numels, what=what, is_of_step=True)
        return Then([work], partial(output.copy_, staging))
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

    work = collectives.all_gather(staging, own, group, encoded_sizes, what=what, is_of_step=True)
    return Then([work], partial(decode_all, staging))


def as_received(wire_dtype: torch.dtype, shard: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what ranks gather for a shard, shape `(shard_numel,)`, of dtype `dtype`."""
    if wire_dtype in QUANTISED:
        return round_trip(shard, wire_dtype, dtype)
    return shard.to(wire_dtype).to(dtype)
