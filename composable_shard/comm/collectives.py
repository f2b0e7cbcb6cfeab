"""Every collective the library issues, one function each, by the algorithm of `_algorithms`.

The functions call the process group's own methods: they are the same in every supported torch
version (2.13 renames the Python functions above them), and cost less host time. What each step does
with the same buffers is made ready once: `AllGather`, `ReduceScatter`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard.comm import trace
from composable_shard.comm.algorithms import (
    PendingReduction,
    Waitable,
    abandon,
    as_real,
    backend_name,
    cut_in_parts,
    exchange,
    gather_parts,
    gather_pieces,
    is_exchange,
    reduce_parts,
    way_of_terms,
)
from composable_shard.comm.trace import INSIDE, CollectiveLog, count_collectives, is_inside
from composable_shard.torch_private import resolve_process_group

__all__ = [
    "AllGather",
    "CollectiveLog",
    "PendingReduction",
    "ReduceScatter",
    "Waitable",
    "abandon",
    "all_gather",
    "all_gather_uneven",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "count_collectives",
    "gather",
    "gather_pieces",
    "is_exchange",
    "is_inside",
    "resolve_group",
    "scatter",
]


def resolve_group(name: str) -> dist.ProcessGroup:
    """Return the process group of this name; tensors name their group so that they can pickle."""
    return resolve_process_group(name)


def _payload(tensor: Tensor, numels: Sequence[int] | None) -> int:
    return tensor.nbytes if numels is None else sum(numels) * tensor.itemsize


class AllGather:
    """An all-gather between buffers that keep their identity: made ready once, started often."""

    def __init__(
        self,
        output: Tensor,
        shard: Tensor,
        group: dist.ProcessGroup,
        numels: Sequence[int] | None = None,
    ) -> None:
        """Choose the algorithm and cut what it sends and receives; issues nothing.

        Args:
            output: Shape `(group.size() * shard_numel,)`; rank r's shard lands in its r-th part.
            shard: Shape `(shard_numel,)`, this rank's; it may be its part of `output`.
            group: The ranks that take part.
            numels: Elements of each rank's shard where they differ, the same on all ranks; `output`
                may be longer than all of them.
        """
        self._group = group
        self._nbytes = _payload(output, numels)
        self._output, self._shard = as_real(output), as_real(shard)
        self._is_exchange = is_exchange(group, output.device)
        self._parts: Sequence[Tensor] = ()
        if self._is_exchange or numels is not None:
            self._parts = cut_in_parts(self._output, group, numels)
        if self._is_exchange:
            self._own = self._parts[group.rank()]
            self._shard = self._shard.view(self._own.shape)
            self._receives = [item for item in enumerate(self._parts) if item[0] != group.rank()]
            self._sends = [(rank, self._shard) for rank, _ in self._receives]

    def start(self) -> Waitable:
        """Start gathering every rank's shard into the output.

        Returns:
            The work to wait for before the output is read or the shard is written.
        """
        group = self._group
        if trace.logs:
            trace.record("all_gather", group.group_name, self._nbytes)
        with INSIDE:
            if not self._parts:
                return group._allgather_base(self._output, self._shard)
            if not self._is_exchange:
                return gather_parts(self._parts, self._shard, group)
            if self._own.data_ptr() != self._shard.data_ptr():
                self._own.copy_(self._shard)
            return exchange(self._sends, self._receives, group)


def all_gather(
    output: Tensor,
    shard: Tensor,
    group: dist.ProcessGroup,
    numels: Sequence[int] | None = None,
) -> Waitable:
    """Start gathering every rank's shard into `output`, as `AllGather` does."""
    return AllGather(output, shard, group, numels).start()


def gather(
    output: Tensor | None,
    shard: Tensor,
    group: dist.ProcessGroup,
    numels: Sequence[int] | None = None,
) -> Waitable:
    """Start gathering every rank's shard on the group's first rank alone.

    Args:
        output: On the first rank: shape `(group.size() * shard_numel,)`, as in `all_gather`. None
            on the others.
        shard: Shape `(shard_numel,)`, this rank's.
        group: The ranks that take part.
        numels: As in `all_gather`.
    """
    if trace.logs:
        nbytes = shard.nbytes * group.size() if numels is None else _payload(shard, numels)
        trace.record("gather", group.group_name, nbytes)
    with INSIDE:
        shard = as_real(shard)
        parts = [] if output is None else list(cut_in_parts(as_real(output), group, numels))
        if numels is None and not is_exchange(group, shard.device):
            shard = shard.view(-1)
            return group.gather([parts] if parts else [], [shard], dist.GatherOptions())
        if not parts:
            return exchange([(0, shard)], [], group)
        parts[0].copy_(shard.view(parts[0].shape))
        return exchange([], enumerate(parts[1:], 1), group)


