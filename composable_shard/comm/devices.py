"""Streams, and copies between a device and pinned host memory.

[Note: Streams and memory]
Gathers run on one side stream, reductions on another, both beside the compute stream, which is the
current one wherever the library is called. The host never waits: a stream does. Nothing is told to
the allocator about other streams (`record_stream`), which would delay frees until some later
point. Instead:

- Memory goes back to the stream that it was allocated on, and is handed out again there at once.
- Work on a side stream begins with a wait for the compute stream. So memory of a side stream that
  compute reads may be freed as soon as that compute has been issued.
- Memory of the compute stream that a side stream reads is kept until the compute stream has waited
  for that side stream.

A test runs steps on streams that only keep account of who has waited for whom, and finds every
access, and every reuse of memory, that another stream is not known to have come before.

[Note: Copies and waits]
A copy between device and pinned host memory runs beside the Python code that starts it. Until it is
waited for, its target must not be read, nor its source written or freed. `HostCopies` is all that
says when a copy runs and who waits for it. Where the device is the CPU the copies run at once; that
nothing relies on it is tested with copies that run only when they are waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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
