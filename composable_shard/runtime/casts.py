"""Casts of the inputs, outputs and buffers of a unit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from composable_shard.runtime.containers import iter_tensors, map_tensors
from composable_shard.tensor import FlatShard
from composable_shard.torch_private import buffers_of, modules_in


def cast_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return arguments with all floating-point tensors in them cast; None if none needs a cast.

    The caller's containers stay as they are, and so do objects that are not containers, such as a
    cache that the forward writes to.
    """
    cast = partial(_cast, dtype)
    new_args, new_kwargs = (
        map_tensors(given, cast, looks_into_objects=False) for given in (args, kwargs)
    )
    if new_args is args and new_kwargs is kwargs:
        return None
    return new_args, new_kwargs


def cast_output(output: Any, dtype: torch.dtype) -> Any:
    """Return the output with all floating-point tensors in it cast, as `map_tensors` does it.

    What the model or the caller keeps of it, such as a state in fp32, is not cast. Neither are
    sharded parameters, which an optimizer may hold.
    """
    return map_tensors(output, partial(_cast_result, dtype))


def _cast_result(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, FlatShard) else _cast(dtype, tensor)


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor


def cast_buffers(modules: list[nn.Module], kept: list[nn.Module], dtype: torch.dtype) -> None:
    """Cast the floating-point buffers that `modules` themselves hold, except inside `kept`."""
    left_alone = {id(module) for root in kept for module in modules_in(root)}
    done: dict[int, Tensor] = {}  # modules may share a buffer
    for module in modules:
        for name, buffer in buffers_of(module).items():
            if buffer is None or id(module) in left_alone:
                continue
            done.setdefault(id(buffer), _cast(dtype, buffer))
            buffers_of(module)[name] = done[id(buffer)]


class Boundary:
    """The hooks of a module inside a unit that computes in the main dtype.

    They cast arguments to the dtype of the module's parameters, and the output to the dtype of the
    arguments.
    """

    def __init__(self) -> None:
        self._incoming: torch.dtype | None = None

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Cast the arguments."""
        dtypes = _floating(iter_tensors((args, kwargs)))
        self._incoming = next(dtypes, None)
        own = next(_floating(chain(module.parameters(), module.buffers())), torch.float32)
        return cast_arguments(args, kwargs, own)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Cast the output."""
        return output if self._incoming is None else cast_output(output, self._incoming)


def _floating(tensors: Any) -> Iterator[torch.dtype]:
    return (tensor.dtype for tensor in tensors if tensor.is_floating_point())
