"""The files of a checkpoint directory.

[Note: Checkpoint directory]

    path/latest                                     name and run of each, the newest first
    path/.lock                                      locked by the save that is writing
    path/step_00000100/metadata.json                written last: where everything is
    path/step_00000100/rank_0_of_2.safetensors      written by rank 0
    path/step_00000100/rank_1_of_2.safetensors

A data file is a valid safetensors file with one 1-D entry for each piece. `metadata.json` begins
with a checksum of the rest of its text. It holds all values as a JSON tree, with tensors by name,
and for each tensor its shape, dtype, order in memory and pieces. A piece has a file, an offset, a
region, and one checksum for each chunk, so that a reader verifies exactly the bytes it reads.
Checksums find damage, not forgery. A forged checkpoint can give wrong numbers, but no more: nothing
in it is executed, and no file outside of its directory is opened.

A directory has a temporary name until all of it is on disk, so a directory `step_...` with metadata
is complete. Saving the same step again makes `step_00000100.1`. A run has a random name, which it
takes over from the checkpoint that it loads: `keep_last` removes no checkpoint of another run.

[Note: Checksums]
A chunk, with zeros after it, is a matrix of 64-bit words with 128 columns. Its checksum is the
CRC-32 of the sums (mod 2**64) of its columns and then of its rows. It takes a fifth of the
time of a CRC-32 of all bytes. Damage to one word or one row, zeroed memory and misplaced rows each
change at least one sum.
"""

from __future__ import annotations

import ctypes
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composable_shard.layout import Region, whole_box

CHUNK_NBYTES = 1 << 18
METADATA = "metadata.json"
LATEST = "latest"
LOCK = ".lock"
_FORMAT = "composable_shard checkpoint"
_VERSION = 2
_NUM_COLUMNS = 128  # [Note: Checksums]
_ROW_NBYTES = 8 * _NUM_COLUMNS
_FOLDER = re.compile(r"step_(\d{8,12})(?:\.(\d{1,6}))?")
_DATA_FILE = re.compile(r"rank_\d{1,9}_of_\d{1,9}\.safetensors")

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
# Types of safetensors; other dtypes are written as bytes, complex numbers as pairs.
_SAFETENSORS = {
    torch.float64: ("F64", 1),
    torch.float32: ("F32", 1),
    torch.float16: ("F16", 1),
    torch.bfloat16: ("BF16", 1),
    torch.float8_e4m3fn: ("F8_E4M3", 1),
    torch.float8_e5m2: ("F8_E5M2", 1),
    torch.int64: ("I64", 1),
    torch.int32: ("I32", 1),
    torch.int16: ("I16", 1),
    torch.int8: ("I8", 1),
    torch.uint8: ("U8", 1),
    torch.bool: ("BOOL", 1),
    torch.complex64: ("F32", 2),
    torch.complex128: ("F64", 2),
}


class Piece(NamedTuple):
    """Elements of a tensor that are consecutive in a file."""

    file: str
    offset: int  # of the first byte in the file
    nbytes: int
    region: Region
    checksums: tuple[int, ...]  # of each chunk


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Metadata:
    """The content of `metadata.json`."""

    step: int  # number of steps taken
    world_size: int  # number of ranks that wrote it
    chunk_nbytes: int  # bytes for each checksum
    files: dict[str, int]  # bytes of each data file
    tensors: dict[str, StoredTensor]  # by name
    tree: dict[str, Any]  # all values, encoded, with tensors by name


# Names


def folder_name(step: int, attempt: int) -> str:
    """Return the name of a step's directory, with a number for a further save of the same step."""
    return f"step_{step:08}" + (f".{attempt}" if attempt else "")


def parse_folder_name(name: str) -> tuple[int, int] | None:
    """Return step and attempt from a directory's name, None for any other name."""
    match = _FOLDER.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2] or 0))


def temporary_name(name: str) -> str:
    """Return the name of a directory or file before it is published and while it is removed."""
    return f".tmp_{name}"