def scatter(
    output: Tensor,
    input: Tensor | None,
    group: dist.ProcessGroup,
    numels: Sequence[int] | None = None,
) -> Waitable:
    """Start giving each rank its part of a tensor that the group's first rank has.

    Args:
        output: Shape `(shard_numel,)`, this rank's part.
        input: On the first rank: shape `(group.size() * shard_numel,)`. None on the others.
        group: The ranks that take part.
        numels: As in `all_gather`.
    """
    if trace.logs:
        nbytes = output.nbytes * group.size() if numels is None else _payload(output, numels)
        trace.record("scatter", group.group_name, nbytes)
    with INSIDE:
        output = as_real(output)
        parts = [] if input is None else list(cut_in_parts(as_real(input), group, numels))
        if numels is None and not is_exchange(group, output.device):
            output = output.view(-1)
            return group.scatter([output], [parts] if parts else [], dist.ScatterOptions())
        if not parts:
            return exchange([], [(0, output)], group)
        output.copy_(parts[0].view(output.shape))
        return exchange(enumerate(parts[1:], 1), [], group)


class ReduceScatter:
    """Sums over the ranks of a group of which each keeps its part: made ready once.

    Attributes:
        dtype: The inputs'.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
        numels: Sequence[int] | None = None,
    ) -> None:
        """Choose the algorithm; issues nothing.

        Args:
            group: The ranks that take part.
            dtype: The inputs'.
            device: Likewise.
            numels: As in `AllGather`, of the inputs, which may then be overwritten.
        """
        self.dtype = dtype
        self._group = group
        self._size = group.size()
        self._numels = numels
        self._way = way_of_terms(group, dtype, device, numels)
        self._means = backend_name(group, device) == "nccl"
        self._options = dist.ReduceScatterOptions()

    def scratch_parts(self, *, in_place: bool) -> int:
        """Return how many shards' memory it wants for the ranks' terms.

        Args:
            in_place: Whether the output can't receive a term: it is this rank's part of the input,
                or has another dtype.
        """
        if self._way is None:
            return 0
        return self._size if self._way == "all_to_all" or self._size > 2 else int(in_place)

    def start(
        self, output: Tensor, input: Tensor, scratch: Tensor | None, scale: float = 1.0
    ) -> PendingReduction:
        """Start summing `input` over the ranks, each rank keeping its own part, scaled.

        With one rank the output is a copy of the input, and nothing is issued.

        Args:
            output: Shape `(shard_numel,)`, this rank's part of the sum; it may be its part of
                `input`. Where its dtype is wider, terms that are summed here are summed, and
                scaled, in it.
            input: Shape `(group.size() * shard_numel,)`.
            scratch: Memory for as many shards as `scratch_parts` says, None for none.
            scale: What the sum is multiplied with.
        """
        group, numels = self._group, self._numels
        if self._size == 1:
            return PendingReduction(None, output.copy_(input), input, None, scale)
        if trace.logs:
            trace.record("reduce_scatter", group.group_name, _payload(input, numels))
        with INSIDE:
            if self._way == "exchange":
                return _exchange_terms(output, input, scratch, group, scale, numels)
            if self._way == "all_to_all":
                assert scratch is not None
                terms = scratch.view(self._size, output.numel())
                work = _start_all_to_all(terms, input, group, numels)
                return PendingReduction(work, output, input, terms, scale)
            if numels is not None:
                parts = cut_in_parts(as_real(input), group, numels)
                own = cut_in_parts(input, group, numels)[group.rank()]
                own_term = None if own.data_ptr() == output.data_ptr() else own[None]
                return PendingReduction(reduce_parts(parts, group), output, input, own_term, scale)
            options = self._options
            if self._means and scale == 1.0 / self._size:
                options = dist.ReduceScatterOptions()
                options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
                scale = 1.0
            is_cast = output.dtype != input.dtype
            received = input.new_empty(output.shape) if is_cast else output
            work = group._reduce_scatter_base(as_real(received), as_real(input), options)
            return PendingReduction(work, output, input, received[None] if is_cast else None, scale)


def _exchange_terms(
    output: Tensor,
    input: Tensor,
    scratch: Tensor | None,
    group: dist.ProcessGroup,
    scale: float,
    numels: Sequence[int] | None,
) -> PendingReduction:
    """Send each rank its slice of `input`; with two ranks the output receives the other's term."""
    slices = dict(enumerate(cut_in_parts(input, group, numels)))
    own = slices.pop(group.rank())
    if group.size() > 2:
        assert scratch is not None
        terms = scratch.view(group.size(), own.numel())
        terms[group.rank()].copy_(own)
        receives = {rank: as_real(terms[rank]) for rank in slices}
    else:
        # In place the output is one of the two terms already.
        terms, receiver = (own, output) if scratch is None else (scratch, scratch)
        receives = dict.fromkeys(slices, as_real(receiver))
        if scratch is not None and output.data_ptr() != own.data_ptr():
            output.copy_(own)
    sends = {rank: as_real(part) for rank, part in slices.items()}
    work = exchange(sends.items(), receives.items(), group)
    return PendingReduction(work, output, input, terms, scale)


