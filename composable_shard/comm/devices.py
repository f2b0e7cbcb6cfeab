"""Streams, and copies between a device and pinned host memory.

[Note: Streams and memory]
Gathers run on one side stream, reductions on another, both beside the compute stream, which is the
current one wherever the library is called. The host never waits: a stream does. Nothing is told to
the allocator about other streams (`record_stream`), which would put off frees until some later
point. Instead:

- Memory goes back to the stream that it was allocated on, and is handed out again there at once.
- Whatever a side stream does begins with a wait for the compute stream. So what compute has read
  of memory from a side stream may be freed when compute has been issued.
- What a side stream reads of memory from the compute stream is kept until the compute stream has
  waited for that.

A test runs steps on streams that only keep account of who has waited for whom, and finds every
access, and every reuse of memory, that another stream is not known to have come before.

[Note: Copies and waits]
A copy between device and pinned host memory runs beside the Python code that starts it. Until it is
waited for, its target must not be read, nor its source written or freed. `HostCopies` is all that
says when a copy runs and who waits for it. Where the device is the CPU the copies run at once; that
nothing relies on it is tested with copies that run only when they are waited for.

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
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard.torch_private import backend_of

__all__ = [
    "HOST",
    "BufferPool",
    "HostCopies",
    "PoolKind",
    "StreamCopies",
    "StreamPoint",
    "Streams",
    "alloc_host",
    "allocating_in",
    "check_pool",
    "copies_for",
    "make_streams",
    "pool_for",
]


@dataclass(frozen=True)
class Streams:
    """Side streams of an accelerator: gathers on one, reductions on the other."""

    unshard_stream: torch.Stream
    reduce_stream: torch.Stream


class StreamPoint:
    """All that was issued on a stream so far; to wait for it costs the host no time."""

    __slots__ = ("_event",)

    def __init__(self, stream: torch.Stream) -> None:
        self._event = stream.record_event()

    def wait(self) -> None:
        """Make the current stream wait."""
        torch.accelerator.current_stream().wait_event(self._event)


def make_streams(device: torch.device) -> Streams | None:
    """Return side streams; None where the device has none, and works are waited for instead."""
    if device.type in ("cpu", "meta"):
        return None
    return Streams(torch.Stream(device, priority=-1), torch.Stream(device, priority=-1))


HOST = torch.device("cpu")


def alloc_host(numel: int, dtype: torch.dtype, *, is_pinned: bool) -> Tensor:
    """Return zeros in host memory, shape `(numel,)`, which an accelerator can copy by itself."""
    return torch.zeros(numel, dtype=dtype, device=HOST, pin_memory=is_pinned)


class HostCopies:
    """Copies that are done when the call returns: the device is the CPU.

    An event is what `copy_to_device` or `copy_to_host` returns; what it is, is the class's affair.
    """

    def copy_to_device(self, target: Tensor, host: Tensor) -> Any:
        """Start copying into device memory, in the order of the current stream; return an event."""
        target.copy_(host)

    def copy_to_host(self, host: Tensor, source: Tensor) -> Any:
        """Start copying what the current stream makes of `source`; return an event.

        The caller keeps `source` until `is_done`.
        """
        host.copy_(source)

    def wait_on_device(self, event: Any) -> None:
        """Let what the current stream does from now on come after the copy."""

    def wait_on_host(self, event: Any) -> None:
        """Return when the copy is done."""

    def is_done(self, event: Any) -> bool:
        """Return whether the copy is done, without waiting."""
        return True


class StreamCopies(HostCopies):
    """Copies of an accelerator: to the host on a stream of their own, beside the backward."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._to_host: torch.Stream | None = None

    def copy_to_device(self, target: Tensor, host: Tensor) -> Any:
        """Start copying on the current stream."""
        target.copy_(host, non_blocking=True)
        return torch.accelerator.current_stream().record_event()

    def copy_to_host(self, host: Tensor, source: Tensor) -> Any:
        """Start copying on the side stream, once the current one has made `source`."""
        stream = self._to_host = self._to_host or torch.Stream(self._device)
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            host.copy_(source, non_blocking=True)
            return stream.record_event()

    def wait_on_device(self, event: Any) -> None:
        """Make the current stream wait."""
        torch.accelerator.current_stream().wait_event(event)

    def wait_on_host(self, event: Any) -> None:
        """Block."""
        event.synchronize()

    def is_done(self, event: Any) -> bool:
        """Ask the event."""
        return bool(event.query())


def copies_for(device: torch.device) -> HostCopies:
    """Return what copies between the host and a device."""
    return HostCopies() if device.type in ("cpu", "meta") else StreamCopies(device)


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
        backends = [backend_of(group, device) for group in self._unregistered]
        self._pool = torch.cuda.MemPool(backends[0].mem_allocator if backends else None)

    def allocating(self) -> AbstractContextManager[None]:
        """Return a context in which this thread allocates from the pool."""
        return torch.cuda.use_mem_pool(self._pool, self._device)

    def register(self) -> None:
        """Register the pool with the process groups, once; these have communicated before."""
        while self._unregistered:
            group = self._unregistered.pop()
            backend_of(group, self._device).register_mem_pool(self._pool)


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
        name = backend_of(group, device).name().lower()  # type: ignore[arg-type]
        if group.size() > 1 and name != "nccl":
            raise ValueError(
                "buffer_pool='nccl' needs process groups of NCCL, and that of group "
                f"'{group.group_name}' is '{name}'. Pass buffer_pool='private'."
            )
