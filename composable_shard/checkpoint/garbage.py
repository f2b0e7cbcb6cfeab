"""When Python looks for garbage in cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Put off the search for garbage in cycles, of all threads.

    What a checkpoint has of each parameter makes many containers, which stay until its end. Looking
    through them again and again took half of the time of planning for 10,000 parameters.
    """
    was_on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_on:
            gc.enable()
