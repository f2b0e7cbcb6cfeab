"""A process group of any number of ranks whose collectives cost nothing: they do nothing.

Torch's own `fake` backend won't do: its all-gather copies the input once for each rank, its
reduce-scatter makes a view for each, so that what it costs grows with their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["FreeGroup", "free_world"]

_NAME = "free"


class FreeGroup(dist.ProcessGroup):
    """This process as one rank of a group of which the others are not there.

    What a collective would receive is whatever the memory held. Only messages, which are of bytes,
    arrive: every rank seems to say what this one says.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        done: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        done.set_result([])
        self._done = torch._C._distributed_c10d._create_work_from_future(done)
        self._rank, self._size = rank, size
        self._group_name = ""

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """Return the name under which the group is registered."""
        return self._group_name

    def rank(self) -> int:
        """Return this process's number."""
        return self._rank

    def size(self) -> int:
        """Return how many ranks there would be."""
        return self._size

    def name(self) -> str:
        """Return the backend's name."""
        return _NAME

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return _NAME

    def _get_backend(self, device: torch.device) -> FreeGroup:
        return self

    def _allgather_base(self, output: Tensor, input: Tensor, *_: Any) -> dist.Work:
        if input.dtype is torch.uint8 and input.numel():
            output.view(self._size, -1).copy_(input.view(1, -1))
        return self._done

    def _do_nothing(self, *_: Any) -> dist.Work:
        return self._done

    # Torch's FSDP2 calls them by newer names.
    all_gather_single = _allgather_base
    reduce_scatter_single = _do_nothing
    supports_coalescing = False  # set it to group collectives, as NCCL does
    allgather_into_tensor_coalesced = reduce_scatter_tensor_coalesced = _do_nothing
    allreduce_coalesced = _do_nothing
    _reduce_scatter_base = allreduce = alltoall_base = broadcast = barrier = _do_nothing
    reduce = gather = scatter = send = recv = _do_nothing


@contextmanager
def free_world(size: int, rank: int = 0) -> Iterator[FreeGroup]:
    """Let the enclosed block be one rank of so many."""
    dist.init_process_group(_NAME, store=dist.HashStore(), rank=rank, world_size=size)
    try:
        yield dist.group.WORLD  # type: ignore[misc]  # None only where there is no group
    finally:
        dist.destroy_process_group()


def _make_free_group(store: object, rank: int, size: int, timeout: timedelta) -> FreeGroup:
    return FreeGroup(rank, size)


dist.Backend.register_backend(_NAME, _make_free_group, devices=["cpu"])
