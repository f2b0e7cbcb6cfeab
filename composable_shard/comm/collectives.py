"""Every collective that is issued once, one function each.

`AllGather` and `ReduceScatter` are prepared once and started in each step. All call the process
group's own methods, which are the same in every supported torch version (2.13 renames the Python
functions above them) and cost less host time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard.comm import trace
from composable_shard.comm.algorithms import (
    AllGather,
    PendingReduction,
    ReduceScatter,
    Waitable,
    abandon,
    as_real,
    cut_in_parts,
    exchange,
    is_exchange,
    payload,
)
from composable_shard.comm.trace import CollectiveLog, count_collectives
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
    "resolve_group",
    "scatter",
]


def resolve_group(name: str) -> dist.ProcessGroup:
    """Return the process group of this name; tensors name their group so that they can pickle."""
    return resolve_process_group(name)


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
        nbytes = shard.nbytes * group.size() if numels is None else payload(shard, numels)
        trace.record("gather", group.group_name, nbytes)
    shard = as_real(shard)
    parts = [] if output is None else list(cut_in_parts(as_real(output), group, numels))
    if numels is None and not is_exchange(group, shard.device):
        shard = shard.view(-1)
        return group.gather([parts] if parts else [], [shard], dist.GatherOptions())
    if not parts:
        return exchange([(0, shard)], [], group)
    parts[0].copy_(shard.view(parts[0].shape))
    return exchange([], enumerate(parts[1:], 1), group)


def gather_pieces(
    outputs: Sequence[Sequence[Tensor]],
    pieces: Sequence[Tensor],
    nbytes: int,
    group: dist.ProcessGroup,
    *,
    to_first: bool,
) -> Waitable:
    """Start gathering ranges of the ranks' shards, each by a message into memory of its own.

    An all-gather, or with `to_first` a gather on the group's first rank alone.

    Args:
        outputs: For each rank of the group, where its ranges go; empty on a rank
            that does not receive.
        pieces: This rank's ranges, one-dimensional.
        nbytes: Bytes of all ranks' ranges.
        group: The ranks that take part.
        to_first: Only the first one receives.
    """
    if trace.logs:
        trace.record("gather" if to_first else "all_gather", group.group_name, nbytes)
    own = group.rank()
    targets = [rank for rank in range(1 if to_first else group.size()) if rank != own]
    sends = [(rank, as_real(piece)) for rank in targets for piece in pieces]
    received = [(rank, parts) for rank, parts in enumerate(outputs) if rank != own]
    receives = [(rank, as_real(part)) for rank, parts in received for part in parts]
    work = exchange(sends, receives, group)
    # While the others' arrive.
    for output, piece in zip(outputs[own] if outputs else (), pieces, strict=bool(outputs)):
        output.copy_(piece)
    return work


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
        nbytes = output.nbytes * group.size() if numels is None else payload(output, numels)
        trace.record("scatter", group.group_name, nbytes)
    output = as_real(output)
    parts = [] if input is None else list(cut_in_parts(as_real(input), group, numels))
    if numels is None and not is_exchange(group, output.device):
        output = output.view(-1)
        return group.scatter([output], [parts] if parts else [], dist.ScatterOptions())
    if not parts:
        return exchange([], [(0, output)], group)
    output.copy_(parts[0].view(output.shape))
    return exchange(enumerate(parts[1:], 1), [], group)


def all_to_all(output: Tensor, input: Tensor, group: dist.ProcessGroup) -> Waitable:
    """Start giving each rank its part of every rank's `input`.

    Args:
        output: Shape `(group.size() * part_numel,)`; what rank r sent lands in its r-th part.
        input: Likewise; its r-th part goes to rank r.
        group: The ranks that take part.
    """
    if trace.logs:
        trace.record("all_to_all", group.group_name, input.nbytes)
    if not is_exchange(group, output.device):
        # As bytes, which every backend carries.
        received, sent = (tensor.view(-1).view(torch.uint8) for tensor in (output, input))
        return group.alltoall_base(received, sent, [], [], dist.AllToAllOptions())
    sends, receives = (
        dict(enumerate(as_real(tensor).view(group.size(), -1).unbind()))
        for tensor in (input, output)
    )
    receives.pop(group.rank()).copy_(sends.pop(group.rank()))
    return exchange(sends.items(), receives.items(), group)


def all_reduce(
    tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> dist.Work:
    """Start reducing `tensor` in place over all ranks; any shape, the same on every rank."""
    if trace.logs:
        trace.record("all_reduce", group.group_name, tensor.nbytes)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(op)
    return group.allreduce([as_real(tensor)], options)


def broadcast(tensor: Tensor, group_rank: int, group: dist.ProcessGroup) -> dist.Work:
    """Start sending `tensor` from the rank with this number *in the group* to all others."""
    if trace.logs:
        trace.record("broadcast", group.group_name, tensor.nbytes)
    options = dist.BroadcastOptions()
    options.rootRank = group_rank
    options.rootTensor = 0
    return group.broadcast([as_real(tensor)], options)


def all_gather_uneven(local: Tensor, numels: list[int], group: dist.ProcessGroup) -> Tensor:
    """Gather and join 1-D shards of different sizes; waits, for occasional use.

    Args:
        local: Shape `(numels[rank],)`, this rank's shard, of any dtype.
        numels: Elements of every rank's shard, the same list on all ranks.
        group: The ranks that take part.

    Returns:
        Shape `(sum(numels),)`, in rank order. One all-gather of the largest shard's size.
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
