"""Read regions of the tensors of a checkpoint: no more bytes than needed, each one verified."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from composable_shard.checkpoint.file_format import (
    LATEST,
    METADATA,
    Metadata,
    Piece,
    StoredTensor,
    parse_folder_name,
    parse_metadata,
)
from composable_shard.layout import Region, intersect, overlap, whole
from composable_shard.tensor import find_places

_BLOCK_NUMEL = 1 << 20  # elements located at a time
_MAX_LINES = 100_000


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an error of the operating system into a ValueError that names the file."""
    try:
        yield
    except OSError as error:
        reason = "it is a link, which is not followed" if error.errno == errno.ELOOP else error
        raise ValueError(f"can't read {path}: {reason}") from error


def open_to_read(path: Path) -> int:
    """Open a file and return its descriptor; a link or a pipe is refused.

    Raises:
        OSError: If it can't be opened, or is no regular file.
    """
    # Without waiting: to open a pipe would take until somebody writes into it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return descriptor


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, which must be no link.

    Raises:
        OSError: As `open_to_read`.
    """
    with os.fdopen(open_to_read(path), "rb") as file:
        return file.read()


def byte_view(tensor: Tensor) -> memoryview:
    """Return the memory of a dense CPU tensor; the tensor must outlive it."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


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


def find_checkpoint(path: str | os.PathLike[str], step: int | None = None) -> Path | None:
    """Return the directory that `load_checkpoint` would read, or None if there is none.

    Reads names only; no communication.

    Args:
        path: The directory given to `save_checkpoint`, or one checkpoint in it.
        step: Which checkpoint. Default: the one published last, or the one of the highest step if
            the file `latest` is missing.

    Raises:
        ValueError: If the file `latest` does not name a checkpoint.
    """
    folder = Path(path)
    if step is None and (folder / METADATA).is_file():
        return folder
    complete = list_checkpoints(folder)
    if step is not None:
        return next((each for number, _, each in reversed(complete) if number == step), None)
    for name in list(read_history(folder))[:1]:
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


class CheckpointReader:
    """One checkpoint's tensors.

    Attributes:
        folder: Its directory.
        metadata: Its content.
        nbytes_read: Bytes read from data files so far.
    """

    def __init__(self, folder: Path, metadata_text: bytes | None = None) -> None:
        """Read the metadata, unless the caller has done so.

        Raises:
            ValueError: If it is missing or damaged, naming the file.
        """
        self.folder = folder
        self.nbytes_read = 0
        self._files: dict[str, tuple[Path, int]] = {}
        path = folder / METADATA
        if metadata_text is None:
            with reading(path):
                metadata_text = read_bytes(path)
        self.metadata: Metadata = parse_metadata(metadata_text, str(path))

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        while self._files:
            os.close(self._files.popitem()[1][1])

    def check_files(self) -> None:
        """Check that all data files exist and have the right length.

        Raises:
            ValueError: Naming the file.
        """
        for name, nbytes in self.metadata.files.items():
            path = self.folder / name
            with reading(path), os.fdopen(open_to_read(path), "rb") as file:
                found = os.fstat(file.fileno()).st_size
            if found != nbytes:
                raise ValueError(f"{path} is damaged: expected {nbytes} bytes, found {found}")

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Read some elements of a tensor into host memory.

        Args:
            name: The tensor.
            region: Its elements to read. Default: all, row by row.

        Returns:
            Shape `(region.numel,)`, in the stored dtype.

        Raises:
            ValueError: If a file is missing, truncated or damaged, naming it, or if elements are
                in no piece.
        """
        stored = self.metadata.tensors.get(name)
        if stored is None:
            raise ValueError(f"{self.folder} has no tensor '{name}'")
        region = whole(stored.shape) if region is None else region
        output = torch.empty(region.numel, dtype=stored.dtype)
        num_found = sum(self._read_piece(stored, piece, region, output) for piece in stored.pieces)
        if num_found < region.numel:
            raise ValueError(
                f"{self.folder / METADATA} is damaged: {region.numel - num_found} elements of "
                f"'{name}' are in no file"
            )
        return output

    def read_whole(self, name: str) -> Tensor:
        """Read all of a tensor, in its shape."""
        return self.read(name).view(self.metadata.tensors[name].shape)

    def _read_piece(
        self, stored: StoredTensor, piece: Piece, target: Region, output: Tensor
    ) -> int:
        """Read the elements of the target that are in a piece; return their number."""
        itemsize = stored.dtype.itemsize
        common = overlap(target, piece.region)
        if common is not None:
            if common.numel:
                part = output[common.target_start :][: common.numel]
                self._read_bytes(piece, common.source_start * itemsize, byte_view(part))
            return common.numel
        num_found = 0
        for start in range(0, target.numel, _BLOCK_NUMEL):
            end = min(start + _BLOCK_NUMEL, target.numel)
            places, sources = find_places(target, piece.region, start, end)
            if len(places):
                output[places] = self._read_scattered(stored, piece, sources)
                num_found += len(places)
        return num_found

    def _read_scattered(self, stored: StoredTensor, piece: Piece, sources: Tensor) -> Tensor:
        """Read the chunks that hold some elements of a piece; return these elements."""
        chunk_numel = self.metadata.chunk_nbytes // stored.dtype.itemsize
        values = torch.empty(len(sources), dtype=stored.dtype)
        numbers = sources // chunk_numel
        for number in numbers.unique().tolist():
            is_in = numbers == number
            start = number * chunk_numel
            numel = min(chunk_numel, piece.region.numel - start)
            chunk = torch.empty(numel, dtype=stored.dtype)
            self._read_bytes(piece, start * stored.dtype.itemsize, byte_view(chunk))
            values[is_in] = chunk[sources[is_in] - start]
        return values

    def _read_bytes(self, piece: Piece, start: int, output: memoryview) -> None:
        """Read bytes of a piece, chunk by chunk; whole chunks go straight into the output."""
        chunk_nbytes = self.metadata.chunk_nbytes
        nbytes = len(output)
        for number in range(start // chunk_nbytes, -(-(start + nbytes) // chunk_nbytes)):
            low = number * chunk_nbytes
            high = min(low + chunk_nbytes, piece.nbytes)
            from_, to = intersect((low, high), (start, start + nbytes))
            part = output[from_ - start : to - start]
            if len(part) == high - low:
                self._read_chunk(piece, number, low, part)
            else:
                chunk = memoryview(bytearray(high - low))
                self._read_chunk(piece, number, low, chunk)
                part[:] = chunk[from_ - low : to - low]

    def _open(self, name: str) -> tuple[Path, int]:
        """Return a data file's path and descriptor."""
        found = self._files.get(name)
        if found is None:
            path = self.folder / name
            with reading(path):
                found = self._files[name] = path, open_to_read(path)
        return found

    def _read_chunk(self, piece: Piece, number: int, start: int, output: memoryview) -> None:
        """Read a whole chunk and verify it."""
        path, descriptor = self._open(piece.file)
        position = piece.offset + start
        filled = 0
        with reading(path):
            while filled < len(output):
                count = os.preadv(descriptor, [output[filled:]], position + filled)
                if not count:
                    break
                filled += count
        self.nbytes_read += filled
        if filled < len(output):
            raise ValueError(f"{path} is damaged: it ends at byte {position + filled}")
        if zlib.crc32(output) != piece.checksums[number]:
            raise ValueError(
                f"{path} is damaged: bytes {position} to {position + len(output)} do not match "
                "their checksum"
            )
