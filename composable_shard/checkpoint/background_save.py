"""Saves that run in the background, and the calls that wait for them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from composable_shard.comm import HostGroup, get_host_group

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


def quiet_group() -> HostGroup:
    """Return the group of all ranks when no save uses it; raise the error of one that failed.

    It is raised on all ranks, also where a call has raised it already, and before any code of the
    program runs, which may communicate.
    """
    return get_host_group(_end_pending)


def _end_pending(group: HostGroup) -> None:
    pending: CheckpointSave | None = group.swap_pending(None)
    error = None if pending is None else pending.untold_error()
    if error is not None:
        raise RuntimeError(f"the save before this call failed: {error}")
