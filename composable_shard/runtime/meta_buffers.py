"""Buffers that `to_empty()` made and nothing has written since, and the device of buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from composable_shard.torch_private import DisableTorchFunctionSubclass, buffers_of, version_of


def check_buffers(modules: list[nn.Module]) -> None:
    """Raise if a buffer in some modules came from `to_empty()` and was not written since."""
    names = {
        id(buffer): name
        for module in reversed(modules)
        for name, buffer in module.named_buffers()
        if is_never_written(buffer)
    }
    if names:
        raise RuntimeError(
            f"buffers {list(names.values())} were never initialised after to_empty(): they hold "
            "arbitrary values. Compute them again (reset_parameters() or the code that made them) "
            "or load them."
        )


_MARK = "_composable_shard_empty_version"


class _MetaBuffer(Tensor):
    """A meta tensor that marks results of `empty_like`, which `to_empty()` calls."""

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
        with DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if not result.is_meta:
                _fill(result)
                setattr(result, _MARK, _version_of(result))
        return result


def _fill(tensor: Tensor) -> None:
    """Fill with a value that spoils results and that real buffers hardly ever hold everywhere."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _version_of(buffer: Tensor) -> int:
    return -1 if buffer.is_inference() else version_of(buffer)


def watch_meta_buffers(module: nn.Module) -> None:
    """Replace the meta-device buffers that `module` itself holds by ones that `to_empty` marks."""
    for name, buffer in buffers_of(module).items():
        if buffer is not None and buffer.is_meta and type(buffer) is Tensor:
            buffers_of(module)[name] = buffer.as_subclass(_MetaBuffer)


def place_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the buffers that `module` itself holds to a device; meta buffers stay.

    Those that were made under `torch.inference_mode` become ordinary ones, which can be written.
    """
    for name, buffer in buffers_of(module).items():
        if buffer is None or buffer.is_meta:
            continue
        if buffer.device != device:
            buffers_of(module)[name] = buffer.to(device)
        elif buffer.is_inference():
            buffers_of(module)[name] = buffer.clone()


def is_never_written(buffer: Tensor) -> bool:
    """Return whether a buffer came from `to_empty()` and was not written since.

    The version counter shows in-place writes, the values show writes through `.data`.
    """
    mark = getattr(buffer, _MARK, None)
    if mark is None or mark != _version_of(buffer) or buffer.numel() == 0:
        return False
    expected = torch.empty_like(buffer)
    _fill(expected)
    return (
        torch.equal(buffer.isnan(), expected.isnan())
        if (buffer.is_floating_point() or buffer.is_complex())
        else torch.equal(buffer, expected)
    )
