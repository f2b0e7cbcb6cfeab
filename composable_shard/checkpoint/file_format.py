"""The files of a checkpoint directory.

[Note: Checkpoint directory]

    path/latest                                     name and run of each, the newest first
    path/.lock                                      locked by the save that is writing
    path/step_00000100/metadata.json                written last: where everything is
    path/step_00000100/rank_0_of_2.safetensors      written by rank 0
    path/step_00000100/rank_1_of_2.safetensors

A data file is a valid safetensors file with one 1-D entry for each piece, and a last one with a
checksum for each chunk of these, so that a reader verifies exactly the bytes it reads. The header
and the last entry are its index. `metadata.json` begins with a checksum of the rest of its text. It
holds all values as a JSON tree, with tensors by name, for each file its length and a checksum of
its index, and for each tensor its shape, dtype, order in memory and where its pieces are.
[Note: Runs of pieces]
Checksums find damage, not forgery. A forged checkpoint can give wrong numbers, but no more: nothing
in it is executed, and no file outside of its directory is opened.

[Note: Runs of pieces]
Equal shards of a flat parameter give a tensor one piece in each of many files. All pieces but the
first and the last have the same length, and each is in the file after that of the piece before. So
`metadata.json` has a line for a run of pieces, not for a piece: it grows with the parameters, not
with the ranks. Offsets and checksums are in the index of each file, which a rank reads only if it
reads values from the file. In version 2 `metadata.json` had a line for each piece, with its offset
and checksums.

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
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composable_shard.layout import Bounds, Region, whole_box

CHUNK_NBYTES = 1 << 18
METADATA = "metadata.json"
LATEST = "latest"
LOCK = ".lock"
_FORMAT = "composable_shard checkpoint"
_VERSION = 3
_WITHOUT_INDEX = 2  # the version before it, which is read
_TABLE = "checksums"  # the last entry of a data file; names of pieces end with a bracket
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


class DataFile(NamedTuple):
    """One rank's file. [Note: Checkpoint directory]"""

    name: str
    nbytes: int  # 0 if the rank has written none
    # Of version 2: all 0
    header_nbytes: int
    table_nbytes: int  # of checksums, at the end of the file
    checksum: int  # of header and table

    def line(self) -> list[Any]:
        """Return its line in `metadata.json`."""
        return [*self[:-1], f"{self.checksum:08x}"]


