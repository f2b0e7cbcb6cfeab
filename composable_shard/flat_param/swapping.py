"""Swap a user's Parameter object for a sharded one, and back: the object's identity stays."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from composable_shard.tensor import FlatShard
from composable_shard.torch_private import (
    post_accumulate_hooks_of,
    pre_accumulate_hooks_of,
    set_hooks,
    swap_tensors,
)


def swap_keeping_hooks(original: nn.Parameter, replacement: Tensor) -> None:
    """Make the object `original` be `replacement`, keeping its attributes and its hooks.

    `.grad` is left alone, and must be None if its dtype would not fit.
    """
    hooks, late_hooks = pre_accumulate_hooks_of(original), post_accumulate_hooks_of(original)
    replacement.__dict__.update(
        {key: value for key, value in original.__dict__.items() if key not in replacement.__dict__}
    )
    swap_parameter(original, replacement)
    set_hooks(original, hooks, late_hooks)


def swap_parameter(original: nn.Parameter, replacement: Tensor) -> None:
    """Make the object `original` be `replacement`: class, attributes, data; and the reverse.

    Like `torch.utils.swap_tensors`, which refuses tensors with weak references (LSTM and GRU keep
    some to their weights); such references still point to the same object.
    """
    done = []
    try:
        for swap in (_swap_slots, _swap_classes, _swap_attributes, swap_tensors):
            done.append((swap(original, replacement), swap))
    except BaseException:
        # Some of each object would be neither parameter. A swap is its own inverse.
        for _, swap in reversed(done):
            swap(original, replacement)
        raise


def _swap_slots(original: Tensor, replacement: Tensor) -> None:
    for name in ("_local_tensor", "_spec"):
        if hasattr(type(original), name):
            ours, theirs = getattr(original, name, None), getattr(replacement, name, None)
            setattr(original, name, theirs)
            setattr(replacement, name, ours)


def _swap_classes(original: Tensor, replacement: Tensor) -> None:
    original.__class__, replacement.__class__ = type(replacement), type(original)


def _swap_attributes(original: Tensor, replacement: Tensor) -> None:
    original.__dict__, replacement.__dict__ = replacement.__dict__, original.__dict__


def give_back(
    original: nn.Parameter, sharded: Tensor, grad: Tensor | None, attributes: dict[str, Any]
) -> None:
    """Undo `ParamEntry.replace`, also where it has failed or has not begun.

    Args:
        original: The user's Parameter object.
        sharded: The object that was swapped with it.
        grad: Its gradient before.
        attributes: Its attributes before.
    """
    if isinstance(original, FlatShard):
        swap_parameter(original, sharded)
    vars(original).update(attributes)
    original.grad = grad
