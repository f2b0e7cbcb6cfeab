"""When Python looks for garbage in cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Put off the search for garbage in cycles, of all threads.

    A checkpoint makes many containers for each parameter, which stay until its end. Looking
    through them again and again took half of the time of planning for 10,000 parameters.
    """
    was_on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_on:
            gc.enable()
