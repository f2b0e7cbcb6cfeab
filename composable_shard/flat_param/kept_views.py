"""Views of full values that outlive a forward, and reads of them when the values are freed.

[Note: Kept views]
A view of a parameter that a forward keeps (`self.wt = self.weight.t()`) has no values once they
are freed, and torch reads the null pointer. So when the forward ends, views that are kept on
modules get the class `KeptView`, which raises an error by name while the values are not there. To
look for them costs more than all else at the end of a forward. To count the tensors that share the
buffer's storage, those that autograd has saved among them, is one call: the search is done where
the number is a new one, or has led to a view before. Views that are held elsewhere, in a closure or
by an array made through dlpack, are not found: they can't be told from those that nodes hold.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from torch import Tensor, nn

from composable_shard.flat_param.entries import HiddenParam
from composable_shard.flat_param.full_values import FullValues
from composable_shard.flat_param.handle import FlatParamHandle
from composable_shard.torch_private import DisableTorchFunctionSubclass


class KeptView(Tensor):
    """A view of full values that outlives a forward, see [Note: Kept views]."""

    kept_of: str
    is_readable: Callable[[], bool]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch on the plain view.

        Raises:
            RuntimeError: If it reads values that are not there.
        """
        kwargs = kwargs or {}
        if func not in _WITHOUT_VALUES:
            for each in (*args, *kwargs.values()):
                for view in each if isinstance(each, (list, tuple)) else (each,):
                    if isinstance(view, KeptView) and not view.is_readable():
                        raise RuntimeError(
                            f"a view of {view.kept_of} that its forward kept is read while the "
                            "full values are not there. Keep a copy instead (`view.clone()`), "
                            "or call unshard(module) before the forward."
                        )
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # as FlatShard's
        """Say whose view it is, without its values."""
        return f"{type(self).__name__}({self.kept_of}, shape={tuple(self.shape)})"


class _KeptParameter(KeptView, nn.Parameter):
    """One that a forward has made a parameter of its own of."""


_KEPT: dict[type, type] = {Tensor: KeptView, nn.Parameter: _KeptParameter}
_PROPERTIES = (
    *("_base", "_version", "device", "dtype", "grad", "grad_fn"),
    *("is_leaf", "layout", "ndim", "requires_grad", "shape"),
)
_METHODS = (
    *("data_ptr", "dim", "element_size", "is_complex", "is_contiguous", "is_floating_point"),
    *("numel", "requires_grad_", "size", "storage_offset", "stride", "untyped_storage"),
)
_WITHOUT_VALUES = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    *(getattr(Tensor, name) for name in _METHODS),
}

_PLAIN = {bool, int, float, str, set, type(None)}  # what most attributes of modules are


def kept_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that modules have as attributes, or in containers there."""
    for each in module.modules():
        for item in list(vars(each).values()):
            if type(item) in _PLAIN:
                continue
            found = item if isinstance(item, (list, tuple)) else (item,)
            if isinstance(item, Mapping):
                found = list(item.values())
            for value in found:
                if isinstance(value, Tensor) and not isinstance(value, HiddenParam):
                    yield value


def guard_kept_views(handles: Sequence[FlatParamHandle], module: nn.Module) -> int:
    """Let views of full values that a forward has kept raise where they can't be read.

    Args:
        handles: Those that were computed with, before their values are freed.
        module: Whose forward it was.

    Returns:
        How many there are.
    """
    buffers = sorted(((h.full.buffer.data_ptr(), h) for h in handles), key=itemgetter(0))
    starts = [start for start, _ in buffers]
    params = {id(param) for handle in handles for param in handle.full.params.built}
    num_views = 0
    for tensor in kept_tensors(module):
        pointer = 0 if id(tensor) in params else _data_pointer(tensor)
        place = bisect_right(starts, pointer) - 1
        if pointer == 0 or place < 0:
            continue
        start, handle = buffers[place]
        if pointer - start < handle.full.buffer.nbytes:
            num_views += 1
            _guard(handle, tensor, (pointer - start) // handle.full.buffer.element_size())
    return num_views


def _guard(handle: FlatParamHandle, tensor: Tensor, offset: int) -> None:
    """Let a view raise that begins at this element of the handle's buffer."""
    if type(tensor) in _KEPT:
        label = handle.entries[bisect_right(handle.layout.offsets, offset) - 1].label
        tensor.__class__ = _KEPT[type(tensor)]
        tensor.kept_of = f"parameter '{label}' of unit '{handle.full.name}'"  # type: ignore[attr-defined]
        tensor.is_readable = partial(_is_readable, weakref.ref(handle.full))  # type: ignore[attr-defined]


def _data_pointer(tensor: Tensor) -> int:
    """Return the address of a tensor's first element; 0 where it has no storage."""
    try:
        return tensor.data_ptr()
    except RuntimeError:  # tensors without storage: fake ones, some subclasses
        return 0


def _is_readable(full_ref: weakref.ref[FullValues]) -> bool:
    """Return whether the values are there, and nobody has written shards since."""
    full = full_ref()
    return full is not None and (full.is_whole or not full.is_locked)
