"""Algorithms for all-gathers and reduce-scatters: by point-to-point messages, and by the backend.

[Note: Low-precision sums]
A backend sums 16-bit terms in 16 bits and rounds at each rank. An exchange sends the terms
unchanged, and each rank sums the terms of its shard in fp32, or in the output's dtype. Without an
exchange, an all-to-all does the same. It moves the bytes of a reduce-scatter, but needs memory for
the terms and a message to each rank, so the group must not be too large. An all-reduce by messages
works in the same way; the backend's own all-reduce rounds as the backend does.

[Note: Uneven shards]
NCCL has collectives for lists of any sizes. An exchange over gloo sends uneven shards as it sends
equal ones. Without an exchange a gather is a broadcast from each rank, and the terms of a sum
travel by all-to-all: at 10 ranks and 64 kB to 16 MB this took 0.03 to 0.9 of the time of a reduce
to each rank. Shards padded to the largest take 2 to 40 times as long.
(benchmarks/uneven.py)
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard.comm import trace
from composable_shard.comm.devices import (
    DONE,
    Waitable,
    abandon,
    as_real,
    backend_name,
    cut_in_parts,
    is_exchange,
    payload,
)
from composable_shard.comm.identity_exchange import make_exchange
from composable_shard.comm.launches import issuers
from composable_shard.comm.messages import LOW_PRECISION, Works, exchange
from composable_shard.comm.order import MAX_ISSUED, identify, order_of
from composable_shard.comm.watch import fail
from composable_shard.torch_private import all_gather_base_of, reduce_scatter_base_of

_CHUNK_NUMEL = 1 << 16


def _add_up(output: Tensor, terms: Tensor) -> None:
    """Sum terms, shape `(num_terms, numel)`, in order; or add one of shape `(numel,)`."""
    is_all = terms.dim() == 2
    if output.dtype == terms.dtype:
        _ = torch.sum(terms, 0, out=output) if is_all else output.add_(terms)
        return
    if is_all:
        output.copy_(terms[0])
    for term in terms[1:] if is_all else [terms]:
        # On CPU torch copies the term into the output's dtype: a small part at a time.
        size = _CHUNK_NUMEL if term.device.type == "cpu" else max(term.numel(), 1)
        for own, chunk in zip(output.split(size), term.split(size), strict=True):
            own.add_(chunk)


class PendingReduction:
    """A reduction in flight; `finish` must be called before its output is read."""

    __slots__ = ("_group", "_input", "_scale", "_terms", "_work", "output")

    def __init__(
        self,
        work: Waitable,
        output: Tensor,
        input: Tensor,
        terms: Tensor | None,
        scale: float,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.output, self._work, self._scale, self._group = output, work, scale, group
        self._input = input  # kept: the backend reads it until the work is done
        # To be added to `output`, shape (numel,); or to be summed into it, (num_terms, numel).
        self._terms = terms

    def finish(self) -> Tensor:
        """Wait for the reduction and return its output, shape `(shard_numel,)`."""
        try:
            self._work.wait()
        except RuntimeError as error:
            if isinstance(self._work, dist.Work) and self._group is not None:
                fail(error, self._group)
            raise
        if self._terms is not None:
            _add_up(self.output, self._terms)
        if self._scale != 1.0:
            self.output.mul_(self._scale)
        return self.output

    def abandon(self) -> None:
        """Wait until the buffers are free for other use; errors of the collective are ignored."""
        abandon(self._work)


class GatherAlgorithm:
    """Gathers one shard of each rank by the backend, always between the same buffers.

    A new algorithm is a class derived from this one, and a line in `_choose_gather`.
    """

    def __init__(
        self, output: Tensor, parts: Sequence[Tensor], shard: Tensor, group: dist.ProcessGroup
    ) -> None:
        """Prepare for real tensors, of which `parts` are views of `output`, one for each rank."""
        self._output, self._parts, self._shard, self._group = output, parts, shard, group
        self._order = order_of(group)

    def start(self) -> Waitable:
        """Start gathering."""
        order, group = self._order, self._group
        work = all_gather_base_of(issuers.get(group, group))(self._output, self._shard)
        order.posted = weakref.ref(work)
        return work


class UnevenGather(GatherAlgorithm):
    """Gathers parts of any sizes by the backend: a broadcast from each rank, which NCCL joins."""

    def start(self) -> Waitable:
        """Start gathering."""
        parts, shard, group = self._parts, self._shard, self._group
        if backend_name(group, shard.device) == "nccl":
            return group.allgather([list(parts)], [shard])
        own = parts[group.rank()]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        works = []
        for rank, part in enumerate(parts):
            if part.numel():
                options = dist.BroadcastOptions()
                options.rootRank, options.rootTensor = rank, 0
                works.append(group.broadcast([part], options))
        return Works(works, group)


class _ExchangedGather(GatherAlgorithm):
    """Gathers by messages from rank to rank, each shard directly to its place."""

    def __init__(
        self, output: Tensor, parts: Sequence[Tensor], shard: Tensor, group: dist.ProcessGroup
    ) -> None:
        super().__init__(output, parts, shard, group)
        own_rank = group.rank()
        self._own = parts[own_rank]
        self._shard = shard.view(self._own.shape)
        self._receives = [item for item in enumerate(parts) if item[0] != own_rank]
        self._sends = [(rank, self._shard) for rank, _ in self._receives]

    def start(self) -> Waitable:
        work = exchange(self._sends, self._receives, self._group, self._order)
        if self._own.data_ptr() != self._shard.data_ptr():
            self._own.copy_(self._shard)  # while messages travel
        return work


def _choose_gather(
    group: dist.ProcessGroup, device: torch.device, numels: Sequence[int] | None
) -> type[GatherAlgorithm]:
    if is_exchange(group, device):
        return _ExchangedGather
    return GatherAlgorithm if numels is None else UnevenGather


class AllGather:
    """An all-gather between fixed buffers: prepared once, started many times."""

    def __init__(
        self,
        output: Tensor,
        shard: Tensor,
        group: dist.ProcessGroup,
        numels: Sequence[int] | None = None,
        *,
        name: object,
    ) -> None:
        """Choose the algorithm; issues nothing.

        Args:
            output: Shape `(group.size() * shard_numel,)`; rank r's shard lands in its r-th part.
            shard: Shape `(shard_numel,)`, this rank's; it may be its part of `output`.
            numels: Elements of each rank's shard where they differ, the same on all ranks; `output`
                may be longer than all of them.
            name: What is gathered, for messages, as its `str` says when it starts; the unit, where
                `start` says when.
        """
        self._group_name = group.group_name
        self._name, self._identities = name, dict[str, int]()
        self._order = order_of(group)
        self._nbytes = payload(output, numels)
        real, algorithm = as_real(output), _choose_gather(group, output.device, numels)
        parts = () if algorithm is GatherAlgorithm else cut_in_parts(real, group, numels)
        self._algorithm = algorithm(real, parts, as_real(shard), group)
        self._exchange_identity = make_exchange(group, self._order, output.device)

    def start(self, when: str = "", *, is_rare: bool = False) -> Waitable:
        """Start gathering; wait before the output is read or the shard is written.

        Args:
            when: What the values are for, the same on all ranks.
            is_rare: Whether a function that the program called asks for it, rather than a step.
        """
        if trace.logs:
            trace.record("all_gather", self._group_name, self._nbytes)
        identity = self._identities.get(when)
        if identity is None:
            what = f"the {when} gather of {self._name}" if when else str(self._name)
            identity = identify(what, "all_gather", self._nbytes, is_of_step=bool(when))
            self._identities[when] = identity
        order = self._order  # of the group's collectives; as its `note` does, without a call
        if len(order.issued) > MAX_ISSUED:
            order.fold()
        order.issued.append(identity)
        if self._exchange_identity is not None and (is_rare or order.is_checked):
            self._exchange_identity(is_rare)
        return self._algorithm.start()


class SumAlgorithm:
    """Sums a tensor over the ranks of a group by the backend; each rank keeps its part.

    A new algorithm is a class derived from this one, and a line in `_choose_sum`.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, numels: Sequence[int] | None
    ) -> None:
        """Prepare for parts of `numels` elements; None where all are the same."""
        self._group, self._numels, self._order = group, numels, order_of(group)
        self._rank, self._size = group.rank(), group.size()
        self._is_nccl = backend_name(group, device) == "nccl"
        self._sum, self._mean = dist.ReduceScatterOptions(), dist.ReduceScatterOptions()
        self._mean.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)

    def scratch_parts(self, *, in_place: bool) -> int:
        """Return the scratch memory for the ranks' terms, in shards, see `ReduceScatter`."""
        return 0

    def start(
        self, output: Tensor, input: Tensor, scratch: Tensor | None, scale: float
    ) -> PendingReduction:
        """Start summing, see `ReduceScatter`."""
        options = self._sum
        if self._is_nccl and scale == 1.0 / self._size:
            options, scale = self._mean, 1.0
        is_cast = output.dtype != input.dtype
        received = input.new_empty(output.shape) if is_cast else output
        pair = (as_real(received), as_real(input)) if input.is_complex() else (received, input)
        group = self._group
        work = reduce_scatter_base_of(issuers.get(group, group))(*pair, options)
        self._order.posted = weakref.ref(work)
        terms = received[None] if is_cast else None
        return PendingReduction(work, output, input, terms, scale, group)


