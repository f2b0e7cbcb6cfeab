"""Clip gradients by their norm over all ranks, with one collective."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    model_or_params: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients so that their norm over all parameters is at most `max_norm`.

    Exact over sharded and plain parameters together; the result is the same on all ranks. One
    all-reduce of one element for each gradient and process group. Call it on every rank.

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
        params = list(model_or_params.parameters())
    elif isinstance(model_or_params, Tensor):
        params = [model_or_params]  # type: ignore[list-item]
    else:
        params = list(model_or_params)  # type: ignore[arg-type]
    grads = [param.grad for param in params if param.grad is not None]
    # foreach: the norms of a list come from one collective, those of single tensors from many.
    norm = get_total_norm(grads, norm_type, error_if_nonfinite, foreach=True if grads else None)
    clip_grads_with_norm_(params, max_norm, norm, foreach=True if grads else None)
    return norm
