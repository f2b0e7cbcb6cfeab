"""Files of `torch.save`, whose storages are read by their offsets.

Such a file is a zip archive that is not compressed: `data.pkl` has the objects, `data/0`, `data/1`,
... have the bytes of the storages.
"""

from __future__ import annotations

import io
import os
import struct
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch

from composable_shard.layout import whole
from composable_shard.peers.pickles import Storage, read_pickle
from composable_shard.peers.tensors import PeerTensor, Span

_LOCAL_HEADER = 30  # bytes before the name
_MAX_PICKLE_NBYTES = 1 << 30


class FilePart(io.RawIOBase):
    """A part of a file, as a file; counts the bytes that are read."""

    def __init__(self, path: str, start: int = 0, nbytes: int | None = None) -> None:
        super().__init__()
        self._file = open(path, "rb")  # noqa: SIM115 -- closed by `close`
        size = os.fstat(self._file.fileno()).st_size
        self._start = start
        self.nbytes = size - start if nbytes is None else nbytes
        self._place = 0
        if self.nbytes < 0 or start + self.nbytes > size:
            self._file.close()
            raise ValueError(f"{path} is damaged: it ends at byte {size}")

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._file.close()
        super().close()

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Return the place in the part."""
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place in the part."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self.nbytes}[whence]
        self._place = max(0, base + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Read from the place on."""
        wanted = max(0, min(len(buffer), self.nbytes - self._place))
        view = memoryview(buffer).cast("B")[:wanted]
        count = os.preadv(self._file.fileno(), [view], self._start + self._place)
        self._place += count
        return count


class TorchFile:
    """The layout of one file of `torch.save`, or of one inside another file."""

    def __init__(self, path: str | os.PathLike[str], start: int = 0, nbytes: int | None = None):
        """Read the directory of the archive and the pickle, but no storage."""
        self.path = os.fspath(path)
        self._start = start
        try:
            with FilePart(self.path, start, nbytes) as file:
                self._open(file)
        except OSError as error:
            raise ValueError(f"can't read {self.path}: {error}") from error
        except (zipfile.BadZipFile, struct.error, NotImplementedError, EOFError) as error:
            raise ValueError(
                f"{self.path} is no file of torch.save, or is damaged: {error}. Files that torch "
                "1.5 and earlier wrote are read by torch.load alone: load it with "
                "weights_only=True and save it again."
            ) from error

    def _open(self, file: FilePart) -> None:
        archive = zipfile.ZipFile(file)
        found = [each for each in archive.infolist() if each.filename.endswith("/data.pkl")]
        if len(found) != 1:
            raise zipfile.BadZipFile(f"it has {len(found)} entries 'data.pkl'")
        self._prefix = found[0].filename.removesuffix("data.pkl")
        self._entries = {each.filename: each for each in archive.infolist()}
        if found[0].file_size > _MAX_PICKLE_NBYTES or found[0].compress_type:
            raise zipfile.BadZipFile("its 'data.pkl' is compressed or too large")
        order = self._prefix + "byteorder"
        if order in self._entries and archive.read(order) != sys.byteorder.encode():
            raise zipfile.BadZipFile("it was written by a machine of another byte order")
        self._pickle = archive.read(found[0])
        self._offsets: dict[str, int] = {}
        for name, entry in self._entries.items():
            if name.startswith(self._prefix + "data/"):
                self._offsets[name] = self._offset_of(file, entry)

    def _offset_of(self, file: FilePart, entry: zipfile.ZipInfo) -> int:
        """Return where an entry's bytes begin, which its local header says."""
        file.seek(entry.header_offset)
        header = file.read(_LOCAL_HEADER)
        if not header or len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
            raise zipfile.BadZipFile(f"it has no header of {entry.filename!r}")
        name_nbytes, extra_nbytes = struct.unpack("<HH", header[26:30])
        offset: int = entry.header_offset + _LOCAL_HEADER + name_nbytes + extra_nbytes
        is_stored = entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 1
        if not is_stored or offset + entry.file_size > file.nbytes:
            raise zipfile.BadZipFile(f"{entry.filename!r} is compressed or cut off")
        return offset

    def read(self) -> Any:
        """Return the objects, with tensors by their places. [Note: Restricted pickles]"""
        return read_pickle(self._pickle, self.path, self._locate)

    def _locate(self, storage: Storage) -> tuple[str, int, int]:
        name = f"{self._prefix}data/{storage.key}"
        if name not in self._offsets:
            raise ValueError(f"its storage {storage.key!r} is not there")
        nbytes = self._entries[name].file_size
        return self.path, self._start + self._offsets[name], nbytes


def is_torch_file(path: Path) -> bool:
    """Return whether a file begins as those of `torch.save` do."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"PK\x03\x04"
    except OSError:
        return False


def read_torch_file(path: Path) -> Any:
    """Return the content of a file of `torch.save`, with tensors by their places."""
    return TorchFile(path).read()


def locate_item(span: Span, dtype: torch.dtype, nbytes: int) -> int:
    """Return where the elements begin of a tensor that is a file of `torch.save` in a file."""
    found = TorchFile(span.file, span.offset, span.item_nbytes).read()
    if not isinstance(found, PeerTensor) or found.dtype != dtype or found.nbytes != nbytes:
        raise ValueError(
            f"{span.file} is damaged: expected {nbytes} bytes of {dtype} from byte {span.offset} on"
        )
    if len(found.spans) != 1 or found.spans[0].region != whole(found.shape):
        raise ValueError(f"{span.file} has a tensor from byte {span.offset} on that is not dense")
    return found.spans[0].offset


_FORMATS = {
    torch.float32: "f",
    torch.float64: "d",
    torch.int64: "q",
    torch.int32: "i",
    torch.uint8: "B",
    torch.bool: "?",
}


def read_number(tensor: PeerTensor) -> Any:
    """Return the number that a tensor of one element has."""
    code = _FORMATS.get(tensor.dtype)
    if code is None or tensor.shape.numel() != 1:
        raise ValueError(f"expected a number, got {tuple(tensor.shape)} of {tensor.dtype}")
    (span,) = tensor.spans
    with FilePart(span.file, span.offset, tensor.dtype.itemsize) as file:
        return struct.unpack("<" + code, file.read() or b"")[0]
