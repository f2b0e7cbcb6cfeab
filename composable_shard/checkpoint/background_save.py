"""Saves that run in the background, and the calls that wait for them.

[Note: Staging memory]
Training waits while a save copies what it will write. Most of that time goes to fresh memory, whose
pages the system must find and clear. So a rank's copies stay where they are, and the next save
overwrites them: it has waited for the one before.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from composable_shard.checkpoint.draft import Item
from composable_shard.comm import HostGroup, get_host_group
from composable_shard.tensor import local_part

_NICENESS = 19  # of the thread that writes: the lowest priority


class CheckpointSave:
    """A save in the background.

    `wait()` returns the directory when it is published, or raises the save's error, the same on
    every rank. If nobody waits, the next save or load raises the error. A process waits for its
    save before it ends. The save's own process group outlives `destroy_process_group()`.
    """

    def __init__(self, write: Callable[[], Path]) -> None:
        self._write = write
        self._path: Path | None = None
        self._error: Exception | None = None
        self._is_told = False
        # Not a daemon: the interpreter joins it before it ends.
        self._thread = threading.Thread(target=self._run, name="save_checkpoint", daemon=False)
        self._thread.start()

    def _run(self) -> None:
        try:
            _leave_cores_to_others()
            self._path = self._write()
        except Exception as error:
            self._error = error
        finally:
            del self._write  # with the copies of the values

    @property
    def is_done(self) -> bool:
        """Whether `wait()` returns at once."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint is published, and return its directory.

        Raises:
            RuntimeError: If it could not be written.
        """
        self._thread.join()
        if self._error is not None:
            self._is_told = True
            raise RuntimeError(f"a checkpoint was not saved: {self._error}") from self._error
        assert self._path is not None
        return self._path

    def untold_error(self) -> Exception | None:
        """Wait; return the error if no call has raised it yet."""
        self._thread.join()
        error = None if self._is_told else self._error
        self._is_told = True
        return error


def _leave_cores_to_others() -> None:
    """Let this thread, and those that it starts, run on cores that no other thread wants; Linux.

    One that is wanted by others gives it a share of about 1.5 %, so that a save ends. A process
    can't undo it. A rank that waits for its save leaves a core to the thread.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox may refuse it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def copy_to_host(group: HostGroup, items: Sequence[Item]) -> None:
    """Copy the values of items, so that training may overwrite them: [Note: Staging memory]."""
    names = {item.name for item in items}
    kept = {name: x for name, x in group.swap_staging({}).items() if name in names}  # frees others
    # No inference tensor, which a later save, outside of inference mode, could not write.
    with torch.inference_mode(False), torch.no_grad():
        for item in items:
            item.values = _copied(local_part(item.values), kept.pop(item.name, None))
    group.swap_staging({x.name: x.values for x in items if type(x.values) is Tensor})


def _copied(value: Tensor, memory: Tensor | None) -> Tensor:
    if memory is None or type(value) is not Tensor:
        return value.to("cpu", copy=True)
    is_like = (memory.shape, memory.dtype) == (value.shape, value.dtype)
    return memory.copy_(value) if is_like else value.to("cpu", copy=True)


def quiet_group() -> HostGroup:
    """Return the group of all ranks when no save uses it; raise the error of one that failed."""
    group = get_host_group()
    pending: CheckpointSave | None = group.swap_pending(None)
    error = None if pending is None else pending.untold_error()
    if error is not None:
        error = RuntimeError(f"the save before this call failed: {error}")
    group.agree(error)
    return group