class UnevenSum(SumAlgorithm):
    """Sums parts of any sizes by NCCL."""

    def start(
        self, output: Tensor, input: Tensor, scratch: Tensor | None, scale: float
    ) -> PendingReduction:
        """Start summing; afterwards other ranks' parts of `input` are undefined."""
        parts = cut_in_parts(input, self._group, self._numels)
        own = parts[self._rank]
        own_term = None if own.data_ptr() == output.data_ptr() else own[None]
        reals = [as_real(part) for part in parts]
        work = self._group.reduce_scatter([reals[self._rank]], [reals], self._sum)
        return PendingReduction(work, output, input, own_term, scale, self._group)


class _ExchangedSum(SumAlgorithm):
    """Sums by messages from rank to rank; with two ranks the output receives the other's term."""

    def scratch_parts(self, *, in_place: bool) -> int:
        return self._size if self._size > 2 else int(in_place)

    def start(
        self, output: Tensor, input: Tensor, scratch: Tensor | None, scale: float
    ) -> PendingReduction:
        is_even = self._numels is None
        cut = input.view(self._size, -1).unbind() if is_even else None
        slices = dict(enumerate(cut or cut_in_parts(input, self._group, self._numels)))
        own = slices.pop(self._rank)
        if self._size > 2:
            assert scratch is not None
            terms = scratch.view(self._size, own.numel())
            receives = {rank: terms[rank] for rank in slices}
        else:
            # The output receives the other's term, `finish` adds ours. In place, the output already
            # is ours, so the scratch receives the other's.
            terms, receiver = (own, output) if scratch is None else (scratch, scratch)
            receives = dict.fromkeys(slices, receiver)
        for parts in (slices, receives) if input.is_complex() else ():
            parts.update({rank: as_real(part) for rank, part in parts.items()})
        work = exchange(slices.items(), receives.items(), self._group, self._order)
        if self._size > 2:  # while messages travel
            terms[self._rank].copy_(own)
        elif scratch is not None and output.data_ptr() != own.data_ptr():
            output.copy_(own)
        return PendingReduction(work, output, input, terms, scale, self._group)


