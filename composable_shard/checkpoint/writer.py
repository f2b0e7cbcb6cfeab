"""Write a checkpoint directory, split between the ranks, completely or not at all.

[Note: One save]
Unless a plan is kept, [Note: Kept plans], rank 0 gathers every rank's list of tensor regions and
assigns each region to one rank. A replicated shard goes to the replica with the least to write. A
plain tensor goes to the lowest rank that holds it, because its values may differ between ranks
(buffers). Then
1. rank 0 locks the run's directory, and makes one in it under a temporary name;
2. every rank writes its file there, and reports its length and a checksum of its index;
3. rank 0 writes the metadata, renames the directory, and replaces the file `latest`;
4. rank 0 renames old checkpoints of the same run, every rank removes its own file of them, and rank
   0 the rest; it unlocks.
The kernel unlocks if the process dies. Each file, and each directory in which a name changes, is on
disk before the next step. An error on any rank is raised on all ranks; the temporary directory is
removed then, and nothing else has changed.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import time
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from composable_shard.checkpoint import files
from composable_shard.checkpoint.draft import (
    Description,
    Draft,
    Item,
    SaveArguments,
    check_copies,
    make_draft,
    merge_trees,
    share_pieces,
)
from composable_shard.checkpoint.file_format import (
    CHUNK_NBYTES,
    LATEST,
    LOCK,
    METADATA,
    DataFile,
    byte_view,
    checksums,
    data_file_name,
    folder_name,
    make_header,
    pack_checksums,
    parse_folder_name,
    piece_key,
    temporary_name,
    write_metadata,
)
from composable_shard.checkpoint.reader import list_checkpoints, read_history
from composable_shard.comm import HostGroup, Messages
from composable_shard.tensor import local_part

LOCK_TIMEOUT_S = 300.0
_LOCK_INTERVAL_S = 0.02
_HOLDER_NBYTES = 200  # of the text that names the job with the lock
_BUFFER_NBYTES = 16 * CHUNK_NBYTES  # bytes copied from a device at a time
_WRITE_NBYTES = 4 * CHUNK_NBYTES  # written and summed while they are in the processor's cache


@dataclass
class SavePlan:
    """The part of a checkpoint that this rank writes."""

    step: int  # number of steps taken
    items: list[Item]  # this rank's pieces
    path: Path  # the directory of all checkpoints: rank 0's, which may work in another directory
    run: str  # the name of the run that saves
    # On rank 0, the metadata's `tree` and `tensors`
    content: dict[str, Any] = field(default_factory=dict)


@dataclass
class KeptPlan:
    """What a save keeps of its plan for the next one. [Note: Kept plans]"""

    name: str  # the same on all ranks; empty: not kept
    layout: str  # of the description that it was made for
    path: Path
    chosen: list[int]  # numbers of this rank's items to write
    tensors: dict[str, Any]  # on rank 0, the metadata's

    def is_for(self, own: Description, *, is_first: bool) -> bool:
        """Return whether this rank holds what it was made for."""
        # Rank 0's working directory counts.
        moved = is_first and self.path != Path(own.given["path"]).absolute()
        return self.layout == own.layout and not moved


def plan_save(
    group: HostGroup,
    arguments: SaveArguments,
    describe: Callable[[], tuple[dict[str, Any], list[Item]]],
) -> SavePlan:
    """Assign every region to one rank; writes nothing. [Note: One save]

    A comparison of digests and errors. Unless an earlier plan is kept, [Note: Kept plans], also a
    gather of what ranks hold, [Note: Descriptions], and a scatter; one gather and one scatter more
    for names that ranks have in common without sharing the tensor. [Note: Owners]

    Args:
        describe: Returns all values, encoded, and this rank's items. Its error is raised on all
            ranks. Where ranks have different values, the lowest rank's are saved.

    Raises:
        ValueError: On all ranks, if ranks disagree about an argument or a tensor, or if they do not
            hold all of its elements, or hold different ones under one name.
    """
    kept: KeptPlan | None = group.swap_plan(None)
    told: list[Description] = []

    def tell() -> list[str]:
        told.append(Description.of(asdict(arguments), *describe()))
        is_for_this = kept is not None and kept.is_for(told[0], is_first=group.is_first)
        return [told[0].digest, kept.name if kept is not None and is_for_this else ""]

    firsts, is_kept = group.join_made(tell, _compare_plans)
    (own,) = told
    if kept is not None and is_kept:
        plan, tree = kept, merge_trees([own.tree]) if group.is_first else {}
    else:
        plan, tree = _plan_anew(group, own, is_whole=group.rank in firsts)
    if plan.name:
        group.swap_plan(plan)
    items = [own.items[index] for index in plan.chosen]
    # Wide dtypes first: each piece is aligned in the file.
    items.sort(key=lambda item: -item.values.dtype.itemsize)
    content = {"tree": tree, "tensors": plan.tensors}
    return SavePlan(arguments.step, items, plan.path, group.run, content)


def _compare_plans(told: Messages) -> tuple[list[int], bool]:
    """Return the lowest rank with each digest, and whether all ranks name one kept plan.

    [Note: Kept plans]
    Which rank writes what depends only on what the ranks hold, which seldom changes between two
    saves. So ranks keep a plan, with rank 0's entries of the metadata. A rank that holds what it
    held then names that plan again; if all do, and have the same values beside the tensors, nothing
    is gathered. A plan is not kept if elements of copies were compared for it, [Note: Owners]: they
    may have become different.
    """
    firsts: dict[str, int] = {}
    for (digest, _), ranks in told:
        firsts[digest] = min(ranks[0], firsts.get(digest, ranks[0]))
    return sorted(firsts.values()), len(told) == 1 and bool(told[0][0][1])


def _plan_anew(
    group: HostGroup, own: Description, *, is_whole: bool
) -> tuple[KeptPlan, dict[str, Any]]:
    """Return the plan of what all ranks hold, and on rank 0 the values of all ranks."""
    gathered = group.gather(own.message(is_whole=is_whole))
    draft = Draft({}, {}, group.size)

    def assign(samples: list[dict[str, Any]]) -> list[list[int]]:
        check_copies(draft, samples)
        return share_pieces(draft)

    def begin() -> list[Any]:
        nonlocal draft
        draft = make_draft(gathered)
        name = "" if draft.copies else uuid.uuid4().hex
        common = [name, str(Path(own.given["path"]).absolute()), list(draft.copies)]
        return [[*common, each] for each in ([[]] * group.size if draft.copies else assign([]))]

    name, folder, copies, chosen = group.scatter(begin)
    if copies:
        wanted, items = set(copies), own.items
        samples = group.gather({item.name: item.sample for item in items if item.name in wanted})
        chosen = group.scatter(lambda: assign(samples))
    return KeptPlan(name, own.layout, Path(folder), chosen, draft.tensors), draft.tree


def write_checkpoint(
    group: HostGroup, plan: SavePlan, keep_last: int | None, error: Exception | None
) -> Path:
    """Write and publish; return the directory. [Note: One save]

    An earlier error of a rank is raised on all of them instead.
    """
    group.agree(error)
    lock = _Lock(plan.path)
    try:
        name: str = group.on_first(lambda: _prepare(plan.path, plan.step, lock))
        return _write(group, name, plan, keep_last)
    finally:
        lock.release()


def _write(group: HostGroup, name: str, plan: SavePlan, keep_last: int | None) -> Path:
    path = plan.path
    folder = path / temporary_name(name)
    try:
        file = folder / data_file_name(group.rank, group.size)
        with group.agreed():
            line = _write_data(file, plan.items)
        lines = group.gather(line)
        group.on_first(lambda: _publish(path, name, plan, lines, group.size))
    except BaseException:
        # Also if the connection to another rank is lost.
        if group.is_first:
            with suppress(OSError):
                _remove(folder)
        raise
    if keep_last is not None:
        _remove_old(group, path, name, keep_last)
    return path / name


class _Lock:
    """At most one save writes into a directory, whatever the job."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def release(self) -> None:
        """Unlock, if this is the rank that locked."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def acquire(self) -> None:
        """Wait for the save of another job, then lock."""
        files.make_folder(self._path)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = descriptor = os.open(self._path / LOCK, flags, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise RuntimeError(f"{self._path / LOCK} is not a regular file: remove it")
        try:
            self._wait(descriptor)
        except OSError as error:
            warnings.warn(
                f"the file system of {self._path} has no locks ({error}): see that no other job "
                "saves there at the same time",
                stacklevel=2,
            )
            return
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _wait(self, descriptor: int) -> None:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    other = os.pread(descriptor, _HOLDER_NBYTES, 0).decode(errors="replace")
                    raise RuntimeError(
                        f"{self._path} has been locked for {LOCK_TIMEOUT_S} s by the save of "
                        f"another job, {other.strip()}. Give each run a directory of its own."
                    ) from None
                time.sleep(_LOCK_INTERVAL_S)
            else:
                return


def _prepare(path: Path, step: int, lock: _Lock) -> str:
    """Lock, remove leftovers of interrupted saves, make a directory; return its final name."""
    lock.acquire()
    if files.is_folder(path / LATEST):
        raise RuntimeError(
            f"{path / LATEST} is a directory, where a file names the newest checkpoint: remove it"
        )
    names = files.list_names(path)
    for name in names:
        if name.startswith(temporary_name("")) and parse_folder_name(name[len(".tmp_") :]):
            _remove(path / name)
    attempts = [
        numbers[1] for numbers in map(parse_folder_name, names) if numbers and numbers[0] == step
    ]
    name = folder_name(step, max(attempts, default=-1) + 1)
    if parse_folder_name(name) is None:
        raise RuntimeError(f"{path} has no name left for step {step}: remove some of {name[:13]}")
    files.make_folder(path / temporary_name(name), is_new=True)
    return name


def _write_data(path: Path, items: list[Item]) -> list[Any]:
    """Write this rank's file; return its line in the metadata."""
    if not items:
        return DataFile(path.name, 0, 0, 0, 0).line()
    header = make_header(
        [(piece_key(i.name, i.region), i.values.dtype, i.region.numel) for i in items]
    )
    nbytes, found = len(header), list[int]()
    with _created(path) as file:
        files.write(file, header)
        for item in items:
            values = local_part(item.values)
            found += _write_values(file, values)
            nbytes += values.nbytes
        table = pack_checksums(found)
        files.write(file, table)
    checksum = zlib.crc32(table, zlib.crc32(header))
    return DataFile(path.name, nbytes + len(table), len(header), len(table), checksum).line()


