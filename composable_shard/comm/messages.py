"""Collectives as messages from rank to rank over gloo, with the verbs of a process group of c10d.

[Note: All-reduces by messages]
Gloo's own all-reduce aborts the process where ranks bring tensors of different sizes, and sums up
wrong ones of the same size. Messages carry the identity of their collective, so ranks that differ
wait, and find out. [Note: Identity of a collective]

Between two ranks, and for a few bytes, each rank sends all of its tensor to each other one and all
of them sum up in the order of ranks. Otherwise each rank sums up one part of the tensor and sends
it to the others: that takes as many bytes as a ring, but a second round of messages. `advance`
starts it, so it runs beside what comes next.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import chain, repeat

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard.comm.devices import abandon, as_real
from composable_shard.comm.order import LOWEST_TAG, NUM_TAGS, GroupOrder, order_of
from composable_shard.comm.watch import fail

_ABANDONED_TIMEOUT = timedelta(seconds=10)


class _InFlight(list[dist.Work]):
    """Collectives and messages that are waited for even if they are dropped, as after an error.

    A message in flight without its buffer: gloo closes the connection.
    """

    def end(self) -> None:
        """Wait for those that nobody has waited for, not for long; errors are ignored."""
        for work in self:
            if not work.is_completed():  # a message can't be waited for twice
                with suppress(RuntimeError):
                    work.wait(_ABANDONED_TIMEOUT)
        self.clear()

    __del__ = end


class Works:
    """Several collectives or messages, those with one tag, that are waited for together."""

    def __init__(
        self,
        works: Iterable[dist.Work],
        group: dist.ProcessGroup,
        tag: int = 0,
        timeout: timedelta | None = None,
    ) -> None:
        self.posted = _InFlight(works)
        self._group, self.tag, self._timeout = group, tag, timeout

    def wait(self) -> None:
        """Wait for each of them, once; an error says what each rank of the group does."""
        works = self.posted
        try:
            for work in works:
                work.wait() if self._timeout is None else work.wait(self._timeout)
            works.clear()
        except RuntimeError as error:
            try:
                fail(error, self._group)
            finally:
                works.clear()
        except BaseException:  # an interrupt: the memory may be given back next
            works.end()
            raise

    def abandon(self) -> None:
        """Wait until the buffers are free for other use, not for long; errors are ignored."""
        self.posted.end()


def exchange(
    sends: Iterable[tuple[int, Tensor]],
    receives: Iterable[tuple[int, Tensor]],
    group: dist.ProcessGroup,
    order: GroupOrder,
    tag: int | None = None,
) -> Works:
    """Start sending and receiving tensors, in order, by rank in the group; no empty ones.

    Sends are posted first: with the receives first, an exchange of 0.4 to 1 MB between two gloo
    ranks took 0.7 to 1.5 ms instead of 0.2 to 0.5 ms.

    Args:
        order: The group's; the messages belong to the collective that was entered last.
        tag: That of an earlier exchange, to which they belong instead.
    """
    if tag is None:
        issued = order.issued
        tag = LOWEST_TAG + hash((order.num_folded, len(issued), issued[-1])) % NUM_TAGS
    sent = [item for item in sends if item[1].numel()]
    received = [item for item in receives if item[1].numel()]
    works = Works((), group, tag, order.timeout)
    order.posted = weakref.ref(works)
    tags, own = repeat(tag), [rank for rank, _ in sent]
    others = [rank for rank, _ in received]
    messages = chain(
        map(group.send, [[tensor] for _, tensor in sent], own, tags),
        map(group.recv, [[tensor] for _, tensor in received], others, tags),
    )
    try:
        # By one call, as signals come between lines of Python: an interrupt would lose the first
        # message, which goes on to write, or leave sends that no rank receives.
        works.posted.extend(messages)
    except BaseException as error:
        works.posted.clear()  # not all were started: who waited for the others would wait in vain
        if isinstance(error, RuntimeError):
            fail(error, group)
        raise
    return works


def settle(group: dist.ProcessGroup) -> None:
    """Wait for a collective that was interrupted before whoever started it had it.

    Before memory that it may write is given back.
    """
    ref = order_of(group).posted
    posted = None if ref is None else ref()  # one that is gone has been waited for
    if isinstance(posted, Works):
        posted.abandon()
    elif posted is not None:
        abandon(posted)


LOW_PRECISION = (torch.float16, torch.bfloat16)
_MAX_SMALL_NBYTES = 4096

_COMBINE: dict[dist.ReduceOp.RedOpType, Callable[[Tensor, Tensor], object]] = {
    dist.ReduceOp.SUM: lambda one, other: one.add_(other),
    dist.ReduceOp.PRODUCT: lambda one, other: one.mul_(other),
    dist.ReduceOp.MAX: lambda one, other: torch.maximum(one, other, out=one),
    dist.ReduceOp.MIN: lambda one, other: torch.minimum(one, other, out=one),
}


class ExchangedAllReduce:
    """One that has been started, see [Note: All-reduces by messages]."""

    def __init__(
        self,
        tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        order: GroupOrder,
        scratch: Tensor | None = None,
    ) -> None:
        """Start reducing a contiguous tensor; the collective has been entered in the group's order.

        The scratch memory, of as many elements as the tensor, is free again after `advance`.
        """
        self._group, self._op, self._order = group, op, order
        real = as_real(tensor).view(-1)
        size, self._rank = group.size(), group.rank()
        others = [rank for rank in range(size) if rank != self._rank]
        self._parts: dict[int, Tensor] | None = None
        if size > 2 and tensor.nbytes > _MAX_SMALL_NBYTES:
            # So many elements for each, fewer for the last ones, or none.
            step = -(-real.numel() // size)
            self._parts = {rank: real[rank * step : (rank + 1) * step] for rank in range(size)}
        self._own = real if self._parts is None else self._parts[self._rank]
        numel = self._own.numel()
        if scratch is None or scratch.numel() < numel * len(others):
            scratch = real.new_empty(numel * len(others))
        terms = scratch[: numel * len(others)].view(len(others), numel)
        self._terms: list[Tensor] | None = list(terms)
        sends = [(rank, real if self._parts is None else self._parts[rank]) for rank in others]
        receives = zip(others, terms, strict=True)
        self._works = exchange(sends, receives, group, order)

    def advance(self) -> None:
        """Wait for the other ranks' terms and sum up; give the scratch memory back."""
        if self._terms is None:
            return
        self._works.wait()
        terms, self._terms = self._terms, None
        self._combine(terms)
        if self._parts is not None:
            others = {rank: part for rank, part in self._parts.items() if rank != self._rank}
            sends = [(rank, self._own) for rank in others]
            tag = self._works.tag
            self._works = exchange(sends, others.items(), self._group, self._order, tag)

    def _combine(self, terms: list[Tensor]) -> None:
        """Write the result of the terms, in the order of ranks: the same bits on all ranks."""
        combine, own = _COMBINE[self._op], self._own
        if len(terms) == 1:
            combine(own, terms[0])
            return
        others = [*terms[: self._rank], own, *terms[self._rank :]]
        first = others.pop(0)
        if self._op == dist.ReduceOp.SUM and own.dtype in LOW_PRECISION:
            first = first.float()  # [Note: Low-precision sums]
        for term in others:
            combine(first, term)
        if first is not own:
            own.copy_(first)

    def wait(self) -> None:
        """Wait until the result is there."""
        self.advance()
        if self._parts is not None:
            self._works.wait()