class _AllToAllSum(SumAlgorithm):
    """Sums by an all-to-all of the terms, which each rank adds up."""

    def scratch_parts(self, *, in_place: bool) -> int:
        return self._size

    def start(
        self, output: Tensor, input: Tensor, scratch: Tensor | None, scale: float
    ) -> PendingReduction:
        assert scratch is not None
        terms = scratch.view(self._size, output.numel())
        # As bytes, which every backend can send.
        sent, received = (tensor.view(-1).view(torch.uint8) for tensor in (input, terms))
        splits: tuple[list[int], list[int]] = ([], [])
        if self._numels is not None:
            nbytes = [numel * input.itemsize for numel in self._numels]
            splits = [nbytes[self._rank]] * self._size, nbytes
            sent = sent[: sum(nbytes)]
        work = self._group.alltoall_base(received, sent, *splits, dist.AllToAllOptions())
        return PendingReduction(work, output, input, terms, scale, self._group)


_MAX_ALL_TO_ALL_SIZE = 64


def _choose_sum(
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    device: torch.device,
    numels: Sequence[int] | None,
) -> type[SumAlgorithm]:
    """Choose how a sum is taken, see [Note: Low-precision sums] and [Note: Uneven shards]."""
    if is_exchange(group, device):
        return _ExchangedSum
    is_low = dtype in LOW_PRECISION and 1 < group.size() <= _MAX_ALL_TO_ALL_SIZE
    if is_low or (numels is not None and backend_name(group, device) != "nccl"):
        return _AllToAllSum
    return SumAlgorithm if numels is None else UnevenSum


