"""Every collective the library issues, one function each; the algorithm is chosen here alone.

The functions call the process group's own methods: they are the same in every supported torch
version (2.13 renames the Python functions above them), and cost less host time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from composable_shard import _trace
from composable_shard._trace import Event

__all__ = [
    "CollectiveLog",
    "PendingReduction",
    "all_gather",
    "all_gather_uneven",
    "all_reduce",
    "broadcast",
    "count_collectives",
    "is_inside",
    "is_local_sum",
    "reduce_scatter",
    "resolve_group",
]

_KINDS = frozenset({"all_gather", "reduce_scatter", "all_reduce", "broadcast"})
_depth = 0


@dataclass
class CollectiveLog:
    """The collectives issued in a `count_collectives` block."""

    log: list[Event] = field(default_factory=list)

    @property
    def events(self) -> list[Event]:
        """All collectives in order, each with its kind and the bytes of its full-size payload."""
        return [event for event in self.log if event.kind in _KINDS]

    def count(self, kind: str) -> int:
        """Return how many collectives of this kind were issued."""
        return sum(event.kind == kind for event in self.log)

    def nbytes(self, kind: str) -> int:
        """Return the full-size payload of all collectives of this kind, in bytes."""
        return sum(event.nbytes for event in self.log if event.kind == kind)


@contextmanager
def count_collectives() -> Iterator[CollectiveLog]:
    """Count the collectives issued by this process in the enclosed block."""
    with _trace.trace_events() as log:
        yield CollectiveLog(log)


def is_inside() -> bool:
    """Return whether a function of this module is running, so that observers can tell its work."""
    return _depth > 0


class _Inside:
    """Context that marks work of this module; a class, for it is entered in every collective."""

    __slots__ = ()

    def __enter__(self) -> None:
        global _depth  # noqa: PLW0603 -- a marker for observers only; nothing is decided by it
        _depth += 1

    def __exit__(self, *_: object) -> None:
        global _depth  # noqa: PLW0603 -- as above
        _depth -= 1


_INSIDE = _Inside()


def resolve_group(name: str) -> dist.ProcessGroup:
    """Return the process group of this name; tensors name their group so that they can pickle."""
    return _resolve_process_group(name)  # type: ignore[arg-type, no-any-return, unused-ignore]


def is_local_sum(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether a reduction exchanges slices and adds them here.

    Gloo's reduce-scatter takes two to three times as long as an all-to-all and a local sum, at
    every size measured. The exchange needs a receive buffer as large as the input.
    """
    return device.type == "cpu" and group.size() > 1 and _backend_name(group, device) == "gloo"


def _backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    return group._get_backend(device).name().lower()


def _real(tensor: Tensor) -> Tensor:
    """View a complex tensor as pairs of real numbers: no backend carries complex ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def all_gather(output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start gathering every rank's shard into `output`.

    Args:
        output: Shape `(group.size() * shard_numel,)`; rank r's shard lands in its r-th part.
        shard: Shape `(shard_numel,)`, this rank's.
        group: The ranks that take part.

    Returns:
        The work to wait for before `output` is read or `shard` is written.
    """
    if _trace.is_traced():
        _trace.record("all_gather", group.group_name, output.nbytes)
    with _INSIDE:
        return group._allgather_base(_real(output), _real(shard))


class PendingReduction:
    """A reduction in flight; `finish` must be called before its output is read."""

    __slots__ = ("_input", "_scale", "_terms", "_work", "output")

    def __init__(
        self, work: dist.Work, output: Tensor, input: Tensor, terms: Tensor | None, scale: float
    ) -> None:
        self._work = work
        self._input = input  # kept: the backend reads it until the work is done
        self._terms = terms  # (world_size, shard_numel): every rank's term of our slice
        self._scale = scale
        self.output = output

    def finish(self) -> Tensor:
        """Wait for the reduction and return its output, shape `(shard_numel,)`."""
        self._work.wait()
        if self._terms is not None or self._scale != 1.0:
            with _INSIDE:
                if self._terms is not None:
                    torch.sum(self._terms, 0, out=self.output)
                if self._scale != 1.0:
                    self.output.mul_(self._scale)
        return self.output

    def abandon(self) -> None:
        """Wait until the buffers are free for other use; errors of the collective are ignored."""
        with suppress(RuntimeError):
            self._work.wait()


def reduce_scatter(
    output: Tensor,
    input: Tensor,
    scratch: Tensor | None,
    group: dist.ProcessGroup,
    scale: float = 1.0,
) -> PendingReduction:
    """Start summing `input` over the ranks, each rank keeping its own part, scaled.

    Args:
        output: Shape `(shard_numel,)`, this rank's part of the sum.
        input: Shape `(group.size() * shard_numel,)`.
        scratch: Where `is_local_sum` holds: a buffer like `input` for the other ranks' terms.
        group: The ranks that take part.
        scale: What the sum is multiplied with.
    """
    if _trace.is_traced():
        _trace.record("reduce_scatter", group.group_name, input.nbytes)
    with _INSIDE:
        if scratch is not None:
            work = group.alltoall_base(_real(scratch), _real(input), [], [])
            terms = scratch.view(group.size(), output.numel())
            return PendingReduction(work, output, input, terms, scale)
        options = dist.ReduceScatterOptions()
        if scale == 1.0 / group.size() and _backend_name(group, output.device) == "nccl":
            options.reduceOp = dist.ReduceOp.AVG
            scale = 1.0
        work = group._reduce_scatter_base(_real(output), _real(input), options)
        return PendingReduction(work, output, input, None, scale)


def all_reduce(
    tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> dist.Work:
    """Start reducing `tensor` in place over all ranks; any shape, the same on every rank."""
    if _trace.is_traced():
        _trace.record("all_reduce", group.group_name, tensor.nbytes)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(op)
    with _INSIDE:
        return group.allreduce([tensor], options)


def broadcast(tensor: Tensor, group_rank: int, group: dist.ProcessGroup) -> dist.Work:
    """Start sending `tensor` from the rank with this number *in the group* to all others."""
    if _trace.is_traced():
        _trace.record("broadcast", group.group_name, tensor.nbytes)
    options = dist.BroadcastOptions()
    options.rootRank = group_rank
    options.rootTensor = 0
    with _INSIDE:
        return group.broadcast([_real(tensor)], options)


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
