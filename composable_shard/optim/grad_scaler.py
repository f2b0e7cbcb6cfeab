"""A GradScaler for sharded gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from composable_shard.comm import all_reduce, resolve_group
from composable_shard.optim.other_owners import handles_of
from composable_shard.tensor import (
    FlatShard,
    note_write_to_local,
    reduction_groups,
)
from composable_shard.torch_private import (
    bump_version,
    unscale_,
)


class ShardedGradScaler(GradScaler):
    """A `torch.amp.GradScaler` for sharded parameters of any granularity.

    All ranks skip a step if any rank finds an inf or NaN, including ranks without gradients and
    ranks of other pipeline stages (the axis "pp" of the mesh). Issues one all-reduce of one element
    for each device and process group of the optimizer's sharded parameters. Torch's own scaler does
    this only for parameters that all ranks share.
    """

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        grads: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        with torch.no_grad():
            for local in _local_gradients(params, allow_fp16):
                grads[local.device, local.dtype].append(local)
            devices = {param.device for param in params if isinstance(param, FlatShard)}
            devices |= {device for device, _ in grads}
            found = {device: found_inf.to(device, copy=True) for device in devices}
            for (device, _), locals_ in grads.items():
                unscale_(locals_, found[device], inv_scale.to(device))
            for device, found_there in found.items():
                for name in _groups(params, device):
                    all_reduce(found_there, resolve_group(name), dist.ReduceOp.MAX).wait()
        return found


def _local_gradients(params: list[Tensor], allow_fp16: bool) -> Iterator[Tensor]:
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        if grad.dtype is torch.float16 and not allow_fp16:
            raise ValueError("Attempting to unscale FP16 gradients.")
        if isinstance(grad, FlatShard):
            note_write_to_local(grad)
            bump_version((grad,))
            yield grad._local
        elif grad.is_sparse:
            if grad.dtype is torch.float16:
                param.grad = grad = grad.coalesce()  # sums of duplicates may overflow
            yield grad._values()
        else:
            yield grad


def _groups(params: list[Tensor], device: torch.device) -> list[str]:
    """Return the groups of sharded parameters on a device, in the same order on all ranks.

    Groups whose ranks own other parameters come last, [Note: Other parameters].
    """
    shards = [p for p in params if isinstance(p, FlatShard) and p.device == device]
    names = dict.fromkeys(name for p in shards for name in reduction_groups(p._shard_spec))
    stages = dict.fromkeys(
        handle.shard_group.pipeline_group.group_name
        for handle in handles_of(shards)
        if handle.shard_group.pipeline_group is not None
    )
    return [*names, *stages]
