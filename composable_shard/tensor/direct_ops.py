"""Ops of optimizers that run on the slices at once, past the dispatcher.

[Note: Direct ops]
An op on a tensor subclass costs the host five times what it costs on a plain tensor, and an
optimizer that steps one parameter after the other calls eight per parameter. Where autograd records
nothing and no mode is active the dispatcher only finds the rule of the op, and for numbers and
shards of one range the rule only runs the op on the local tensors. These methods do so at once. All
other calls go unchanged to the rules, which also raise the errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from composable_shard.tensor.flat_shard import FlatShard, is_trainable, wrap
from composable_shard.torch_private import bump_version, num_dispatch_modes, num_function_modes

_grad_enabled = torch.is_grad_enabled
_ABSENT: Any = object()  # marks a missing operand, as None may be given


def _given(*operands: Any) -> list[Any]:
    return [each for each in operands if each is not _ABSENT]


def _may_be_recorded(operands: tuple[Any, ...]) -> bool:
    """Return whether autograd would record an op on these operands."""
    for each in operands:  # noqa: SIM110 -- a generator would cost four calls
        if isinstance(each, Tensor) and is_trainable(each):
            return True
    return False


def _direct(name: str) -> Callable[..., Any]:  # noqa: C901 -- as `run`
    """Return `torch.Tensor.<name>` for shards; it works in place if the name ends in "_"."""
    plain = getattr(Tensor, name)
    is_in_place = name.endswith("_") and not name.endswith("__")

    # Operands have names, and there is no helper: tuples and calls would cost a third of the time.
    def run_direct_op(  # noqa: C901 -- in line, for that
        self: FlatShard, one: Any = _ABSENT, two: Any = _ABSENT, /, *others: Any, **kwargs: Any
    ) -> Any:
        if others or num_dispatch_modes() or num_function_modes():
            return plain(*_given(self, one, two), *others, **kwargs)
        if _grad_enabled() and _may_be_recorded((self, one, two, *kwargs.values())):
            return plain(*_given(self, one, two), **kwargs)
        spec, first, second = self._shard_spec, one, two
        kind = type(one)
        if kind is not float and kind is not int and (is_in_place or one is not _ABSENT):
            if not isinstance(one, FlatShard) or one._shard_spec is not spec:
                return plain(*_given(self, one, two), **kwargs)
            first = one._local
        if two is not _ABSENT and type(two) is not float:
            if not isinstance(two, FlatShard) or two._shard_spec is not spec:
                return plain(*_given(self, one, two), **kwargs)
            second = two._local
        if kwargs:
            for value in kwargs.values():
                if type(value) is not float and type(value) is not int:
                    return plain(*_given(self, one, two), **kwargs)
        try:
            if is_in_place:
                if self._guard is not None:
                    self._guard.note_write(spec.label.fqn)
                # Autograd may have saved the shard for a backward. Raises for inference tensors.
                bump_version((self,))
            if one is _ABSENT:
                result = plain(self._local, **kwargs)
            elif two is _ABSENT:
                result = plain(self._local, first, **kwargs)
            else:
                result = plain(self._local, first, second, **kwargs)
        except RuntimeError:  # the rules raise a better error, or succeed
            return plain(*_given(self, one, two), **kwargs)
        return self if is_in_place else wrap(result, spec)

    run_direct_op.__name__ = name
    run_direct_op.__qualname__ = f"FlatShard.{name}"
    run_direct_op.__doc__ = f"Run `torch.Tensor.{name}` on the slices alone."
    return run_direct_op


DIRECT_OPS = (
    *("add", "sqrt", "__truediv__", "add_", "addcdiv_", "addcmul_", "div_"),
    *("lerp_", "mul_", "sub_"),
)
for _name in DIRECT_OPS:
    setattr(FlatShard, _name, _direct(_name))
