"""Clip gradients by their norm over all ranks, with one collective."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_

from composable_shard._flat_shard import FlatShard
from composable_shard._gradient_rules import norms_of

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    model_or_params: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients so that their norm over all parameters is at most `max_norm`.

    Exact over sharded and plain parameters together, of any granularity; the result is the same on
    all ranks. One all-reduce of one element for each sharded parameter and process group. Call it
    on every rank, with the same parameters; a rank may have no gradients at all.

    Args:
        model_or_params: A module, a parameter, or parameters.
        max_norm: The largest norm allowed.
        norm_type: Order of the norm; `float("inf")` for the largest absolute value.
        error_if_nonfinite: Raise instead of clipping where the norm is not finite.

    Returns:
        The norm before clipping, a plain 0-d tensor.

    Raises:
        RuntimeError: If `error_if_nonfinite` and the norm is infinite or NaN, on all ranks.
    """
    if isinstance(model_or_params, nn.Module):
        params: Sequence[Tensor] = list(model_or_params.parameters())
    elif isinstance(model_or_params, Tensor):
        params = [model_or_params]
    else:
        params = list(model_or_params)
    norm = _total_norm(params, float(norm_type))
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is non-finite ({norm.item()}), "
            "so they can't be clipped. Nothing was changed. Pass error_if_nonfinite=False to scale "
            "them anyway."
        )
    has_gradients = any(param.grad is not None for param in params)
    clip_grads_with_norm_(params, max_norm, norm, foreach=True if has_gradients else None)
    return norm


def _total_norm(params: Sequence[Tensor], order: float) -> Tensor:
    shards = [gradient for param in params if (gradient := _sharded_gradient(param)) is not None]
    norms = norms_of(shards, order)
    for param in params:
        grad = param.grad
        if grad is not None and not isinstance(grad, FlatShard):
            norm = torch.linalg.vector_norm(grad, order)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not norms:
        return torch.tensor(0.0)
    device = norms[0].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms]), order)
    return total


def _sharded_gradient(param: Tensor) -> FlatShard | None:
    """Return what all ranks must pass to one collective; None alike on all of them."""
    grad = param.grad
    if isinstance(grad, FlatShard) or not isinstance(param, FlatShard) or grad is not None:
        return grad if isinstance(grad, FlatShard) else None
    spec = param._shard_spec
    if spec.owner is None or spec.world_size == 1:
        return None
    # Its owner may have one, frozen or not: this rank adds nothing, as an owner without one.
    return FlatShard(param._local.new_empty(0), spec)
