"""Memory on the host, and copies between it and the device: every one goes through here.

[Note: Copies and waits]
A copy between device and pinned host memory runs beside the Python code that starts it. Until it is
waited for, its target must not be read, nor its source written or freed. `HostCopies` is all that
says when a copy runs and who waits for it. Where the device is the CPU the copies run at once; that
nothing relies on it is tested with copies that run only when they are waited for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["HOST", "HostCopies", "StreamCopies", "alloc_host", "copies_for"]

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
