"""Exchanges of identities: ranks check that they will issue the same collective."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from composable_shard.comm.devices import backend_name, is_capturing, is_exchange
from composable_shard.comm.order import GroupOrder
from composable_shard.comm.watch import fail


def make_exchange(
    group: dist.ProcessGroup, order: GroupOrder, device: torch.device
) -> Callable[[bool], None] | None:
    """Return the exchange before each collective of a group's backend; None for messages.

    Also None for torch's fake backend, which has no other ranks.
    """
    backend = backend_name(group, device)
    if backend == "fake" or is_exchange(group, device):
        return None
    if backend == "gloo":
        order.check_always()
    return partial(exchange_identity, group, order, device)


def exchange_identity(
    group: dist.ProcessGroup, order: GroupOrder, device: torch.device, is_rare: bool
) -> None:
    """Wait until all ranks are ready to issue the collective that was entered last.

    [Note: First steps]
    Before a backend's collective the ranks exchange its identity and position: always 16 bytes, so
    that the exchange itself can't fail because sizes differ. If the identities differ, all ranks
    raise before anything is written. The host waits for each exchange, so exchanges end at some
    point, the same on all ranks: when more than 2 n collectives have come since the last identity
    that was new, of n different ones (`GroupOrder.count_agreed`). Exchanges begin again after a
    step in which any rank had a new identity, for example after a change of structure; the flags of
    the backward announce it. `check_order="always"` keeps them on. Two kinds of collectives always
    have an exchange: collectives of functions that the program calls, and collectives of gloo,
    which aborts the process if sizes differ.
    """
    if not (is_rare or order.is_checked) or group.size() == 1 or is_capturing(device):
        return
    backend = backend_name(group, device)
    if backend == "fake" or not (is_rare or order.is_exchanged or backend == "gloo"):
        return
    issued = order.issued
    own = hash((order.num_folded, len(issued), issued[-1])) % (1 << 62)
    try:
        is_same = _is_same(own, group, device)
    except RuntimeError as error:
        fail(error, group)
    if not is_same:
        fail(RuntimeError("The ranks were about to issue different collectives."), group)
    if not is_rare:
        order.count_agreed()


def _is_same(own: int, group: dist.ProcessGroup, device: torch.device) -> bool:
    numbers = torch.tensor([own, -own], device=device)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    group.allreduce([numbers], options).wait()
    largest, smallest = numbers.tolist()
    return bool(largest == -smallest)
