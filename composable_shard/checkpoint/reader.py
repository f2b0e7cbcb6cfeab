"""Read regions of the tensors of a checkpoint: no more bytes than needed, each one verified.

[Note: Two passes]
A load that kept everything until all of it is verified would need memory for a second copy of this
rank's part of the run. So the first pass verifies all bytes and keeps only values without memory in
the run (the state of an optimizer that has taken no step). When all ranks agree that everything
fits, a second pass reads the other values into their places, from the same open files, and verifies
them again. A load can stop in the middle only if a file can't be read a second time. Of more than
`_MAX_FILES` some are opened again. A model or optimizer that runs its own code in a load must see
all values, so the first pass keeps them.
"""

from __future__ import annotations

import errno
import hashlib
import operator
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import Self

from composable_shard.checkpoint.file_format import (
    LATEST,
    METADATA,
    DataFile,
    Index,
    Metadata,
    Piece,
    StoredTensor,
    byte_view,
    checksums,
    parse_folder_name,
    parse_metadata,
    parse_piece,
    piece_key,
    split_run,
)
from composable_shard.comm import HOST
from composable_shard.layout import Region, intersect, overlap, whole
from composable_shard.tensor import FlatShard, find_places, region_of

_BLOCK_NUMEL = 1 << 20  # elements moved to another dtype or device at a time
_READ_NBYTES = 1 << 20  # read and verified at a time, while a cache of the processor has them
_MAX_LINES = 100_000
_MAX_FILES = 512  # open at a time: a process may often have 1024, and more ranks have written


# What damaged or forged content raises.
PARSE_ERRORS = (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an error of the operating system into a ValueError that names the file."""
    try:
        yield
    except OSError as error:
        reason = "it is a link, which is not followed" if error.errno == errno.ELOOP else error
        raise ValueError(f"can't read {path}: {reason}") from error


def open_to_read(path: Path) -> int:
    """Open a file and return its descriptor; a link or a pipe is refused."""
    # Without waiting: to open a pipe would take until somebody writes into it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return descriptor


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, which must be no link."""
    with os.fdopen(open_to_read(path), "rb") as file:
        return file.read()


def list_checkpoints(path: Path) -> list[tuple[int, int, Path]]:
    """Return step, attempt and directory of each complete checkpoint in `path`, in that order."""
    try:
        names = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(parse_folder_name(name), path / name) for name in names]
    return sorted(
        (*numbers, folder)
        for numbers, folder in found
        if numbers is not None and (folder / METADATA).is_file()
    )


def has_checkpoints(path: Path) -> bool:
    """Return whether a directory is a checkpoint of this package, or has any."""
    return (path / METADATA).is_file() or bool(list_checkpoints(path))


def find_checkpoint(path: str | os.PathLike[str], step: int | None = None) -> Path | None:
    """Return the directory that `load_checkpoint` would read, or None if there is none.

    Reads names only; no communication.

    Args:
        path: The directory given to `save_checkpoint`, or one checkpoint in it.
        step: Which checkpoint. Default: the one published last that is there, or the one of the
            highest step if the file `latest` is missing.

    Raises:
        ValueError: If the file `latest` has lines that name no checkpoint.
    """
    folder = Path(path)
    if step is None and (folder / METADATA).is_file():
        return folder
    complete = list_checkpoints(folder)
    if step is not None:
        return next((each for number, _, each in reversed(complete) if number == step), None)
    # Before the highest step: a run that went back to an earlier one publishes lower steps later.
    for name in read_history(folder):
        if parse_folder_name(name) is None:
            raise ValueError(f"{folder / LATEST} is damaged: {name!r} is no name of a checkpoint")
        if (folder / name / METADATA).is_file():
            return folder / name
    return complete[-1][2] if complete else None


def read_history(folder: Path) -> dict[str, str]:
    """Return the run that wrote each checkpoint in a directory, by name, the newest first.

    "" stands for an unknown run, as for all if the file `latest` is missing or damaged.
    """
    try:
        lines = read_bytes(folder / LATEST).decode(errors="replace").splitlines()
    except OSError:
        return {}
    pairs = [line.partition(" ") for line in lines[:_MAX_LINES]]
    return {name: run for name, _, run in pairs}


