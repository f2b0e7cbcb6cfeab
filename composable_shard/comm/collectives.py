"""Collectives that nothing prepares, one function each: all-reduces, broadcasts, occasional ones.

The gather and the reduction of a unit, `AllGather` and `ReduceScatter` of `algorithms`, are
prepared once and started in each step. All call the process group's own methods, which are the same
in every supported torch version (2.13 renames the Python functions above them) and cost less host
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard.comm import trace
from composable_shard.comm.algorithms import AllGather
from composable_shard.comm.calls import function_called
from composable_shard.comm.devices import (
    Waitable,
    as_real,
    is_exchange,
)
from composable_shard.comm.devices import abandon as abandon
from composable_shard.comm.identity_exchange import exchange_identity
from composable_shard.comm.launches import issuers
from composable_shard.comm.messages import MAX_SMALL_NBYTES, MessageGroup, Works
from composable_shard.comm.messages import wait_for_interrupted as wait_for_interrupted
from composable_shard.comm.order import GroupOrder, identify, order_of


def _enter(
    group: dist.ProcessGroup, kind: str, nbytes: int, what: str | None, digest_nbytes: int = 0
) -> GroupOrder:
    """Record a collective that is issued now; return the group's order.

    Args:
        kind: For the log.
        nbytes: Of the full-size payload.
        what: What it is for; None to name the function that the program has called.
        digest_nbytes: Bytes of the digest that are sent with it.
    """
    if trace.logs:
        trace.record(kind, group.group_name, nbytes)
    order = order_of(group)
    is_of_step = kind == "all_reduce" and what is not None
    nbytes += digest_nbytes
    order.enter(identify(what or function_called(), kind, nbytes, is_of_step=is_of_step))
    return order


def _issuer_of(
    group: dist.ProcessGroup,
    device: torch.device,
    order: GroupOrder,
    *,
    is_rare: bool = False,
    is_large: bool = False,
) -> Any:
    """Return the object that issues the noted collective: messages, or the backend after an
    exchange, perhaps with others.

    Args:
        group: Its ranks.
        device: Of the tensors.
        order: Of the group.
        is_rare: A function of the user's asks for it, and not a step.
        is_large: Whether messages from each rank to each would take longer.
    """
    has_messages = is_exchange(group, device)
    if has_messages and is_large:
        order.check_always()
    if not has_messages or is_large:
        exchange_identity(group, order, device, is_rare)
        return issuers.get(group, group)
    return MessageGroup(group, order)


def _started(work: Waitable, group: dist.ProcessGroup) -> Waitable:
    """Wrap a started collective so that errors of a backend say what each rank does."""
    return Works([work], group) if isinstance(work, dist.Work) else work


def announce(
    group: dist.ProcessGroup, device: torch.device, kind: str, nbytes: int, what: str
) -> None:
    """Enter a collective that a comm hook will issue in a step; ranks that differ fail."""
    order = order_of(group)
    order.enter(identify(what, kind, nbytes, is_of_step=True))
    order.check_always()
    exchange_identity(group, order, device, is_rare=False)


def all_gather(
    output: Tensor,
    shard: Tensor,
    group: dist.ProcessGroup,
    numels: Sequence[int] | None = None,
    *,
    what: str | None = None,
    is_of_step: bool = False,
) -> Waitable:
    """Start gathering every rank's shard into `output`, as `AllGather` does."""
    prepared = AllGather(output, shard, group, numels, name=what or function_called())
    return _started(prepared.start(is_rare=not is_of_step), group)


def all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    *,
    what: str | None = None,
    digest_nbytes: int = 0,
) -> Waitable:
    """Start reducing `tensor` in place over all ranks; any shape, the same on every rank.

    Args:
        what: What it is for, for messages; None to name the function that was called.
        digest_nbytes: Number of bytes that are the digest, for the log: [Note: Digest of a step].
    """
    order = _enter(group, "all_reduce", tensor.nbytes - digest_nbytes, what, digest_nbytes)
    is_large = group.size() > 2 and tensor.nbytes > MAX_SMALL_NBYTES
    issuer = _issuer_of(group, tensor.device, order, is_large=is_large)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(op)
    return _started(issuer.allreduce([as_real(tensor)], options), group)


def broadcast(
    tensor: Tensor, group_rank: int, group: dist.ProcessGroup, *, what: str | None = None
) -> Waitable:
    """Start sending `tensor` from the rank with this number *in the group* to all others."""
    order = _enter(group, "broadcast", tensor.nbytes, what)
    issuer = _issuer_of(group, tensor.device, order, is_rare=what is None)
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = group_rank, 0
    return _started(issuer.broadcast([as_real(tensor)], options), group)


def all_gather_uneven(
    local: Tensor, numels: list[int], group: dist.ProcessGroup, *, what: str | None = None
) -> Tensor:
    """Gather and join 1-D shards of different sizes; waits, for occasional use.

    Args:
        local: Shape `(numels[rank],)`, this rank's shard, of any dtype.
        numels: Elements of every rank's shard, the same list on all ranks.
        what: What it is for, for messages.

    Returns:
        Shape `(sum(numels),)`, in rank order. One all-gather of the largest shard's size.
    """
    largest = max(numels)
    if largest == 0:
        return local.new_empty(0)
    padded = local.new_zeros(largest)
    padded[: local.numel()] = local
    output = local.new_empty(largest * group.size())
    # As bytes: not every backend can send every dtype (bool, float8, complex).
    all_gather(output.view(torch.uint8), padded.view(torch.uint8), group, what=what).wait()
    return torch.cat([part[:n] for part, n in zip(output.split(largest), numels, strict=True)])
