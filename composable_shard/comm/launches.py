"""Launches: collectives of one group that its backend issues by one call.

[Note: Launches]
A collective costs its latency, however few bytes it has. NCCL can group collectives without a copy:
each has its own buffers, and all of them take about the latency of one. So the collectives that are
started inside a `Launch` are only entered, and its end issues them. Each sum is taken as if it ran
alone, so values and bytes are the same.

- All ranks must make the same launches. So what is in one follows from sizes, groups and options,
  and from an order that the ranks agree on, never from what a rank finds to be ready. A launch has
  an identity of its own, with their number, before the identities of its collectives. While ranks
  exchange identities, they exchange this one before any data is sent, and the digest of a step has
  it. [Note: Identity of a collective]
- No rank can wait for ever for a launch: nothing waits for another rank between its first line and
  its end but exchanges of identities, which all ranks make there in the same order. What is entered
  can't be waited for before the end: such a wait raises.
- If anything fails inside of it, nothing is issued, and every wait for what was entered raises. So
  a rank that fails leaves the others waiting, as it does without launches. [Note: Watch]
- Collectives of another kind, dtype or sum than those before them begin a further call, as the
  backend's calls require. Collectives for which it has no such call are issued at once.

Over gloo their bytes would have to be copied to travel as one message, in memory that waits, and
with more host time for each. There, and on other backends that can't group calls, trees make no
launches.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import starmap
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard.comm import trace
from composable_shard.comm.devices import StreamPoint, Streams, Waitable
from composable_shard.comm.identity_exchange import exchange_identity
from composable_shard.comm.order import identify, order_of
from composable_shard.comm.watch import fail

# The first collective that is needed waits for the last. 4 MiB take 40 us at 100 GB/s, about the
# latency that each one saves.
MAX_LAUNCH_NBYTES = 4 << 20

# What issues a group's collectives instead of the group: its launch, while it has one.
issuers: dict[dist.ProcessGroup, Launch] = {}


class _Call:
    """Collectives of one kind that the backend issues by one call; what all of them wait for."""

    def __init__(
        self, group: dist.ProcessGroup, kind: str, options: Any, stream: torch.Stream | None
    ) -> None:
        self._group, self._kind, self._options, self._stream = group, kind, options, stream
        self._outputs: list[Tensor] = []
        self._inputs: list[Tensor] = []
        self._afterwards: list[tuple[Waitable, _Point]] = []
        self._works: list[dist.Work] = []  # one, once it is issued

    def fits(self, kind: str, output: Tensor, options: Any) -> bool:
        """Return whether a collective can be in the same call."""
        is_same = kind == self._kind and output.dtype == self._outputs[0].dtype
        return is_same and (options is None or options.reduceOp == self._options.reduceOp)

    def add(self, output: Tensor, input: Tensor) -> None:
        """Enter a collective."""
        self._outputs.append(output)
        self._inputs.append(input)

    def then(self, work: Waitable) -> _Point:
        """Let the stream wait for a work, once this is issued; return the point after that."""
        point = _Point()
        self._afterwards.append((work, point))
        return point

    def issue(self) -> None:
        """Issue all; then let the stream wait for the works that were given."""
        stream = self._stream
        with nullcontext() if stream is None else stream:
            self._start()
            for work, point in self._afterwards:
                work.wait()
                point.place(StreamPoint(stream))  # type: ignore[arg-type]  # there is one
        self.forget()

    def forget(self) -> None:
        """Drop the buffers, which those who entered them keep, and the works, one of them this."""
        self._outputs, self._inputs, self._afterwards = [], [], []

    def _start(self) -> None:
        group: Any = self._group
        arguments: tuple[Any, ...] = self._outputs, self._inputs, self._options
        if self._kind == "all_gather":
            verb, arguments = group.allgather_into_tensor_coalesced, arguments[:2]
        elif self._kind == "reduce_scatter":
            verb = group.reduce_scatter_tensor_coalesced
        else:
            verb, arguments = group.allreduce_coalesced, (self._outputs, self._options)
        # By one call, as signals come between calls: an interrupt would lose the work.
        self._works.extend(starmap(verb, [arguments]))

    def wait(self) -> None:
        """Wait for all.

        Raises:
            RuntimeError: If they failed, or were not issued because something else failed.
        """
        works, self._works = self._works, []  # after an error the others' waits fail too
        if not works:
            raise RuntimeError("collectives that were to be issued together have failed")
        try:
            works[0].wait()
        except RuntimeError as error:
            fail(error, self._group)
        self._works = works


class _Point:
    """A point on a stream that is not known until a launch is issued."""

    def __init__(self) -> None:
        self._point: StreamPoint | None = None

    def place(self, point: StreamPoint) -> None:
        """Set the point."""
        self._point = point

    def wait(self) -> None:
        """Make the current stream wait."""
        if self._point is None:
            raise RuntimeError("collectives that were to be issued together have failed")
        self._point.wait()


@dataclass(frozen=True, eq=False)
class _LaunchStreams(Streams):
    """Streams on which works are waited for when the launch is issued."""

    launch: Launch

    def point_after(self, stream: torch.Stream, work: Waitable) -> Waitable:
        """Return the point after a work of the launch."""
        call = self.launch.call
        # Without: what was started was issued at once.
        return super().point_after(stream, work) if call is None else call.then(work)


class Launch:
    """A context: the collectives of a group that start inside are issued at its end, as one.

    See [Note: Launches]. Where they start with `streams`, inside they must start with those that
    `__enter__` returns.

    Args:
        group: The group.
        device: Of the tensors.
        what: What they are, for messages.
        number: How many there are, the same on all ranks.
        streams: The side streams of an accelerator, if any.

    Attributes:
        call: What was entered last and is not issued.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        what: str,
        number: int,
        streams: Streams | None,
    ) -> None:
        self._group, self._device, self._streams = group, device, streams
        self._what, self._number = what, number
        self.call: _Call | None = None

    def __enter__(self) -> Streams | None:
        """Announce the launch; return the streams to start its collectives with."""
        order = order_of(self._group)
        order.enter(_identity(self._what, self._number))
        exchange_identity(self._group, order, self._device, is_rare=False)
        if trace.logs:
            trace.record("launch", self._group.group_name, self._number)
        issuers[self._group] = self
        plain = self._streams
        # Not kept, as it refers to this object.
        return plain and _LaunchStreams(plain.unshard_stream, plain.reduce_stream, self)

    def _enter(self, kind: str, output: Tensor, input: Tensor, options: Any = None) -> Waitable:
        """Enter a collective; return what is to be waited for, after the end."""
        call = self.call
        if call is not None and not call.fits(kind, output, options):
            self._issue()
            call = None
        if call is None:
            stream = None if self._streams is None else torch.accelerator.current_stream()
            call = self.call = _Call(self._group, kind, options, stream)
            order_of(self._group).posted = weakref.ref(call)
        call.add(output, input)
        return call

    # The verbs of a process group that are entered; others must not be called meanwhile.

    def _allgather_base(self, output: Tensor, shard: Tensor) -> Waitable:
        return self._enter("all_gather", output, shard)

    def _reduce_scatter_base(
        self, output: Tensor, full: Tensor, options: dist.ReduceScatterOptions
    ) -> Waitable:
        return self._enter("reduce_scatter", output, full, options)

    def allreduce(self, tensors: Sequence[Tensor], options: dist.AllreduceOptions) -> Waitable:
        """Enter the reduction of one tensor in place."""
        coalesced = dist.AllreduceCoalescedOptions()
        coalesced.reduceOp = options.reduceOp
        return self._enter("all_reduce", tensors[0], tensors[0], coalesced)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Issue what was entered; nothing after an error."""
        self.close()
        if error is None:
            self._issue()
        elif self.call is not None:
            self.call.forget()
            self.call = None

    def close(self) -> None:
        """Let the group issue its collectives again.

        The end does so too, but an interrupt may come before its first line. Call this after it.
        """
        issuers.pop(self._group, None)

    def _issue(self) -> None:
        call, self.call = self.call, None
        if call is not None:
            call.issue()


@cache
def _identity(what: str, number: int) -> int:
    return identify(f"{number} {what} issued together", "launch", 0, is_of_step=True)