class StoredTensor(NamedTuple):
    """One tensor of a checkpoint."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    order: tuple[int, ...] = ()  # the dims, that with the largest stride first
    lines: Sequence[Any] = ()  # of its pieces, as they are in `metadata.json`


class Metadata(NamedTuple):
    """The content of `metadata.json`."""

    step: int  # number of steps taken
    world_size: int  # number of ranks that wrote it
    chunk_nbytes: int  # bytes for each checksum
    files: tuple[DataFile, ...]  # by number
    tensors: dict[str, StoredTensor]  # by name
    tree: dict[str, Any]  # all values, encoded, with tensors by name
    has_indices: bool = True  # whether offsets and checksums are in the data files

    def num_pieces(self, name: str) -> int:
        """Return the number of a tensor's pieces."""
        lines = self.tensors[name].lines
        return sum(line[3] for line in lines) if self.has_indices else len(lines)


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

    An entry is key, dtype and number of elements. One more follows, of their chunks' checksums.
    """
    header: dict[str, Any] = {"__metadata__": {"format": _FORMAT}}
    end = 0
    num_chunks = sum(-(-numel * dtype.itemsize // CHUNK_NBYTES) for _, dtype, numel in entries)
    for key, dtype, numel in (*entries, (_TABLE, torch.uint8, 4 * num_chunks)):
        nbytes = numel * dtype.itemsize
        kind, factor = _SAFETENSORS.get(dtype, ("U8", dtype.itemsize))
        offsets = [end, end + nbytes]
        header[key] = {"dtype": kind, "shape": [numel * factor], "data_offsets": offsets}
        end += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def piece_key(name: str, region: Region) -> str:
    """Return the name of a piece in a data file."""
    return f"{name}[{region.start}:{region.end}]"


class Index:
    """Where a data file has its pieces, and their checksums.

    Args:
        file: The file.
        header: Its first bytes.
        table: Its last bytes.
        chunk_nbytes: Bytes for each checksum.
    """

    def __init__(self, file: DataFile, header: bytes, table: bytes, chunk_nbytes: int) -> None:
        if zlib.crc32(table, zlib.crc32(header)) != file.checksum:
            raise ValueError("the checksum of its index does not match")
        self._file, self._table, self._chunk_nbytes = file, table, chunk_nbytes
        self._places: dict[str, tuple[int, int, int]] = {}  # offset, bytes, first checksum
        number = 0
        for key, entry in json.loads(header[8:]).items():
            if key in ("__metadata__", _TABLE):
                continue
            low, high = map(_count, entry["data_offsets"])
            self._places[key] = file.header_nbytes + low, high - low, number
            number += -(-(high - low) // chunk_nbytes)
        if 4 * number != len(table):
            raise ValueError(f"it has {len(table) // 4} checksums for {number} chunks")

    def find(self, key: str, region: Region, itemsize: int) -> Piece:
        """Return a piece by its name."""
        if key not in self._places:
            raise ValueError(f"it has no '{key}'")
        offset, nbytes, first = self._places[key]
        end = self._file.nbytes - self._file.table_nbytes
        if nbytes != region.numel * itemsize or offset + nbytes > end:
            raise ValueError(f"'{key}' has {nbytes} bytes at {offset}")
        number = -(-nbytes // self._chunk_nbytes)
        found = struct.unpack_from(f"<{number}I", self._table, 4 * first)
        return Piece(self._file.name, offset, nbytes, region, found)


def pack_checksums(values: Sequence[int]) -> bytes:
    """Return the last entry of a data file."""
    return struct.pack(f"<{len(values)}I", *values)


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
        known = (_WITHOUT_INDEX, _VERSION)
        if content["format"] != _FORMAT or content["version"] not in known:
            raise ValueError(
                f"format {content['format']!r} version {content['version']!r}, expected "
                f"{_FORMAT!r} version {_VERSION}, or {_WITHOUT_INDEX}"
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
    has_indices = content["version"] != _WITHOUT_INDEX
    files = tuple(_parse_file(line, has_indices=has_indices) for line in content["files"])
    tensors = {name: _parse_tensor(name, entry) for name, entry in content["tensors"].items()}
    if not isinstance(content["tree"], dict):
        raise ValueError("expected a dict as tree")
    step, world_size = _count(content["step"]), _count(content["world_size"])
    tree = content["tree"]
    return Metadata(step, world_size, chunk_nbytes, files, tensors, tree, has_indices)


def _parse_file(line: Any, *, has_indices: bool) -> DataFile:
    name, nbytes, *index = line
    header_nbytes, table_nbytes, checksum = index if has_indices else (0, 0, "0")
    file = DataFile(
        _file_name(name),
        _count(nbytes),
        _count(header_nbytes),
        _count(table_nbytes),
        int(checksum, 16),
    )
    if file.header_nbytes + file.table_nbytes > file.nbytes:
        raise ValueError(f"{name} has an index of more than its {nbytes} bytes")
    return file


def _parse_tensor(name: str, entry: dict[str, Any]) -> StoredTensor:
    """Parse all but the lines of pieces, of which a rank needs few."""
    shape = torch.Size([_count(size) for size in entry["shape"]])
    order = tuple(range(len(shape)))
    if "order" in entry:
        order = tuple(_count(dim) for dim in entry["order"])
        if sorted(order) != list(range(len(shape))):
            raise ValueError(f"'{name}' has order {order}")
    return StoredTensor(name, shape, _DTYPES[entry["dtype"]], order, entry["pieces"])


# Pieces in metadata


def join_pieces(
    shape: torch.Size, pieces: Iterable[tuple[Bounds, int, int, int]]
) -> list[list[Any]]:
    """Return lines for the pieces of a tensor. [Note: Runs of pieces]

    A piece is box, start, end and number of its file. A line is number of the first file, start and
    end of the first piece, number of pieces, numbers from one file to the next, and the box unless
    it is the whole tensor.

    Example: elements [0, 4), [4, 10), [10, 16), [16, 17) of a vector in files 5 to 8 are
    `[[5, 0, 4, 1, 0], [6, 4, 10, 2, 1], [8, 16, 17, 1, 0]]`.
    """
    lines: list[list[Any]] = []
    before, every = None, whole_box(shape)
    for box, start, end, file in sorted(pieces):
        if before == (box, start) and end - start == lines[-1][2] - lines[-1][1]:
            first, _, _, number, step = lines[-1][:5]
            if number == 1 or file == first + number * step:
                lines[-1][3:5] = number + 1, (file - first) // number
                before = box, end
                continue
        own = [] if box == every else [box]
        lines.append([file, start, end, 1, 0, *own])
        before = box, end
    return lines


def split_run(
    stored: StoredTensor, line: Sequence[Any], num_files: int, target: Region
) -> Iterator[tuple[int, Region]]:
    """Yield file and region of the pieces in a line that may have elements of a target."""
    file, start, end, number, step = line[:5]
    # The metadata may be damaged or forged: all pieces must be inside the tensor and in some file.
    region = _parse_region(stored, (start, end), line[5:], _count(number))
    last = file + (number - 1) * step
    if not (0 <= file < num_files and 0 <= last < num_files and number <= num_files):
        raise IndexError(
            f"'{stored.name}' has {number} pieces in files {file} to {last} of {num_files}"
        )
    low, high, numel = 0, number, region.numel
    if not numel:
        raise ValueError(f"'{stored.name}' has a piece without elements")
    if (region.box, region.order) == (target.box, target.order):
        low = max(low, (target.start - start) // numel)
        high = min(high, -((start - target.end) // numel))
    for index in range(low, high):
        ends = start + index * numel, end + index * numel
        yield file + index * step, Region(region.box, region.order, *ends)


def parse_piece(
    stored: StoredTensor, fields: Sequence[Any], files: Sequence[DataFile], chunk_nbytes: int
) -> Piece:
    """Parse a piece of version 2."""
    number, offset, start, end, digits = fields[:5]
    region = _parse_region(stored, (start, end), fields[5:], 1)
    nbytes = region.numel * stored.dtype.itemsize
    file = files[_count(number)]
    if _count(offset) + nbytes > file.nbytes:
        raise ValueError(
            f"expected a piece of '{stored.name}' that is inside {file.name}, got one from byte "
            f"{offset} on, of {file.nbytes}"
        )
    values = tuple(int(digits[i : i + 8], 16) for i in range(0, len(digits), 8))
    if len(values) != -(-nbytes // chunk_nbytes):
        raise ValueError(
            f"expected {-(-nbytes // chunk_nbytes)} checksums for {nbytes} bytes of "
            f"'{stored.name}' in {file.name}, got {len(values)}"
        )
    return Piece(file.name, offset, nbytes, region, values)


def _parse_region(
    stored: StoredTensor, ends: tuple[Any, Any], boxes: Sequence[Any], number: int
) -> Region:
    """Return the first of equal pieces that follow each other, all inside the tensor."""
    start, end = map(_count, ends)
    shape = stored.shape
    box = whole_box(shape)
    if boxes:
        box = tuple((_count(low), _count(high)) for low, high in boxes[0])
    numel = torch.Size([high - low for low, high in box]).numel()
    fits = len(box) == len(shape) and all(
        low <= high <= size for (low, high), size in zip(box, shape, strict=False)
    )
    if not (fits and start <= end and start + number * (end - start) <= numel):
        raise ValueError(
            f"expected a piece of '{stored.name}' that is inside the tensor, got elements {start} "
            f"to {start + number * (end - start)} of {numel}"
        )
    return Region(box, stored.order, start, end)


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