class MessageGroup:
    """The verbs of a process group that the library calls, for any sizes of the ranks' parts.

    Each returns what must be waited for, and sends messages that belong to the collective that was
    entered last in the group's order.

    Args:
        group: Whose ranks exchange messages.
        order: Of the group.
        scratch: Memory for an all-reduce, as many elements as its tensor has.
    """

    def __init__(
        self, group: dist.ProcessGroup, order: GroupOrder, scratch: Tensor | None = None
    ) -> None:
        self._group, self._order, self._scratch = group, order, scratch

    def gather(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        options: dist.GatherOptions,
    ) -> Works:
        """Collect each rank's tensor on rank 0, which alone has outputs."""
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
        """Give each rank its part of what rank 0 has, which alone has inputs."""
        if not inputs:
            return self._exchange([], [(0, outputs[0])])
        parts = inputs[0]
        outputs[0].copy_(parts[0].view(outputs[0].shape))
        return self._exchange(enumerate(parts[1:], 1), [])

    def allreduce(
        self, tensors: Sequence[Tensor], options: dist.AllreduceOptions
    ) -> ExchangedAllReduce:
        """Reduce one tensor in place. [Note: All-reduces by messages]"""
        op = options.reduceOp.op  # type: ignore[attr-defined] # missing in the stubs of torch
        return ExchangedAllReduce(tensors[0], self._group, op, self._order, self._scratch)

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
