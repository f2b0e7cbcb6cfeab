"""Every collective the library issues, one function each; the algorithm is chosen here alone.

The functions call the process group's own methods: they are the same in every supported torch
version (2.13 renames the Python functions above them), and cost less host time.

[Note: Low-precision sums]
A backend adds up 16-bit terms in 16 bits, rounded from rank to rank. An exchange sends the terms as
they are, and each rank adds up those of its shard in fp32, or in the output's dtype. Where there is
no exchange, an all-to-all does the same: it moves the bytes that a reduce-scatter moves, but needs
memory for the terms, and a message to each rank, for which the group must not be too large.
All-reduces, of shards that have copies, add up as the backend does it.

[Note: Uneven shards]
NCCL has collectives for lists of any sizes. On gloo they are exchanged as equal ones are; where
there is no exchange a gather is a broadcast from each rank that has something, and the terms of
sums are sent all to all: at 10 ranks and 64 kB to 16 MB that took 0.03 to 0.9 of the time of a
reduce to each rank. Where the largest shard is much larger than the mean, the memory for its terms
would be, too: then it is a reduce to each rank that has a shard, which takes about as long. Shards
padded to the largest take 2 to 40 times as long. (benchmarks/uneven.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from composable_shard import _trace
from composable_shard._collective_log import CollectiveLog, count_collectives
from composable_shard._exchange import Waitable, abandon, exchange
from composable_shard._parts import as_real, cut_in_parts, gather_parts, gather_pieces, reduce_parts
from composable_shard._sums import PendingReduction
from composable_shard._trace import INSIDE, is_inside

__all__ = [
    "CollectiveLog",
    "PendingReduction",
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
    "reduce_scatter",
    "resolve_group",
    "scatter",
    "scratch_parts",
]

_MAX_EXCHANGE_SIZE = 8
_MAX_ALL_TO_ALL_SIZE = 64
_LOW_PRECISION = (torch.float16, torch.bfloat16)


def resolve_group(name: str) -> dist.ProcessGroup:
    """Return the process group of this name; tensors name their group so that they can pickle."""
    return _resolve_process_group(name)  # type: ignore[arg-type, no-any-return, unused-ignore]


def scratch_parts(
    group: dist.ProcessGroup,
    input: Tensor,
    numels: Sequence[int] | None = None,
    *,
    in_place: bool,
) -> int:
    """Return how many shards' memory a reduction wants for the ranks' terms.

    Args:
        group: The ranks that take part.
        input: A tensor of the input's dtype and device.
        numels: As in `all_gather`.
        in_place: Whether the output can't receive a term: it is this rank's part of the input,
            or has another dtype.
    """
    way = _way_of_terms(group, input.dtype, input.device, numels)
    if way is None:
        return 0
    return group.size() if way == "all_to_all" or group.size() > 2 else int(in_place)


def _way_of_terms(
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    device: torch.device,
    numels: Sequence[int] | None,
) -> Literal["exchange", "all_to_all"] | None:
    """Return how the terms of a sum are sent, None where the backend adds them up.

    See [Note: Low-precision sums] and [Note: Uneven shards].
    """
    is_low = dtype in _LOW_PRECISION
    if not is_low and numels is not None and group.size() > 2 and _is_extreme(numels):
        return None
    if is_exchange(group, device):
        return "exchange"
    is_uneven = numels is not None and _backend_name(group, device) == "gloo"
    is_small = 1 < group.size() <= _MAX_ALL_TO_ALL_SIZE
    return "all_to_all" if is_small and (is_low or is_uneven) else None


def _is_extreme(numels: Sequence[int]) -> bool:
    """Whether all terms of the largest shard take more than twice the memory of all shards."""
    return max(numels) * len(numels) > 2 * sum(numels)


def is_exchange(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether shards are sent from rank to rank, and sums taken here.

    Gloo copies what its all-gather sends and receives through buffers of its own, and its
    reduce-scatter takes two to three times as long as an exchange and a local sum. Sending every
    shard straight from and to where it belongs took 0.4 to 0.9 of the time of the best collective
    at 2 and 4 ranks and 64 kB to 32 MB. With many ranks the number of messages would tell.
    """
    if device.type != "cpu" or not 1 < group.size() <= _MAX_EXCHANGE_SIZE:
        return False
    found = _has_gloo.get(group)
    if found is None:
        found = _has_gloo[group] = _backend_name(group, device) == "gloo"
    return found


