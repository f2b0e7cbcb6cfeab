"""Every file operation of a save, one function each; what is published survives a loss of power.

Callers use the module's attributes, so that a test can count the operations and interrupt between
any two of them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

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


def make_folder(path: Path) -> None:
    """Make a folder and its parents; one that is there stays as it is."""
    path.mkdir(parents=True, exist_ok=True)


def list_names(path: Path) -> list[str]:
    """Return the names in a folder, sorted; none where there is no such folder."""
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []


def create(path: Path) -> BinaryIO:
    """Open a file to write; one of that name is emptied."""
    return open(path, "wb", buffering=0)


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
    """Wait until the names in a folder, or what is in a file, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Give a file or folder another name in one step; a file of that name is replaced."""
    os.replace(old, new)


def remove_file(path: Path) -> None:
    """Remove a file, if it is there."""
    path.unlink(missing_ok=True)


def remove_folder(path: Path) -> None:
    """Remove an empty folder."""
    path.rmdir()
