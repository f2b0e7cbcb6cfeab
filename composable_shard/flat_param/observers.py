"""What watches full values: views that outlive a forward, and ranges in the traces of a profiler.

[Note: Kept views]
A view of a parameter that a forward keeps (`self.wt = self.weight.t()`) has no values once they
are freed, and torch reads the null pointer. So when the forward ends, views that are kept on
modules get the class `KeptView`, which raises an error by name while the values are not there. To
look for them costs more than all else at the end of a forward. To count the tensors that share the
buffer's storage, those that autograd has saved among them, is one call: the search is done where
the number is a new one, or has led to a view before. Views that are held elsewhere, in a closure or
by an array made through dlpack, are not found: they can't be told from those that nodes hold.

[Note: Ranges]
A range costs host time even where nobody looks. So the methods that send and wait are replaced by
ones with ranges when a call of a tree finds that a profiler runs, and come back when one finds that
none does. In between, and in processes that are never profiled, nothing is added.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from operator import itemgetter
from typing import Any

from torch import Tensor, nn
from torch.profiler import record_function

from composable_shard.comm import trace
from composable_shard.flat_param.entries import HiddenParam
from composable_shard.flat_param.full_values import FullValues
from composable_shard.flat_param.gradients import FlatGradients
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
        """Run a function of torch on the plain view, if values that it reads are there."""
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

    Before the values are freed. Return how many there are.
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


def _gather(full: FullValues) -> str | None:
    return f"all_gather {full.name}" if full.is_sharded else None


def _wait_gather(full: FullValues) -> str | None:
    return None if full._gather is None else f"wait all_gather {full.name}"


def _reduction(grads: FlatGradients) -> str:
    return "reduce_scatter" if grads._shard_group.size > 1 else "all_reduce"


def _reduce(grads: FlatGradients) -> str | None:
    return None if grads._shard_group.num_ranks == 1 else f"{_reduction(grads)} {grads.name}"


def _wait_reduce(grads: FlatGradients) -> str | None:
    if grads.reduction.output is None:
        return None
    return f"wait {_reduction(grads)} {grads.name}"


_NAMES: tuple[tuple[type, str, Callable[[Any], str | None]], ...] = (
    (FullValues, "gather", _gather),
    (FullValues, "wait", _wait_gather),
    (FlatGradients, "issue", _reduce),
    (FlatGradients, "finish", _wait_reduce),
)


def _with_range(
    method: Callable[..., Any], name_of: Callable[[Any], str | None]
) -> Callable[..., Any]:
    @wraps(method)
    def ranged(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = name_of(self)
        if name is None:
            return method(self, *args, **kwargs)
        with record_function(name):
            return method(self, *args, **kwargs)

    return ranged


_UNRANGED = [getattr(kind, name) for kind, name, _ in _NAMES]
_RANGED = [
    _with_range(method, name_of) for method, (*_, name_of) in zip(_UNRANGED, _NAMES, strict=True)
]


def show_ranges(flag: bool) -> None:
    """Let the methods make ranges, or no more, [Note: Ranges]."""
    for method, (kind, name, _) in zip(_RANGED if flag else _UNRANGED, _NAMES, strict=True):
        setattr(kind, name, method)


trace.profiling.switches.append(show_ranges)
