"""Streams, copies between a device and pinned host memory, and how a device communicates.

[Note: Streams and memory]
Gathers run on one side stream and reductions on another, both beside the compute stream, which is
the current stream of the calling code. Streams wait for each other; the host never waits. The
allocator is not told about uses on other streams (`record_stream`), because that would delay frees.
Instead:

- Freed memory belongs to the stream on which it was allocated, which may use it again at once.
- Work on a side stream begins with a wait for the compute stream. So memory of a side stream that
  compute reads may be freed as soon as that compute has been issued.
- Memory of the compute stream that a side stream reads is kept until the compute stream has waited
  for that side stream. A model that is dropped before gives all its memory back, so what is issued
  after that waits, too: `make_streams`.

[Note: Copies and waits]
A copy between device and pinned host memory runs beside the Python code that starts it. Until it is
waited for, its target must not be read, nor its source written or freed. Only `HostCopies` decides
when a copy runs and who waits for it. On the CPU copies run at once; tests use copies that run only
when they are waited for, to prove that no code relies on it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard.torch_private import backend_of


@dataclass(frozen=True)
class Streams:
    """Side streams of an accelerator: gathers on one, reductions on the other."""

    unshard_stream: torch.Stream
    reduce_stream: torch.Stream

    def point_after(self, stream: torch.Stream, work: Waitable) -> Waitable:
        """Let a side stream, the current one, wait for a work; return the point after that."""
        work.wait()
        return StreamPoint(stream)


class StreamPoint:
    """The work issued on a stream so far. Waiting for it does not block the host."""

    __slots__ = ("_event",)

    def __init__(self, stream: torch.Stream) -> None:
        self._event = stream.record_event()

    def wait(self) -> None:
        """Make the current stream wait."""
        torch.accelerator.current_stream().wait_event(self._event)


def make_streams(device: torch.device) -> Streams | None:
    """Return side streams; None on the CPU, where works are waited for instead."""
    if device.type in ("cpu", "meta"):
        return None
    streams = Streams(torch.Stream(device, priority=-1), torch.Stream(device, priority=-1))
    end = weakref.finalize(streams, _await_dropped, streams.unshard_stream, streams.reduce_stream)
    end.atexit = False
    return streams


def _await_dropped(*streams: torch.Stream) -> None:
    """Let the current stream wait for what a model that was dropped has in flight."""
    with suppress(RuntimeError):  # in a fork the device can't be used
        if not is_capturing(streams[0].device):
            for stream in streams:
                torch.accelerator.current_stream().wait_stream(stream)


HOST = torch.device("cpu")


def alloc_host(numel: int, dtype: torch.dtype, *, is_pinned: bool) -> Tensor:
    """Return zeros in host memory, shape `(numel,)`, which an accelerator can copy by itself."""
    return torch.zeros(numel, dtype=dtype, device=HOST, pin_memory=is_pinned)


class HostCopies:
    """Copies on the CPU, which are done when the call returns.

    `copy_to_device` and `copy_to_host` return an event, whose type the class chooses.
    """

    def copy_to_device(self, target: Tensor, host: Tensor) -> Any:
        """Start copying into device memory, in the order of the current stream; return an event."""
        target.copy_(host)

    def copy_to_host(self, host: Tensor, source: Tensor) -> Any:
        """Start copying `source` after the work of the current stream; return an event.

        The caller keeps `source` until `is_done`.
        """
        host.copy_(source)

    def wait_on_device(self, event: Any) -> None:
        """Make later work of the current stream wait for the copy."""

    def wait_on_host(self, event: Any) -> None:
        """Block until the copy is done."""

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
    """Return the copies between the host and a device."""
    return HostCopies() if device.type in ("cpu", "meta") else StreamCopies(device)


def is_capturing(device: torch.device) -> bool:
    """Return whether a graph is being captured, so that the host can't wait for issued work."""
    asks = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return asks is not None and bool(asks())


def as_real(tensor: Tensor) -> Tensor:
    """View a complex tensor as pairs of real numbers: no backend carries complex ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def cut_in_parts(
    tensor: Tensor, group: dist.ProcessGroup, numels: Sequence[int] | None
) -> Sequence[Tensor]:
    """Return a view of each rank's part of a tensor, along the first dimension.

    The parts have `numels` elements; the tensor may be longer. None for equal parts.
    """
    if numels is None:
        return tensor.view(group.size(), -1).unbind()
    return tensor[: sum(numels)].split_with_sizes(list(numels))


def payload(tensor: Tensor, numels: Sequence[int] | None) -> int:
    """Return the bytes of the full-size tensor up to the end of the last part."""
    return tensor.nbytes if numels is None else sum(numels) * tensor.itemsize


MAX_EXCHANGE_SIZE = 8


def is_exchange(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether shards are sent from rank to rank, and sums taken here.

    Gloo copies what its all-gather sends and receives through buffers of its own, and its
    reduce-scatter takes two to three times as long as an exchange and a local sum. Sending every
    shard straight from and to where it belongs took 0.4 to 0.9 of the time of the best collective
    at 2 and 4 ranks and 64 kB to 32 MB. With many ranks the number of messages would dominate.
    """
    if device.type != "cpu" or not 1 < group.size() <= MAX_EXCHANGE_SIZE:
        return False
    found = _has_gloo.get(group)
    if found is None:
        found = _has_gloo[group] = backend_name(group, device) == "gloo"
    return found


# For the CPU: gathers that are not prepared, for example over a small group, ask each time.
_has_gloo: WeakKeyDictionary[dist.ProcessGroup, bool] = WeakKeyDictionary()


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend for a device; empty if there is none, for example after
    `cpu()`."""
    try:
        return str(backend_of(group, device).name()).lower()
    except RuntimeError:
        return ""


class Waitable(Protocol):
    """A collective that was started."""

    def wait(self) -> object:
        """Block, on CPU, or make the current stream wait until the collective is done."""


class Then:
    """Works and a function that runs once after them, and is dropped then.

    A function that raises or is interrupted does not run again, as it may have done a part: each
    further wait raises.
    """

    def __init__(self, works: Sequence[Waitable], action: Callable[[], object] | None) -> None:
        self._works, self._action = works, action

    def wait(self) -> None:
        """Wait for all works, then call the function."""
        for work in self._works:
            work.wait()
        action = self._action
        if action is not None:
            self._action = _refuse
            action()
            self._action = None


def _refuse() -> NoReturn:
    raise RuntimeError(
        "what follows a collective has failed or was interrupted, so its values are not complete: "
        "repeat the step, or load a checkpoint"
    )


DONE = Then((), None)


def abandon(work: Waitable) -> None:
    """Wait until the work's buffers are free for other use; ignore the collective's errors."""
    with suppress(Exception):  # of any kind: the work may be a user's
        work.wait()