class TensorReader:
    """Named tensors in files, read by regions; a context manager."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self.folder = folder
        self.metadata = metadata
        self.nbytes_read = 0  # bytes read from data files so far

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        raise NotImplementedError

    def check_files(self, rank: int = 0, num_ranks: int = 1) -> None:
        """Check that a rank's share of the data files exist, and have the right length."""
        raise NotImplementedError

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Read elements, by default all row by row, into host memory; shape `(region.numel,)`.

        A file that is missing, truncated or damaged is an error that names it.
        """
        region = whole(self._find(name).shape) if region is None else region
        output = torch.empty(region.numel, dtype=self._find(name).dtype, device=HOST)
        self._read_region(name, region, output)
        return output

    def read_like(self, name: str, target: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Read this rank's part of a tensor, as a CPU tensor of the target's kind and dtype."""
        return shaped_like(self.read(name, region_of(target)).to(dtype or target.dtype), target)

    def read_whole(self, name: str) -> Tensor:
        """Read all of a tensor, in its shape."""
        return self.read(name).view(self.metadata.tensors[name].shape)

    def verify(self, name: str, region: Region) -> None:
        """Verify the bytes that `read` would read, without keeping them."""
        self._read_region(name, region, None)

    def read_into(self, name: str, place: Tensor) -> None:
        """Read this rank's elements into a tensor of any kind, dtype and device.

        If that fails, some elements may have been written.
        """
        region = region_of(place)
        local = place._local if isinstance(place, FlatShard) else place
        local = (local.to_local() if isinstance(local, DTensor) else local).detach()
        if not local.is_contiguous() or local.is_conj() or local.is_neg():
            local.copy_(self.read(name, region).view(local.shape))
        elif local.is_cpu and local.dtype == self._find(name).dtype:
            self._read_region(name, region, local.view(-1))
        else:
            parts = local.view(-1).split(_BLOCK_NUMEL)
            for number, part in enumerate(parts):
                start = region.start + number * _BLOCK_NUMEL
                part.copy_(self.read(name, region._replace(start=start, end=start + len(part))))

    def _find(self, name: str) -> StoredTensor:
        if (stored := self.metadata.tensors.get(name)) is None:
            raise ValueError(f"{self.folder} has no tensor '{name}'")
        return stored

    def _read_region(self, name: str, target: Region, output: Tensor | None) -> None:
        """Read and verify elements; without an output, verify only."""
        raise NotImplementedError