def all_to_all(output: Tensor, input: Tensor, group: dist.ProcessGroup) -> Waitable:
    """Start giving each rank its part of every rank's `input`.

    Args:
        output: Shape `(group.size() * part_numel,)`; what rank r sent lands in its r-th part.
        input: Likewise; its r-th part goes to rank r.
        group: The ranks that take part.
    """
    if trace.logs:
        trace.record("all_to_all", group.group_name, input.nbytes)
    with INSIDE:
        if not is_exchange(group, output.device):
            return _start_all_to_all(output, input, group)
        sends, receives = (
            dict(enumerate(as_real(tensor).view(group.size(), -1).unbind()))
            for tensor in (input, output)
        )
        receives.pop(group.rank()).copy_(sends.pop(group.rank()))
        return exchange(sends.items(), receives.items(), group)


def _start_all_to_all(
    output: Tensor,
    input: Tensor,
    group: dist.ProcessGroup,
    numels: Sequence[int] | None = None,
) -> dist.Work:
    # As bytes, which every backend carries.
    sent, received = (tensor.view(-1).view(torch.uint8) for tensor in (input, output))
    splits: tuple[list[int], list[int]] = ([], [])
    if numels is not None:
        sizes = [numel * input.itemsize for numel in numels]
        splits = [sizes[group.rank()]] * group.size(), sizes
        sent = sent[: sum(sizes)]
    return group.alltoall_base(received, sent, *splits, dist.AllToAllOptions())


def all_reduce(
    tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> dist.Work:
    """Start reducing `tensor` in place over all ranks; any shape, the same on every rank."""
    if trace.logs:
        trace.record("all_reduce", group.group_name, tensor.nbytes)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(op)
    with INSIDE:
        return group.allreduce([as_real(tensor)], options)


def broadcast(tensor: Tensor, group_rank: int, group: dist.ProcessGroup) -> dist.Work:
    """Start sending `tensor` from the rank with this number *in the group* to all others."""
    if trace.logs:
        trace.record("broadcast", group.group_name, tensor.nbytes)
    options = dist.BroadcastOptions()
    options.rootRank = group_rank
    options.rootTensor = 0
    with INSIDE:
        return group.broadcast([as_real(tensor)], options)


def all_gather_uneven(local: Tensor, numels: list[int], group: dist.ProcessGroup) -> Tensor:
    """Gather 1-D pieces of different sizes and join them; waits, for occasional use.

    Args:
        local: Shape `(numels[rank],)`, this rank's piece, of any dtype.
        numels: Elements of every rank's piece, the same list on all ranks.
        group: The ranks that take part.

    Returns:
        Shape `(sum(numels),)`, in rank order. One all-gather of the largest piece's size.
    """
    largest = max(numels)
    if largest == 0:
        return local.new_empty(0)
    padded = local.new_zeros(largest)
    padded[: local.numel()] = local
    output = local.new_empty(largest * group.size())
    # As bytes: not every backend carries every dtype (bool, float8, complex).
    all_gather(output.view(torch.uint8), padded.view(torch.uint8), group).wait()
    return torch.cat([part[:n] for part, n in zip(output.split(largest), numels, strict=True)])
