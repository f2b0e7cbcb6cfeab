"""Exchanges of identities, by which ranks know that they are about to issue the same collective."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from composable_shard.comm.devices import HOST, backend_name, is_capturing, is_exchange
from composable_shard.comm.order import LOWEST_TAG, GroupOrder
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
        order.check_next()
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
    called.

    Gloo aborts the process where tensors of different sizes meet. So there identities go ahead
    later too, where the next collective is not one that has always followed, or may be of another
    size as far as all ranks know. They travel by messages then, which never meet collectives: a
    rank that differs waits for an answer, the others in a collective, until the thread of [Note:
    Watch] finds out.
    """
    if not (is_rare or order.is_checked) or group.size() == 1 or is_capturing(device):
        return
    backend = backend_name(group, device)
    if backend == "fake" or not (is_rare or order.is_exchanged or not order.is_expected):
        return
    issued = order.issued
    own = hash((order.num_folded, len(issued), issued[-1])) % (1 << 62)
    is_known_to_come = backend != "gloo" or order.is_exchanged
    try:
        is_same = (_is_same if is_known_to_come else _is_same_by_messages)(own, group, device)
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


def _is_same_by_messages(own: int, group: dist.ProcessGroup, _: torch.device) -> bool:
    """Send a number to the first rank, which compares and answers."""
    sent = torch.tensor([own], device=HOST)
    tag = LOWEST_TAG - 1  # of no collective: those that differ meet
    answer, others = torch.zeros(1, device=HOST), range(1, group.size())
    if group.rank() == 0:
        found = [torch.empty_like(sent) for _ in others]
        for work in [
            group.recv([each], rank, tag) for rank, each in zip(others, found, strict=True)
        ]:
            work.wait()
        answer.fill_(all(int(each) == own for each in found))
        works = [group.send([answer], rank, tag) for rank in others]
    else:
        works = [group.send([sent], 0, tag), group.recv([answer], 0, tag)]
    for work in works:
        work.wait()
    return bool(answer)
