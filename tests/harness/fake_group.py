"""A process group of which only this process exists: torch's `fake` backend.

What an all-gather returns is this rank's shard, once for each rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_group(world_size: int) -> Iterator[None]:
    """Make it the default group of this process."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
