"""Collectives made of messages between ranks over gloo, with the verbs of c10d's process groups.

[Note: All-reduces by messages]
Gloo's own all-reduce aborts the process if ranks pass tensors of different sizes, and silently sums
unrelated tensors of equal size. Messages carry the identity of their collective, so ranks that
differ wait and find out. [Note: Identity of a collective]

Each rank sends its whole tensor to every other rank, and all ranks add up in the order of ranks.
That takes the bytes of a ring only with two ranks; with more, tensors of more than
`MAX_SMALL_NBYTES` are reduced by gloo, after the ranks have exchanged the identity.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import chain, repeat, starmap
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard.comm.devices import Then, abandon
from composable_shard.comm.order import LOWEST_TAG, NUM_TAGS, GroupOrder, order_of
from composable_shard.comm.watch import fail

_ABANDONED_TIMEOUT = timedelta(seconds=10)


class _Failed:
    """Takes the place of a work that has failed: each further wait raises again."""

    def __init__(self, error: Exception) -> None:
        self._text = str(error)  # not the error, whose traceback keeps buffers

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta | None = None) -> NoReturn:
        raise RuntimeError(self._text)


class _InFlight(list[dist.Work | _Failed]):
    """Collectives and messages that are waited for even if they are dropped, for example after an
    error.

    If the buffer of a message in flight is freed, gloo closes the connection.

    Attributes:
        are_messages: Whether they are messages, which can't be waited for twice. All others can,
            and then say again whether they have failed.
    """

    are_messages = True

    def end(self) -> None:
        """Wait a short time for works that nobody has waited for.

        Errors are ignored here, but whoever waits later gets them: the memory is not complete.
        """
        kept = list[dist.Work | _Failed]()
        for work in self:
            if not self.are_messages or isinstance(work, _Failed):
                kept.append(work)
            try:
                if not work.is_completed():
                    work.wait(_ABANDONED_TIMEOUT)
            except Exception as error:  # of any kind: the work may be a user's
                if self.are_messages:
                    kept.append(_Failed(error))
        self[:] = kept

    def __del__(self) -> None:
        while self:
            try:
                self.are_messages = True  # nobody waits later
                self.end()
                break
            except BaseException as error:  # an interrupt, which Python would drop here
                _interrupts.append(error.with_traceback(None))  # without buffers


# Raised by the next wait of the main thread, as if they came there.
_interrupts: list[BaseException] = []


def _raise_kept_interrupt() -> None:
    if threading.current_thread() is threading.main_thread():
        raise _interrupts.pop()


class Works:
    """Collectives, or messages, that are waited for together.

    Args:
        works: Collectives that a backend has started. Messages come to `posted` later.
        group: Their group.
        timeout: Of each wait; None for the group's.
    """

    def __init__(
        self,
        works: Iterable[dist.Work],
        group: dist.ProcessGroup,
        timeout: timedelta | None = None,
    ) -> None:
        posted = self.posted = _InFlight(works)
        posted.are_messages = not posted
        self._group, self._timeout = group, timeout

    def wait(self) -> None:
        """Wait for each work once; an error says what each rank of the group does.

        After an error, and after `abandon` has met one, each further wait raises it.
        """
        works = self.posted
        try:
            if _interrupts:
                _raise_kept_interrupt()
            for work in works:
                work.wait() if self._timeout is None else work.wait(self._timeout)
            works.clear()
        except RuntimeError as error:
            try:
                fail(error, self._group)
            finally:
                works[:] = [_Failed(error)]
        except BaseException:  # an interrupt: the memory may be given back next
            works.end()
            raise

    def abandon(self) -> None:
        """Wait a short time until the buffers are free for other use; a later `wait` has errors."""
        self.posted.end()


def exchange(
    sends: Iterable[tuple[int, Tensor]],
    receives: Iterable[tuple[int, Tensor]],
    group: dist.ProcessGroup,
    order: GroupOrder,
) -> Works:
    """Start sending and receiving tensors, in order, by rank in the group; no empty ones.

    Sends are posted first: with the receives first, an exchange of 0.4 to 1 MB between two gloo
    ranks took 0.7 to 1.5 ms instead of 0.2 to 0.5 ms. The messages belong to the collective that
    was entered last in the group's order.
    """
    issued = order.issued
    tag = LOWEST_TAG + hash((order.num_folded, len(issued), issued[-1])) % NUM_TAGS
    works = Works((), group, order.timeout)
    order.posted = weakref.ref(works)
    messages = chain(
        starmap(group.send, [([each], rank, tag) for rank, each in sends if each.numel()]),
        starmap(group.recv, [([each], rank, tag) for rank, each in receives if each.numel()]),
    )
    try:
        # By one call, as signals come between lines of Python: an interrupt would lose the first
        # message, which goes on to write, or leave sends that no rank receives.
        works.posted.extend(messages)
    except BaseException as error:
        works.posted.clear()  # not all were started, so a wait for the others would never end
        if isinstance(error, RuntimeError):
            fail(error, group)
        raise
    return works


def wait_for_interrupted(group: dist.ProcessGroup) -> None:
    """Wait for a collective whose start was interrupted before the caller got its work.

    Call it before memory that the collective may write is freed.
    """
    ref = order_of(group).posted
    posted = None if ref is None else ref()  # a work that was freed has been waited for
    if isinstance(posted, Works):
        posted.abandon()
    elif posted is not None:
        abandon(posted)


LOW_PRECISION = (torch.float16, torch.bfloat16)
MAX_SMALL_NBYTES = 4096

_COMBINE: dict[dist.ReduceOp.RedOpType, Callable[..., Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


class MessageGroup:
    """The verbs of a process group that the library calls, for any sizes of the ranks' parts.

    Each verb returns a work. Its messages belong to the collective that was entered last in the
    group's order.

    Args:
        group: The ranks that exchange messages.
        order: Of the group.
    """

    def __init__(self, group: dist.ProcessGroup, order: GroupOrder) -> None:
        self._group, self._order = group, order

    def gather(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        options: dist.GatherOptions,
    ) -> Works:
        """Collect each rank's tensor on rank 0; only rank 0 passes outputs."""
        if not outputs:
            return self._exchange([(0, inputs[0])], [])
        parts = outputs[0]
        parts[0].copy_(inputs[0].view(parts[0].shape))
        return self._exchange([], enumerate(parts[1:], 1))

    def scatter(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Sequence[Tensor]],
        options: dist.ScatterOptions,
    ) -> Works:
        """Send each rank its tensor from rank 0; only rank 0 passes inputs."""
        if not inputs:
            return self._exchange([], [(0, outputs[0])])
        parts = inputs[0]
        outputs[0].copy_(parts[0])
        return self._exchange(enumerate(parts[1:], 1), [])

    def allreduce(self, tensors: Sequence[Tensor], options: dist.AllreduceOptions) -> Then:
        """Reduce one contiguous tensor in place. [Note: All-reduces by messages]"""
        op = options.reduceOp.op  # type: ignore[attr-defined] # missing in the stubs of torch
        own = tensors[0].view(-1)
        rank, size = self._group.rank(), self._group.size()
        others = [other for other in range(size) if other != rank]
        terms = [torch.empty_like(own) for _ in others]  # to iterate over one tensor takes longer
        works = self._exchange(zip(others, repeat(own)), zip(others, terms, strict=True))

        def combine() -> None:
            # In the order of ranks, so that all ranks get the same bits.
            parts = [*terms[:rank], own, *terms[rank:]]
            first, *further = parts
            if op == dist.ReduceOp.SUM and size > 2 and own.dtype in LOW_PRECISION:
                first = first.float()  # [Note: Low-precision sums]
            for term in further[:-1]:
                first = _COMBINE[op](first, term)
            _COMBINE[op](first, further[-1], out=own)

        return Then([works], combine)

    def broadcast(self, tensors: Sequence[Tensor], options: dist.BroadcastOptions) -> Works:
        """Send a tensor from the root to all other ranks."""
        tensor, root = tensors[0], options.rootRank
        if self._group.rank() != root:
            return self._exchange([], [(root, tensor)])
        others = [rank for rank in range(self._group.size()) if rank != root]
        return self._exchange([(rank, tensor) for rank in others], [])

    def _exchange(
        self, sends: Iterable[tuple[int, Tensor]], receives: Iterable[tuple[int, Tensor]]
    ) -> Works:
        return exchange(sends, receives, self._group, self._order)
