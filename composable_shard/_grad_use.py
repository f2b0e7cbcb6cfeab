"""Tell all ranks whether any of them has gradients, and of which parameters."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist

from composable_shard import _collectives
from composable_shard._flat_param import FlatParamHandle

__all__ = ["LATE", "exchange_use", "is_any_rank"]

LATE = 2  # some rank has gradients that are not reduced yet, see [Note: Buckets]


def is_any_rank(flag: bool, handles: Collection[FlatParamHandle]) -> bool:
    """Return whether `flag` is set on any rank that has the handles; only others wait.

    One all-reduce of a byte for each process group.
    """
    found = {handle.shard_group.joint_groups: handle.shard_group.device for handle in handles}
    for joint_groups, device in found.items():
        for group in joint_groups:
            sent = torch.tensor([flag], dtype=torch.uint8, device=device)
            work = _collectives.all_reduce(sent, group, dist.ReduceOp.MAX)
            if not flag:
                work.wait()
                flag = bool(sent.item())
    return flag


def exchange_use(
    handles: list[FlatParamHandle], buckets: Collection[FlatParamHandle]
) -> list[list[int]]:
    """Return for each handle which parameters any rank used, so that the others keep no gradient.

    One all-reduce of a byte for each parameter, for each process group. Only a rank that lacks a
    gradient waits for it; the others know that all were used.

    Args:
        handles: The same ones on all ranks, in the same order.
        buckets: Those of which another rank may have gradients left; then every rank waits.

    Returns:
        For each handle and each of its parameters 0 where no rank used it, `LATE` or 1 else.
    """
    flags = {handle: _flags(handle, handle in buckets) for handle in handles}
    groups: dict[tuple[dist.ProcessGroup, ...], list[FlatParamHandle]] = {}
    for handle in handles:
        groups.setdefault(handle.shard_group.joint_groups, []).append(handle)
    for joint_groups, members in groups.items():
        used = [flag for handle in members for flag in flags[handle]]
        device = members[0].shard_group.device
        if all(used) and not any(handle in buckets for handle in members):
            for group in joint_groups:
                sent = torch.ones(len(used), dtype=torch.uint8, device=device)
                _collectives.all_reduce(sent, group, dist.ReduceOp.MAX)
            continue
        sent = torch.tensor(used, dtype=torch.uint8).to(device)
        for group in joint_groups:
            _collectives.all_reduce(sent, group, dist.ReduceOp.MAX).wait()
        received = iter(sent.tolist())
        for handle in members:
            flags[handle] = [next(received) for _ in handle.entries]
    return [flags[handle] for handle in handles]


def _flags(handle: FlatParamHandle, is_bucket: bool) -> list[int]:
    is_late = is_bucket and any(param.grad is not None for param in handle.unsharded_params)
    return [LATE if used and is_late else int(used) for used in handle.grad.used]
