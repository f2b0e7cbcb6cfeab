"""Checksums of checkpoints: what they are, the damage they find, those of older files."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable

import pytest
import torch

from composable_shard.checkpoint.file_format import checksums


def _plain_checksum(data: bytes) -> int:
    """Return the checksum of one chunk, number by number."""
    data += bytes(-len(data) % 1024)
    words = struct.unpack(f"<{len(data) // 8}Q", data)
    columns = [sum(words[column::128]) for column in range(128)]
    rows = [sum(words[start : start + 128]) for start in range(0, len(words), 128)]
    sums = [each % 2**64 for each in (*columns, *rows)]
    return zlib.crc32(struct.pack(f"<{len(sums)}Q", *sums))


@pytest.mark.parametrize("nbytes", [0, 1, 1023, 4096, 4100, 8192, 9000])
def test_a_checksum_is_that_of_sums_of_rows_and_columns(nbytes: int) -> None:
    """Of chunks of 4096 bytes; also where memory is not aligned."""
    data = random.Random(nbytes).randbytes(nbytes)
    expected = [_plain_checksum(data[i : i + 4096]) for i in range(0, nbytes, 4096)]
    memory = bytearray(3) + data
    assert checksums(memoryview(memory)[3:], 4096) == expected


_Damage = Callable[[bytearray], None]


def _swap_parts(data: bytearray, first: int, second: int, nbytes: int) -> None:
    a, b = slice(first, first + nbytes), slice(second, second + nbytes)
    data[a], data[b] = data[b], data[a]


def _flip_highest(data: bytearray, *positions: int) -> None:
    for position in positions:
        data[position] ^= 0x80


_DAMAGES: dict[str, _Damage] = {
    "one bit": lambda data: _flip_highest(data, 7),
    "the highest bits of two words of a row": lambda data: _flip_highest(data, 7, 15),
    "the highest bits of two words of a column": lambda data: _flip_highest(data, 7, 1031),
    "two words of a row in each other's place": lambda data: _swap_parts(data, 8, 80, 8),
    "two words of a column in each other's place": lambda data: _swap_parts(data, 8, 8 + 2048, 8),
    "two rows in each other's place": lambda data: _swap_parts(data, 0, 1024, 1024),
    "two blocks in each other's place": lambda data: _swap_parts(data, 512, 8192, 4096),
    "a row of zeros": lambda data: data.__setitem__(slice(1024, 2048), bytes(1024)),
    "the end is zeros": lambda data: data.__setitem__(slice(10000, 16384), bytes(6384)),
    "bytes moved on by one": lambda data: data.insert(0, data.pop()),
}


@pytest.mark.parametrize("kind", _DAMAGES)
@pytest.mark.parametrize("is_float", [False, True])
def test_damage_changes_a_checksum(kind: str, is_float: bool) -> None:
    """Of random bytes, and of parameters in fp32."""
    data = bytearray(random.Random(0).randbytes(1 << 14))
    if is_float:
        values = torch.randn(1 << 12, generator=torch.Generator().manual_seed(0))
        data = bytearray(values.numpy().tobytes())
    before = checksums(memoryview(data))
    _DAMAGES[kind](data)
    assert len(before) == 1
    assert checksums(memoryview(data)) != before
