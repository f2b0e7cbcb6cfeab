"""Loss scaling where a gradient may be on one rank alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from composable_shard._collectives import all_reduce, resolve_group
from composable_shard._flat_shard import FlatShard
from composable_shard._operands import note_write
from composable_shard._reduction_rules import reduction_groups

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(GradScaler):
    """A `torch.amp.GradScaler` for sharded parameters of any granularity.

    All ranks look for infs and NaNs together, and skip a step together, also where a rank has no
    gradients: one all-reduce of one element for each device and process group of the optimizer's
    sharded parameters, whatever gradients there are. Torch's own does the same for parameters that
    all ranks share.
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
                torch._amp_foreach_non_finite_check_and_unscale_(
                    locals_, found[device], inv_scale.to(device)
                )
            for device, name in _groups(params):
                all_reduce(found[device], resolve_group(name), dist.ReduceOp.MAX).wait()
        return found


def _local_gradients(params: list[Tensor], allow_fp16: bool) -> Iterator[Tensor]:
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        if grad.dtype is torch.float16 and not allow_fp16:
            raise ValueError("Attempting to unscale FP16 gradients.")
        if isinstance(grad, FlatShard):
            note_write(grad)
            yield grad._local
        elif grad.is_sparse:
            if grad.dtype is torch.float16:
                param.grad = grad = grad.coalesce()  # sums of duplicates may overflow
            yield grad._values()
        else:
            yield grad


def _groups(params: list[Tensor]) -> dict[tuple[torch.device, str], None]:
    """Return the devices and groups of sharded parameters, in an order that all ranks share."""
    return {
        (param.device, name): None
        for param in params
        if isinstance(param, FlatShard)
        for name in reduction_groups(param._shard_spec)
    }
