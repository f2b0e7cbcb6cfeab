"""Exchanges of identities, by which ranks know that they are about to issue the same collective."""

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
    """Return what comes before each collective of a group's backend; None for messages.

    None too for torch's fake backend, which has no other ranks.
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
    """Wait until all ranks are about to issue the collective that was entered last.

    [Note: First steps]
    Before a backend's collective the ranks exchange the identity of what they are about to issue,
    and its position: 16 bytes, always, so it can't fail as collectives of other sizes do. If they
    differ, all ranks raise, and nothing was written. The host waits for it. So it ends when twice
    as many as have come since it began have come again without another one, which all ranks see at
    the same position. It begins again when a step of any rank has had a new one, as after a change
    of structure: the flags of its backward tell all ranks. `check_order="always"` keeps it on. It
    always comes before what is rare: not a step asks for it, but a function that the program has
    called, and before collectives of gloo, which aborts the process where sizes differ.
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
        order.note_agreed()


def _is_same(own: int, group: dist.ProcessGroup, device: torch.device) -> bool:
    numbers = torch.tensor([own, -own], device=device)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    group.allreduce([numbers], options).wait()
    largest, smallest = numbers.tolist()
    return bool(largest == -smallest)
