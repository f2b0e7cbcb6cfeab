"""Buffers of meta-device modules: notice those that nobody initialised after `to_empty()`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["is_never_written", "place_buffers", "watch_meta_buffers"]

_MARK = "_composable_shard_empty_version"


class _MetaBuffer(Tensor):
    """A meta tensor that marks what `empty_like` makes of it, which is how `to_empty()` works."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`; fill and mark the result of `torch.empty_like`."""
        if func is not torch.empty_like:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call, unused-ignore]
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if not result.is_meta:
                _fill(result)
                setattr(result, _MARK, result._version)
        return result


def _fill(tensor: Tensor) -> None:
    """Fill with a value that a real buffer hardly holds everywhere, and that shows when used."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def watch_meta_buffers(module: nn.Module) -> None:
    """Replace the meta-device buffers that `module` itself holds by ones that are noticed."""
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta and type(buffer) is Tensor:
            module._buffers[name] = buffer.as_subclass(_MetaBuffer)


def place_buffers(module: nn.Module, device: torch.device) -> None:
    """Bring the buffers that `module` itself holds to a device; those on meta stay."""
    for name, buffer in module._buffers.items():
        if buffer is not None and not buffer.is_meta and buffer.device != device:
            module._buffers[name] = buffer.to(device)


def is_never_written(buffer: Tensor) -> bool:
    """Return whether a buffer came out of `to_empty()` and still holds what was there.

    The version counter tells of in-place writes, and the values of writes through `.data`.
    """
    if getattr(buffer, _MARK, None) != buffer._version or buffer.numel() == 0:
        return False
    expected = torch.empty_like(buffer)
    _fill(expected)
    return (
        torch.equal(buffer.isnan(), expected.isnan())
        if (buffer.is_floating_point() or buffer.is_complex())
        else torch.equal(buffer, expected)
    )