class ReduceScatter:
    """A reduce-scatter, prepared once and started many times.

    Attributes:
        dtype, device: Of its input.
        launch_group: The group of the collective that it issues; None if that is unknown.
    """

    launch_group: dist.ProcessGroup | None

    def __init__(
        self,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
        numels: Sequence[int] | None = None,
    ) -> None:
        """Choose the algorithm; issues nothing.

        Inputs of uneven parts, `numels` as in `AllGather`, may be overwritten.
        """
        self.dtype, self.device, self.launch_group = dtype, device, group
        self._group, self._size, self._numels = group, group.size(), numels
        self._order = order_of(group)
        self._identities: dict[tuple[str, int], int] = {}
        self._algorithm = _choose_sum(group, dtype, device, numels)(group, device, numels)
        self._exchange_identity = make_exchange(group, self._order, device)

    def scratch_parts(self, *, in_place: bool) -> int:
        """Return the scratch memory for the ranks' terms, in shards.

        Args:
            in_place: Whether the output can't receive a term, because it is this rank's part of the
                input or has another dtype.
        """
        return self._algorithm.scratch_parts(in_place=in_place)

    def start(
        self,
        output: Tensor,
        input: Tensor,
        scratch: Tensor | None,
        scale: float = 1.0,
        *,
        unit: str = "a unit",
    ) -> PendingReduction:
        """Start summing `input` over the ranks, each rank keeping its own part, scaled.

        With one rank the output is a copy of the input, and nothing is issued.

        Args:
            output: Shape `(shard_numel,)`, this rank's part of the sum; it may be its part of
                `input`. If its dtype is wider, sums that are computed here are added up and scaled
                in it.
            input: Shape `(group.size() * shard_numel,)`.
            scratch: Memory for as many shards as `scratch_parts` says, None for none.
            scale: The factor for the sum.
            unit: What is reduced, for messages.
        """
        if self._size == 1:
            return PendingReduction(DONE, output.copy_(input), input, None, scale)
        if trace.logs:
            nbytes = payload(input, self._numels)
            trace.record("reduce_scatter", self._group.group_name, nbytes)
        key = unit, input.numel()
        identity = self._identities.get(key)
        if identity is None:
            nbytes = payload(input, self._numels)
            what = f"the reduction of {unit}"
            identity = identify(what, "reduce_scatter", nbytes, is_of_step=True)
            self._identities[key] = identity
        order = self._order  # of the group's collectives; as its `note` does, without a call
        if len(order.issued) > MAX_ISSUED:
            order.fold()
        order.issued.append(identity)
        if self._exchange_identity is not None and order.is_checked:
            self._exchange_identity(False)
        return self._algorithm.start(output, input, scratch, scale)