# For the CPU. Asked several times for each unit.
_has_gloo: WeakKeyDictionary[dist.ProcessGroup, bool] = WeakKeyDictionary()


def _backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    return group._get_backend(device).name().lower()


def _payload(tensor: Tensor, numels: Sequence[int] | None) -> int:
    return tensor.nbytes if numels is None else sum(numels) * tensor.itemsize


def all_gather(
    output: Tensor,
    shard: Tensor,
    group: dist.ProcessGroup,
    numels: Sequence[int] | None = None,
) -> Waitable:
    """Start gathering every rank's shard into `output`.

    Args:
        output: Shape `(group.size() * shard_numel,)`; rank r's shard lands in its r-th part.
        shard: Shape `(shard_numel,)`, this rank's; it may be its part of `output`.
        group: The ranks that take part.
        numels: Elements of each rank's shard where they differ, the same on all ranks; `output` may
            be longer than all of them.

    Returns:
        The work to wait for before `output` is read or `shard` is written.
    """
    if _trace.logs:
        _trace.record("all_gather", group.group_name, _payload(output, numels))
    with INSIDE:
        output, shard = as_real(output), as_real(shard)
        if not is_exchange(group, output.device):
            if numels is None:
                return group._allgather_base(output, shard)
            return gather_parts(cut_in_parts(output, group, numels), shard, group)
        parts = dict(enumerate(cut_in_parts(output, group, numels)))
        own = parts.pop(group.rank())
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard.view(own.shape))
        return exchange([(rank, shard) for rank in parts], parts.items(), group)


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
    if _trace.logs:
        nbytes = shard.nbytes * group.size() if numels is None else _payload(shard, numels)
        _trace.record("gather", group.group_name, nbytes)
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
    if _trace.logs:
        nbytes = output.nbytes * group.size() if numels is None else _payload(output, numels)
        _trace.record("scatter", group.group_name, nbytes)
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


def reduce_scatter(
    output: Tensor,
    input: Tensor,
    scratch: Tensor | None,
    group: dist.ProcessGroup,
    scale: float = 1.0,
    numels: Sequence[int] | None = None,
) -> PendingReduction:
    """Start summing `input` over the ranks, each rank keeping its own part, scaled.

    With one rank the output is a copy of the input, and nothing is issued.

    Args:
        output: Shape `(shard_numel,)`, this rank's part of the sum; it may be its part of `input`.
            Where its dtype is wider, terms that are summed here are summed, and scaled, in it.
        input: Shape `(group.size() * shard_numel,)`.
        scratch: Memory for as many shards as `scratch_parts` says, None for none.
        group: The ranks that take part.
        scale: What the sum is multiplied with.
        numels: As in `all_gather`, of `input`, which may then be overwritten.
    """
    if group.size() == 1:
        return PendingReduction(None, output.copy_(input), input, None, scale)
    if _trace.logs:
        _trace.record("reduce_scatter", group.group_name, _payload(input, numels))
    with INSIDE:
        way = _way_of_terms(group, input.dtype, output.device, numels)
        if way == "exchange":
            return _exchange_terms(output, input, scratch, group, scale, numels)
        if way == "all_to_all":
            assert scratch is not None
            terms = scratch.view(group.size(), output.numel())
            work = _start_all_to_all(terms, input, group, numels)
            return PendingReduction(work, output, input, terms, scale)
        if numels is not None:
            parts = cut_in_parts(as_real(input), group, numels)
            own = cut_in_parts(input, group, numels)[group.rank()]
            own_term = None if own.data_ptr() == output.data_ptr() else own[None]
            return PendingReduction(reduce_parts(parts, group), output, input, own_term, scale)
        options = dist.ReduceScatterOptions()
        if scale == 1.0 / group.size() and _backend_name(group, output.device) == "nccl":
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
    if _trace.logs:
        _trace.record("all_to_all", group.group_name, input.nbytes)
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
    if _trace.logs:
        _trace.record("all_reduce", group.group_name, tensor.nbytes)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(op)
    with INSIDE:
        return group.allreduce([as_real(tensor)], options)


def broadcast(tensor: Tensor, group_rank: int, group: dist.ProcessGroup) -> dist.Work:
    """Start sending `tensor` from the rank with this number *in the group* to all others."""
    if _trace.logs:
        _trace.record("broadcast", group.group_name, tensor.nbytes)
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