@contextmanager
def _created(path: Path) -> Iterator[BinaryIO]:
    """Open a new file, which is on disk when the body has succeeded; errors name it."""
    try:
        file = files.create(path)
        try:
            yield file
            files.sync(file)
        finally:
            files.close(file)
    except Exception as failure:
        reason = f"{type(failure).__name__}: {failure}"
        raise RuntimeError(f"can't write {path}: {reason}") from failure


def _write_values(file: BinaryIO, values: Tensor) -> list[int]:
    """Write a piece; return the checksums of its chunks."""
    found: list[int] = []
    step = _BUFFER_NBYTES // values.dtype.itemsize
    for start in range(0, values.numel(), step):
        part = values[start : start + step].cpu()
        data = byte_view(part)
        for low in range(0, len(data), _WRITE_NBYTES):
            files.write(file, data[low : low + _WRITE_NBYTES])
            found += checksums(data[low : low + _WRITE_NBYTES])
    return found


def _publish(
    path: Path, name: str, plan: SavePlan, file_lines: list[list[Any]], world_size: int
) -> None:
    """Write the metadata, rename the directory, and point `latest` to it."""
    metadata = {
        "step": plan.step,
        "world_size": world_size,
        "chunk_nbytes": CHUNK_NBYTES,
        "files": file_lines,
        **plan.content,
    }
    folder = path / temporary_name(name)
    with _created(folder / METADATA) as file:
        files.write(file, write_metadata(metadata))
    files.sync_path(folder)
    files.rename(folder, path / name)
    pointer = path / temporary_name(LATEST)
    try:
        files.sync_path(path)
        if os.path.lexists(pointer):
            _remove(pointer)
        # An entry of this name belongs to a removed checkpoint, perhaps of another run.
        earlier = read_history(path).items()
        known = [each for each in earlier if each[0] != name and (path / each[0]).is_dir()]
        lines = [f"{each} {run}\n" for each, run in [(name, plan.run), *known]]
        with _created(pointer) as file:
            files.write(file, "".join(lines).encode())
        files.rename(pointer, path / LATEST)
        files.sync_path(path)
    except BaseException:
        # A save that raises leaves nothing behind.
        with suppress(OSError):
            files.rename(path / name, folder)
            files.remove_file(pointer)
        raise


