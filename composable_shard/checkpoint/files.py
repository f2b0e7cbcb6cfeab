"""Every file operation of a save, one function each.

Callers use the module's attributes, so that a test can count the operations and interrupt a save
between any two of them. None of them writes or removes anything through a link.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

# Every operation on files: tests let each of them fail, and kill ranks between them.
__all__ = [
    "close",
    "create",
    "list_names",
    "make_folder",
    "remove_file",
    "remove_folder",
    "rename",
    "sync",
    "sync_path",
    "write",
]


def make_folder(path: Path, *, is_new: bool = False) -> None:
    """Make a folder and its parents; one that exists is an error only if it should be new."""
    path.mkdir(parents=True, exist_ok=not is_new)


def is_folder(path: Path) -> bool:
    """Return whether this is a folder, and no link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def list_names(path: Path) -> list[str]:
    """Return the sorted names in a folder, none if it does not exist."""
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []


def create(path: Path) -> BinaryIO:
    """Make a file, which must not exist, and open it to write."""
    return open(path, "xb", buffering=0)


def write(file: BinaryIO, data: bytes | memoryview) -> None:
    """Append all of `data`."""
    view = memoryview(data).cast("B")
    while view:
        view = view[file.write(view) :]


def sync(file: BinaryIO) -> None:
    """Wait until the file's content is on the disk."""
    os.fsync(file.fileno())


def close(file: BinaryIO) -> None:
    """Close a file."""
    file.close()


def sync_path(path: Path) -> None:
    """Wait until a folder's names, or a file's content, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Rename a file or folder atomically; an existing file of the new name is replaced."""
    os.replace(old, new)


def remove_file(path: Path) -> None:
    """Remove a file or a link, if it exists."""
    path.unlink(missing_ok=True)


def remove_folder(path: Path) -> None:
    """Remove an empty folder."""
    path.rmdir()
