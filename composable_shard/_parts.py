"""How the ranks' parts of a tensor are sent where they are not all of one size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard import _trace
from composable_shard._exchange import Waitable, Works, exchange
from composable_shard._trace import INSIDE

__all__ = ["as_real", "cut_in_parts", "gather_parts", "gather_pieces", "reduce_parts"]


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
    if _trace.logs:
        _trace.record("gather" if to_first else "all_gather", group.group_name, nbytes)
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
    return group._get_backend(device).name().lower() == "nccl"