class CheckpointReader(TensorReader):
    """One checkpoint's tensors."""

    def __init__(self, folder: Path, digest: str | None = None) -> None:
        """Read the metadata.

        Args:
            digest: That of rank 0's metadata. Default: any will do.
        """
        self._files: dict[str, int] = {}  # descriptors by name
        self._indices: dict[DataFile, Index] = {}
        self._pieces: dict[str, list[Piece]] = {}  # of tensors of version 2
        self._buffer = bytearray()
        path = folder / METADATA
        with reading(path):
            text = read_bytes(path)
        if digest is not None and digest_of(text) != digest:
            raise ValueError(
                f"{path} is another file on this rank than on rank 0: give all ranks the same files"
            )
        super().__init__(folder, parse_metadata(text, str(path)))

    def __exit__(self, *_: object) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def check_files(self, rank: int = 0, num_ranks: int = 1) -> None:
        """Check that a rank's share of the data files exist, and have the right length."""
        for name, nbytes, *_ in self.metadata.files[rank::num_ranks]:
            if not nbytes:
                continue
            path = self.folder / name
            with reading(path), os.fdopen(open_to_read(path), "rb") as file:
                found = os.fstat(file.fileno()).st_size
            if found != nbytes:
                raise ValueError(f"{path} is damaged: expected {nbytes} bytes, found {found}")

    @property
    def indexed_files(self) -> list[DataFile]:
        """Data files whose index has been read."""
        return list(self._indices)

    def pieces_of(self, name: str, target: Region) -> Iterator[Piece]:
        """Yield the pieces of a tensor that may have elements of a region."""
        stored, files = self._find(name), self.metadata.files
        if not self.metadata.has_indices:
            if name not in self._pieces:
                chunk_nbytes = self.metadata.chunk_nbytes
                with self._parsing(METADATA):
                    self._pieces[name] = [
                        parse_piece(stored, fields, files, chunk_nbytes) for fields in stored.lines
                    ]
            yield from self._pieces[name] if target.numel else ()
            return
        if not target.numel:
            return
        extent = _extent_of(target)
        with self._parsing(METADATA):
            found = [
                (files[number], region)
                for line in stored.lines
                for number, region in split_run(stored, line, len(files), target)
                # Of a file that has none of the elements not even the index is read.
                if _may_share(extent, _extent_of(region))
            ]
        for file, region in found:
            yield self._find_piece(stored, file, region)

    def _find_piece(self, stored: StoredTensor, file: DataFile, region: Region) -> Piece:
        with self._parsing(file.name):
            key = piece_key(stored.name, region)
            return self._index(file).find(key, region, stored.dtype.itemsize)

    def _index(self, file: DataFile) -> Index:
        """Return what a data file says about its pieces; read once."""
        if file not in self._indices:
            header, table = bytearray(file.header_nbytes), bytearray(file.table_nbytes)
            self._read(file.name, 0, memoryview(header))
            self._read(file.name, file.nbytes - len(table), memoryview(table))
            index = Index(file, bytes(header), bytes(table), self.metadata.chunk_nbytes)
            self._indices[file] = index
        return self._indices[file]

    def _read(self, name: str, position: int, output: memoryview) -> None:
        """Read bytes of a data file."""
        path = self.folder / name
        filled = 0
        with reading(path):
            if name not in self._files:
                if len(self._files) == _MAX_FILES:
                    os.close(self._files.pop(next(iter(self._files))))
                self._files[name] = open_to_read(path)
            while filled < len(output):
                count = os.preadv(self._files[name], [output[filled:]], position + filled)
                if not count:
                    break
                filled += count
        if filled < len(output):
            raise ValueError(f"{path} is damaged: it ends at byte {position + filled}")

    @contextmanager
    def _parsing(self, name: str) -> Iterator[None]:
        """Name a file if its content is none that a save has written."""
        try:
            yield
        except PARSE_ERRORS as error:
            path = self.folder / name
            if isinstance(error, ValueError) and str(path) in str(error):
                raise
            reason = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise ValueError(f"{path} is damaged: {reason}") from error

    def _read_region(self, name: str, target: Region, output: Tensor | None) -> None:
        stored = self._find(name)
        pieces = self.pieces_of(name, target)
        num_found = sum(self._read_piece(stored, piece, target, output) for piece in pieces)
        if num_found < target.numel:
            raise ValueError(
                f"{self.folder / METADATA} is damaged: {target.numel - num_found} elements of "
                f"'{name}' are in no file"
            )

    def _read_piece(
        self, stored: StoredTensor, piece: Piece, target: Region, output: Tensor | None
    ) -> int:
        """Read the elements of the target that are in a piece; return their number."""
        itemsize = stored.dtype.itemsize
        # One run of bytes first: it goes into the output without a copy. Without an output the same
        # bytes are read, for their checksums.
        common = overlap(target, piece.region)
        if common is not None:
            if common.numel:
                first = common.source_start * itemsize
                ends = first, first + common.numel * itemsize
                part = None
                if output is not None:
                    part = byte_view(output[common.target_start :][: common.numel])
                self._read_bytes(piece, ends, part)
            return common.numel
        # Chunk by chunk of the piece: each is read once, whatever the orders in memory.
        num_found, step = 0, self.metadata.chunk_nbytes // itemsize
        for start in range(*_covering_range(piece.region, target, step), step):
            end = min(start + step, piece.region.numel)
            sources, places = find_places(piece.region, target, start, end)
            if len(places):
                values = torch.empty(end - start, dtype=stored.dtype, device=HOST)
                self._read_bytes(piece, (start * itemsize, end * itemsize), byte_view(values))
                if output is not None:
                    output[places] = values[sources - start]
                num_found += len(places)
        return num_found

    def _read_bytes(self, piece: Piece, ends: tuple[int, int], output: memoryview | None) -> None:
        """Read bytes of a piece, some chunks at a time; whole ones go straight into the output."""
        chunk_nbytes = self.metadata.chunk_nbytes
        step = max(1, _READ_NBYTES // chunk_nbytes)
        stop = -(-ends[1] // chunk_nbytes)
        for number in range(ends[0] // chunk_nbytes, stop, step):
            low = number * chunk_nbytes
            high = min(min(number + step, stop) * chunk_nbytes, piece.nbytes)
            from_, to = intersect((low, high), ends)
            part = None if output is None else output[from_ - ends[0] : to - ends[0]]
            if part is not None and len(part) == high - low:
                self._read_chunks(piece, number, part)
                continue
            if len(self._buffer) < high - low:
                self._buffer = bytearray(high - low)
            chunks = memoryview(self._buffer)[: high - low]
            self._read_chunks(piece, number, chunks)
            if part is not None:
                part[:] = chunks[from_ - low : to - low]

    def _read_chunks(self, piece: Piece, number: int, output: memoryview) -> None:
        """Read consecutive whole chunks, starting at chunk `number`, and verify them."""
        path = self.folder / piece.file
        chunk_nbytes = self.metadata.chunk_nbytes
        position = piece.offset + number * chunk_nbytes
        self._read(piece.file, position, output)
        self.nbytes_read += len(output)
        # After the length: the checksums of memory that no read has filled would blame other bytes.
        found = checksums(output, chunk_nbytes)
        saved = piece.checksums[number : number + len(found)]
        for index, is_same in enumerate(map(operator.eq, found, saved)):
            if not is_same:
                first = position + index * chunk_nbytes
                end = min(first + chunk_nbytes, position + len(output))
                raise ValueError(
                    f"{path} is damaged: bytes {first} to {end} do not match their checksum"
                )


def _extent_of(region: Region) -> list[tuple[int, int]]:
    """Return the smallest box of indices, by dim, with all elements of a region that has some."""
    return [(rows.start, rows.stop) for rows in region.covering_rows()[0]]


def _covering_range(source: Region, target: Region, step: int) -> tuple[int, int]:
    """Return a range of the elements of a source that holds all of a target that are in it.

    Both are counted from the source's first element; it begins at a multiple of `step`.
    """
    extent, first, last = _extent_of(target), 0, 0
    for dim in source.order:
        low, high = source.box[dim]
        start, end = intersect(extent[dim], (low, high))
        if start == end:
            return 0, 0
        first, last = (
            n * (high - low) + each for n, each in ((first, start - low), (last, end - 1 - low))
        )
    first, last = max(0, first - source.start), min(source.numel, last + 1 - source.start)
    return first // step * step, last


def _may_share(extent: list[tuple[int, int]], other: list[tuple[int, int]]) -> bool:
    """Return whether two boxes of indices have an element in common."""
    common = [intersect(*pair) for pair in zip(extent, other, strict=True)]
    return all(start < end for start, end in common)


def digest_of(text: bytes) -> str:
    """Return a text by which ranks find out that they read the same metadata."""
    return hashlib.sha256(text).hexdigest()


def shaped_like(values: Tensor, target: Tensor) -> Tensor:
    """Return the elements of `region_of(target)`, 1-D, as a tensor of the target's kind."""
    if isinstance(target, FlatShard):
        return FlatShard(values, target._shard_spec)
    if isinstance(target, DTensor):
        return DTensor.from_local(
            values.view(target.to_local().shape).to(target.device_mesh.device_type),
            target.device_mesh,
            target.placements,
            run_check=False,
            shape=target.shape,
            stride=torch.empty(target.shape, device="meta").stride(),
        )
    return values if values.shape == target.shape else values.view(target.shape)
