"""Elementwise methods of FlatShards that skip the dispatcher, where it has nothing to do.

[Note: Direct ops]
An op on a tensor subclass costs the host five times what it costs on the slice: an optimizer that
steps one parameter after the other calls eight per parameter. With autograd off and no mode active
the dispatcher only finds the rule of the op, and for shards of one range and numbers the rule only
runs the op on the slices. These methods do that at once. Whatever else they are given, they pass on
unchanged: to the rules, which know the rest and raise the errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from composable_shard.tensor.shard_spec import ShardSpec, WriteGuard
from composable_shard.torch_private import bump_version, num_dispatch_modes, num_function_modes

__all__ = ["DirectOps"]


_grad_enabled = torch.is_grad_enabled


def _slices(shard: DirectOps, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """Return the arguments with slices in place of shards; None where the rules must decide."""
    if _grad_enabled() or num_dispatch_modes() or num_function_modes():
        return None
    spec = shard._shard_spec
    slices = []
    for arg in args:
        kind = type(arg)
        if kind is float or kind is int:
            slices.append(arg)
        elif isinstance(arg, DirectOps) and arg._shard_spec is spec:
            slices.append(arg._local)
        else:
            return None
    for value in kwargs.values():
        if type(value) is not float and type(value) is not int:
            return None
    return slices


def _in_place(name: str) -> Callable[..., Any]:
    plain = getattr(Tensor, name)

    def run(self: DirectOps, *args: Any, **kwargs: Any) -> Any:
        slices = _slices(self, args, kwargs)
        if slices is None:
            return plain(self, *args, **kwargs)
        try:
            if self._guard is not None:
                self._guard.note_write(self._shard_spec.label.fqn)
            # Autograd may have saved the shard for a backward. Raises for inference tensors.
            bump_version((cast("Tensor", self),))
            plain(self._local, *slices, **kwargs)
        except RuntimeError:  # the rules say more about it, or can do it
            return plain(self, *args, **kwargs)
        return self

    return _named(run, name)


def _functional(name: str) -> Callable[..., Any]:
    plain = getattr(Tensor, name)

    def run(self: DirectOps, *args: Any, **kwargs: Any) -> Any:
        slices = _slices(self, args, kwargs)
        if slices is None:
            return plain(self, *args, **kwargs)
        try:
            local = plain(self._local, *slices, **kwargs)
        except RuntimeError:
            return plain(self, *args, **kwargs)
        return self._shard_of(local)

    return _named(run, name)


def _named(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    run.__name__ = name
    run.__qualname__ = f"FlatShard.{name}"
    run.__doc__ = f"Run `torch.Tensor.{name}` on the slices alone."
    return run


class DirectOps:
    """The elementwise methods that optimizers call on each parameter; [Note: Direct ops]."""

    __slots__ = ()

    _local: Tensor
    _shard_spec: ShardSpec
    _guard: WriteGuard | None

    def _shard_of(self, local: Tensor) -> Any:
        """Return a shard of the same range with other elements."""
        raise NotImplementedError

    add = _functional("add")
    sqrt = _functional("sqrt")
    __truediv__ = _functional("__truediv__")
    add_ = _in_place("add_")
    addcdiv_ = _in_place("addcdiv_")
    addcmul_ = _in_place("addcmul_")
    div_ = _in_place("div_")
    lerp_ = _in_place("lerp_")
    mul_ = _in_place("mul_")
    sub_ = _in_place("sub_")
