"""How collectives move data: own point-to-point algorithms, and the backend's.

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

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Literal, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard.comm import trace
from composable_shard.comm.trace import INSIDE
from composable_shard.torch_private import backend_of

__all__ = [
    "PendingReduction",
    "Waitable",
    "Works",
    "abandon",
    "add_up",
    "as_real",
    "backend_name",
    "cut_in_parts",
    "exchange",
    "gather_parts",
    "gather_pieces",
    "is_exchange",
    "reduce_parts",
    "way_of_terms",
]


_TAGS = range(1 << 20, 1 << 24)  # out of the way of tags that users choose
_ABANDONED_TIMEOUT = timedelta(seconds=10)


class Waitable(Protocol):
    """What a collective that was started returns."""

    def wait(self) -> object:
        """Block, on CPU, or make the current stream wait until the collective is done."""


def abandon(work: Waitable) -> None:
    """Wait until the work's buffers are free for other use; the collective's errors are ignored."""
    with suppress(Exception):  # of any kind: the work may be a user's
        work.wait()


class Works:
    """Several pieces of work that are waited for together."""

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for each piece, once."""
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def __del__(self) -> None:
        # Nobody waits any more, after an error perhaps. Gloo closes the connection to a rank for
        # good when a message in flight loses its buffer.
        for work in self._works:
            with suppress(RuntimeError):
                work.wait(_ABANDONED_TIMEOUT)


# By group, for ranks share only some of them. Not by its name, which comes again after
# destroy_process_group: then the ranks of the next one need not have been in the same ones before.
_tags: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()


def exchange(
    sends: Iterable[tuple[int, Tensor]],
    receives: Iterable[tuple[int, Tensor]],
    group: dist.ProcessGroup,
) -> Waitable:
    """Start sending and receiving tensors, by rank in the group; nothing where one is empty.

    What one rank sends to another arrives in that order.

    Sends are posted first: between two gloo ranks an exchange of 0.4 to 1 MB took 0.2 to 0.5 ms so,
    and 0.7 to 1.5 ms with the receives first, which wake the other rank for each message.
    """
    # One tag for each exchange: the group's ranks take part in the same ones in the same order.
    tags = _tags.get(group)
    if tags is None:
        tags = _tags[group] = itertools.cycle(_TAGS)
    tag = next(tags)
    works = [group.send([tensor], rank, tag) for rank, tensor in sends if tensor.numel()]
    works += [group.recv([tensor], rank, tag) for rank, tensor in receives if tensor.numel()]
    return Works(works)


