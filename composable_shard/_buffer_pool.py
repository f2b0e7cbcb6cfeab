"""`BufferPool`: memory that collectives read and write, apart from all other memory.

[Note: Buffer pool]
Full parameters and gradients come and go with every unit. A pool of CUDA memory keeps what they
give back for the next one: after the first steps the same few blocks serve all units in turn, at
the same addresses, whatever else the program allocates and frees. NCCL can allocate such a pool,
and know its memory: then it needs no buffers of its own in between. It registers what is in the
pool, and what is added later. All ranks must do alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist

__all__ = ["BufferPool", "PoolKind", "allocating_in", "check_pool", "pool_for"]

PoolKind: TypeAlias = Literal["private", "nccl"]
_KINDS = ("private", "nccl")


class BufferPool:
    """A pool of CUDA memory, see [Note: Buffer pool]."""

    def __init__(
        self, kind: PoolKind, groups: Sequence[dist.ProcessGroup], device: torch.device
    ) -> None:
        """Make an empty pool.

        Args:
            kind: `"nccl"` takes NCCL's allocator.
            groups: Whose collectives use the memory.
            device: Where it is.
        """
        self._device = device
        self._unregistered = list(groups) if kind == "nccl" else []
        backends = [group._get_backend(device) for group in self._unregistered]
        self._pool = torch.cuda.MemPool(backends[0].mem_allocator if backends else None)

    def allocating(self) -> AbstractContextManager[None]:
        """Return a context in which this thread allocates from the pool."""
        return torch.cuda.use_mem_pool(self._pool, self._device)

    def register(self) -> None:
        """Register the pool with the process groups, once; these have communicated before."""
        while self._unregistered:
            group = self._unregistered.pop()
            group._get_backend(self._device).register_mem_pool(self._pool)  # type: ignore[attr-defined]


_pools: weakref.WeakValueDictionary[tuple[object, ...], BufferPool] = weakref.WeakValueDictionary()


def pool_for(
    kind: PoolKind | None, groups: Sequence[dist.ProcessGroup], device: torch.device
) -> BufferPool | None:
    """Return the pool of all units with these groups; it lives as long as one of them does."""
    if kind is None:
        return None
    groups = [group for group in groups if group.size() > 1]
    key = (kind, device, *groups)  # not their names, which come again after they are destroyed
    pool = _pools.get(key)
    if pool is None:
        pool = _pools[key] = BufferPool(kind, groups, device)
    return pool


def allocating_in(pool: BufferPool | None) -> AbstractContextManager[None]:
    """Return a context in which memory comes from the pool; None changes nothing."""
    return nullcontext() if pool is None else pool.allocating()


def check_pool(
    kind: object,
    groups: Sequence[dist.ProcessGroup] = (),
    device: torch.device | None = None,
) -> None:
    """Check the option `buffer_pool`, and that these groups and this device can have such a pool.

    Raises:
        ValueError: If it is not one, or not on CUDA, or NCCL is to register it elsewhere.
    """
    if kind is None:
        return
    if kind not in _KINDS:
        raise ValueError(f"expected buffer_pool to be None, 'private' or 'nccl', got {kind!r}")
    if device is not None and device.type != "cuda":
        raise ValueError(
            f"buffer_pool={kind!r} needs a CUDA device, and the mesh is of {device.type}. Leave "
            "buffer_pool out there."
        )
    for group in groups if kind == "nccl" and device is not None else ():
        name = group._get_backend(device).name().lower()  # type: ignore[arg-type]
        if group.size() > 1 and name != "nccl":
            raise ValueError(
                "buffer_pool='nccl' needs process groups of NCCL, and that of group "
                f"'{group.group_name}' is '{name}'. Pass buffer_pool='private'."
            )
