"""A save that a thread goes on with while training does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["CheckpointSave"]


class CheckpointSave:
    """A save that goes on in the background.

    `wait()` returns the directory when it is published, or raises what went wrong, the same on
    every rank. An error nobody waited for is raised by the next save or load. A process that ends
    waits for its save first. The save has a process group of its own, which outlives
    `destroy_process_group()`.
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
        """Wait; return the error that nobody has been told of."""
        self._thread.join()
        error = None if self._is_told else self._error
        self._is_told = True
        return error
