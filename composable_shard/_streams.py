"""Side streams of an accelerator, and points of a stream that others wait for.

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
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["StreamPoint", "Streams", "make_streams"]


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