def as_real(tensor: Tensor) -> Tensor:
    """View a complex tensor as pairs of real numbers: no backend carries complex ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def cut_in_parts(
    tensor: Tensor, group: dist.ProcessGroup, numels: Sequence[int] | None
) -> Sequence[Tensor]:
    """Return a view of each rank's part of a tensor.

    Args:
        tensor: Elements along the first dimension; behind the last part there may be more.
        group: The ranks.
        numels: Elements of each rank's part; None where all are the same.
    """
    if numels is None:
        return tensor.view(group.size(), -1).unbind()
    return tensor[: sum(numels)].split_with_sizes(list(numels))


def gather_parts(parts: Sequence[Tensor], shard: Tensor, group: dist.ProcessGroup) -> Waitable:
    """Start gathering parts of any sizes, each straight to its place: a broadcast from each rank.

    NCCL makes one launch of them.
    """
    if _is_nccl(group, shard.device):
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
    return Works(works)


def gather_pieces(
    outputs: Sequence[Sequence[Tensor]],
    pieces: Sequence[Tensor],
    nbytes: int,
    group: dist.ProcessGroup,
    *,
    to_first: bool,
) -> Waitable:
    """Start gathering pieces of the ranks, each straight into memory of its own: a message each.

    An all-gather, or with `to_first` a gather on the group's first rank alone.

    Args:
        outputs: For each rank of the group where its pieces go, this one's too; empty on a rank
            that does not receive.
        pieces: This rank's, one-dimensional.
        nbytes: Of the pieces of all ranks.
        group: The ranks that take part.
        to_first: Only the first one receives.
    """
    if trace.logs:
        trace.record("gather" if to_first else "all_gather", group.group_name, nbytes)
    own = group.rank()
    with INSIDE:
        targets = [rank for rank in range(1 if to_first else group.size()) if rank != own]
        sends = [(rank, as_real(piece)) for rank in targets for piece in pieces]
        received = [(rank, parts) for rank, parts in enumerate(outputs) if rank != own]
        receives = [(rank, as_real(part)) for rank, parts in received for part in parts]
        work = exchange(sends, receives, group)
        # While the others' arrive.
        for output, piece in zip(outputs[own] if outputs else (), pieces, strict=bool(outputs)):
            output.copy_(piece)
        return work


def reduce_parts(parts: Sequence[Tensor], group: dist.ProcessGroup) -> Waitable:
    """Start summing each part over the ranks, in place on the rank that it belongs to.

    A reduce to each rank; NCCL makes one launch of them. The other parts hold anything afterwards.
    """
    if _is_nccl(group, parts[0].device):
        return group.reduce_scatter(
            [parts[group.rank()]], [list(parts)], dist.ReduceScatterOptions()
        )
    works = []
    for rank, part in enumerate(parts):
        if part.numel():
            options = dist.ReduceOptions()
            options.rootRank = rank
            works.append(group.reduce([part], options))
    return Works(works)


def _is_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    return backend_name(group, device) == "nccl"


_CHUNK_NUMEL = 1 << 16


def add_up(output: Tensor, terms: Tensor) -> None:
    """Write the sum of terms; in the output's precision, where that is another one.

    Args:
        output: Shape `(numel,)`.
        terms: Shape `(num_terms, numel)`, added in order.
    """
    if output.dtype == terms.dtype:
        torch.sum(terms, 0, out=output)
        return
    output.copy_(terms[0])
    for term in terms[1:]:
        _add_term(output, term)


def _add_term(output: Tensor, term: Tensor) -> None:
    """Add a term of another dtype, in the output's precision."""
    # On CPU torch makes a copy of the term in the output's dtype: of a little at a time.
    pieces = term.split(_CHUNK_NUMEL)
    for own, piece in zip(output.split(_CHUNK_NUMEL), pieces, strict=True):
        own.add_(piece)


class PendingReduction:
    """A reduction in flight; `finish` must be called before its output is read."""

    __slots__ = ("_input", "_scale", "_terms", "_work", "output")

    def __init__(
        self,
        work: Waitable | None,
        output: Tensor,
        input: Tensor,
        terms: Tensor | None,
        scale: float,
    ) -> None:
        self._work = work
        self._input = input  # kept: the backend reads it until the work is done
        self._terms = terms  # our slice's terms, still to be added up; or the one that is
        self._scale = scale
        self.output = output

    def finish(self) -> Tensor:
        """Wait for the reduction and return its output, shape `(shard_numel,)`."""
        if self._work is not None:
            self._work.wait()
        if self._terms is None and self._scale == 1.0:
            return self.output
        with INSIDE:
            terms = self._terms
            if terms is not None and terms.dim() == 2:
                add_up(self.output, terms)
            elif terms is not None and terms.dtype == self.output.dtype:
                self.output.add_(terms)
            elif terms is not None:
                _add_term(self.output, terms)
            if self._scale != 1.0:
                self.output.mul_(self._scale)
        return self.output

    def abandon(self) -> None:
        """Wait until the buffers are free for other use; errors of the collective are ignored."""
        if self._work is not None:
            abandon(self._work)


_MAX_EXCHANGE_SIZE = 8
_MAX_ALL_TO_ALL_SIZE = 64
_LOW_PRECISION = (torch.float16, torch.bfloat16)


def way_of_terms(
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
    is_uneven = numels is not None and backend_name(group, device) == "gloo"
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
        found = _has_gloo[group] = backend_name(group, device) == "gloo"
    return found


# For the CPU. What is not made ready once, as gathers over small groups, asks each time.
_has_gloo: WeakKeyDictionary[dist.ProcessGroup, bool] = WeakKeyDictionary()


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend for a device; empty where there is none.

    Who only keeps a model there, as after `model.cpu()`, needs none; a collective says so itself.
    """
    try:
        return str(backend_of(group, device).name()).lower()
    except RuntimeError:
        return ""