def _remove(path: Path) -> None:
    """Remove a file, a link, or a directory with all that is in it."""
    if not files.is_folder(path):
        files.remove_file(path)
        return
    for name in files.list_names(path):
        _remove(path / name)
    files.remove_folder(path)


def _remove_old(group: HostGroup, path: Path, published: str, keep_last: int) -> None:
    """Keep the published checkpoint and the last ones of its run before it; remove the others.

    Each rank removes its own file, because removing takes a third of the time of writing.
    """
    hidden: list[str] = group.on_first(lambda: _hide_old(path, published, keep_last))
    if not hidden:
        return
    own = data_file_name(group.rank, group.size)
    for name in hidden:
        with suppress(OSError):  # rank 0 tries again
            if files.is_folder(path / name):  # and no link to one
                files.remove_file(path / name / own)
    group.gather(None)  # a later save may use these names when rank 0 has unlocked
    if group.is_first:
        with _warned():
            for name in hidden:
                _remove(path / name)


def _hide_old(path: Path, published: str, keep_last: int) -> list[str]:
    """Rename the directories to remove: half a checkpoint must not look like a whole one.

    The order is the one in `latest`, because clocks may go backwards.
    """
    history = read_history(path)
    run, places = history.get(published, ""), {name: -i for i, name in enumerate(history)}
    names = [
        folder.name
        for _, _, folder in list_checkpoints(path)
        if folder.name != published and history.get(folder.name, "") in (run, "")
    ]
    names.sort(key=lambda name: places.get(name, -len(places)))
    hidden: list[str] = []
    with _warned():
        for name in names[: max(0, len(names) + 1 - keep_last)]:
            temporary = path / temporary_name(name)
            files.rename(path / name, temporary)
            files.sync_path(path)
            hidden.append(temporary.name)
    return hidden


@contextmanager
def _warned() -> Iterator[None]:
    """Warn if an old checkpoint can't be removed: the new one is saved."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"could not remove an old checkpoint: {error}", RuntimeWarning, stacklevel=2)