def data_file_name(rank: int, world_size: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank_{rank}_of_{world_size}.safetensors"


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name, without `torch.`."""
    return str(dtype).removeprefix("torch.")


# Data files


def make_header(entries: Sequence[tuple[str, torch.dtype, int]]) -> bytes:
    """Return the header of a safetensors file; the entries' data follows without gaps.

    An entry is key, dtype and number of elements.
    """
    header: dict[str, Any] = {"__metadata__": {"format": _FORMAT}}
    end = 0
    for key, dtype, numel in entries:
        nbytes = numel * dtype.itemsize
        kind, factor = _SAFETENSORS.get(dtype, ("U8", dtype.itemsize))
        offsets = [end, end + nbytes]
        header[key] = {"dtype": kind, "shape": [numel * factor], "data_offsets": offsets}
        end += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# Checksums


def checksums(data: memoryview, chunk_nbytes: int = CHUNK_NBYTES) -> list[int]:
    """Return the checksum of each chunk; the last one may be shorter. [Note: Checksums]"""
    whole_nbytes = len(data) // chunk_nbytes * chunk_nbytes
    rest = bytearray(data[whole_nbytes:])
    rest += bytes(-len(rest) % _ROW_NBYTES)
    return [*_digests(data[:whole_nbytes], chunk_nbytes), *_digests(rest, len(rest))]


def _digests(data: memoryview | bytearray, nbytes: int) -> list[int]:
    """Return the checksum of each part of `nbytes`, all of them whole rows."""
    if not data:
        return []
    words = torch.frombuffer(data, dtype=torch.int64).view(-1, nbytes // _ROW_NBYTES, _NUM_COLUMNS)
    sums = torch.cat([words.sum(1), words.sum(2)], 1)
    view, size = byte_view(sums), sums.nbytes // len(sums)
    return [zlib.crc32(view[start : start + size]) for start in range(0, len(view), size)]


def byte_view(tensor: Tensor) -> memoryview:
    """Return the memory of a dense CPU tensor; the tensor must outlive it."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


# Metadata


def write_metadata(content: dict[str, Any]) -> bytes:
    """Return the text of `metadata.json`, with format, version and checksum added."""
    content = {"format": _FORMAT, "version": _VERSION, **content}
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    rest = (text[1:] + "\n").encode()
    return _first_line(rest) + rest


def _first_line(rest: bytes) -> bytes:
    return f'{{"crc32":"{zlib.crc32(rest):08x}",\n'.encode()


def parse_metadata(text: bytes, path: str) -> Metadata:
    """Parse and check the text of `metadata.json`; `path` is for messages."""
    line, newline, rest = text.partition(b"\n")
    if not re.fullmatch(rb'\{"crc32":"[0-9a-f]{8}",', line):
        raise ValueError(f"{path} is not the metadata of a checkpoint of composable_shard")
    if line + newline != _first_line(rest):
        raise ValueError(f"{path} is damaged: its checksum does not match its text")
    try:
        content = json.loads(text)
        if content["format"] != _FORMAT or content["version"] != _VERSION:
            raise ValueError(
                f"format {content['format']!r} version {content['version']!r}, expected "
                f"{_FORMAT!r} version {_VERSION}"
            )
        return _parse_content(content)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not valid metadata of a checkpoint: {type(error).__name__}: {error}"
        ) from error


def _parse_content(content: dict[str, Any]) -> Metadata:
    chunk_nbytes = _count(content["chunk_nbytes"])
    if chunk_nbytes < _ROW_NBYTES or chunk_nbytes % _ROW_NBYTES:
        raise ValueError(f"chunk_nbytes {chunk_nbytes}, expected a multiple of {_ROW_NBYTES}")
    files = {_file_name(name): _count(nbytes) for name, nbytes in content["files"]}
    names = list(files)
    tensors = {}
    for name, entry in content["tensors"].items():
        tensors[name] = _parse_tensor(name, entry, names, files, chunk_nbytes)
    if not isinstance(content["tree"], dict):
        raise ValueError("expected a dict as tree")
    step, world_size = _count(content["step"]), _count(content["world_size"])
    return Metadata(step, world_size, chunk_nbytes, files, tensors, content["tree"])


def _parse_tensor(
    name: str, entry: dict[str, Any], names: list[str], files: dict[str, int], chunk_nbytes: int
) -> StoredTensor:
    shape = torch.Size(_count(size) for size in entry["shape"])
    dtype = _DTYPES[entry["dtype"]]
    order = tuple(range(len(shape)))
    if "order" in entry:
        order = tuple(_count(dim) for dim in entry["order"])
        if sorted(order) != list(range(len(shape))):
            raise ValueError(f"'{name}' has order {order}")
    pieces = []
    for fields in entry["pieces"]:
        file, offset, start, end, checksums = fields[:5]
        box = whole_box(shape)
        if len(fields) > 5:
            box = tuple((_count(low), _count(high)) for low, high in fields[5])
        sizes = torch.Size(high - low for low, high in box)
        fits = len(box) == len(shape) and all(
            low <= high <= size for (low, high), size in zip(box, shape, strict=False)
        )
        region = Region(box, order, _count(start), _count(end))
        nbytes = region.numel * dtype.itemsize
        # The metadata may be damaged or forged: the place must be inside the tensor and its file
        # before a number of checksums is computed from it.
        name_of_file = names[_count(file)]
        if not (fits and start <= end <= sizes.numel()) or offset + nbytes > files[name_of_file]:
            raise ValueError(
                f"expected a piece of '{name}' that is inside the tensor and {name_of_file}, got "
                f"elements {start} to {end} of {sizes.numel()} from byte {offset} on, of "
                f"{files[name_of_file]}"
            )
        values = tuple(int(checksums[i : i + 8], 16) for i in range(0, len(checksums), 8))
        if len(values) != -(-nbytes // chunk_nbytes):
            raise ValueError(
                f"expected {-(-nbytes // chunk_nbytes)} checksums for {nbytes} bytes of '{name}' "
                f"in {name_of_file}, got {len(values)}"
            )
        pieces.append(Piece(name_of_file, _count(offset), nbytes, region, values))
    return StoredTensor(name, shape, dtype, tuple(pieces))


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"expected a number of at least 0, got {value!r}")
    return value


def _file_name(name: object) -> str:
    """Check a data file's name, which must not lead out of the directory."""
    if not isinstance(name, str) or not _DATA_FILE.fullmatch(name):
        raise ValueError(
            f"expected a data file of one rank, as 'rank_0_of_2.safetensors', got {name!r}"
        )
    return name
