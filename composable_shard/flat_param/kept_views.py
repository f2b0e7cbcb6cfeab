"""Views of full values that outlive a forward, and reads of them when the values are freed.

[Note: Kept views]
A view of a parameter that a forward keeps (`self.wt = self.weight.t()`) has no values once they
are freed, and torch reads the null pointer. So when the forward ends, views that are kept on
modules get the class `KeptView`, which raises an error by name while the values are not there. To
look for them costs more than all else at the end of a forward. To count the tensors that share the
buffer's storage, those that autograd has saved among them, is one call: the search is done where
the number is a new one, or has led to a view before. Before the first backward it is known which
of them autograd has saved. If there are others, and neither on modules nor in nodes of custom
functions, nobody can find them: the memory is never freed from then on.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from composable_shard.flat_param.full_values import FullValues
from composable_shard.flat_param.handle import FlatParamHandle
from composable_shard.torch_private import DisableTorchFunctionSubclass, storage_uses_of


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


def note_saved(full: FullValues, alias: Tensor) -> None:
    """Note an alias of full values that a graph has saved."""
    full.saved.append(weakref.ref(alias))


def guard_kept_views(
    handles: Sequence[FlatParamHandle], kept: Callable[[], Iterable[Tensor]], *, is_exact: bool
) -> int:
    """Let views of full values that a forward has kept raise where they can't be read.

    Args:
        handles: Those that were computed with, before their values are freed.
        kept: Returns what the modules keep.
        is_exact: Whether all that graphs have saved was noted.

    Returns:
        How many there are.
    """
    if is_exact:
        handles = [handle for handle in handles if _num_unexplained(handle.full) > 0]
    total, tensors = 0, list(kept()) if handles else []
    for handle in handles:
        num_views = _guard(handle, tensors)
        num_others = _num_unexplained(handle.full) - num_views if is_exact else 0
        is_lent = not handle.full.buffer.untyped_storage().resizable()
        if num_others > 0 and not is_lent and num_others > _num_in_contexts(handle.full):
            _lend(handle.full)
        total += num_views
    return total


def _guard(handle: FlatParamHandle, tensors: Iterable[Tensor]) -> int:
    full, num_views = handle.full, 0
    params = set(map(id, full.params.built))
    is_readable = partial(_is_readable, weakref.ref(full))
    for tensor in tensors:
        offset = -1 if id(tensor) in params else _offset(full, tensor)
        if offset == -1:
            continue
        num_views += 1
        if type(tensor) in _KEPT:
            label = handle.entries[bisect_right(handle.layout.offsets, offset) - 1].label
            tensor.__class__ = _KEPT[type(tensor)]
            tensor.kept_of = f"parameter '{label}' of unit '{full.name}'"  # type: ignore[attr-defined]
            tensor.is_readable = is_readable  # type: ignore[attr-defined]
    return num_views


def _offset(full: FullValues, tensor: Tensor) -> int:
    """Return at which element of the buffer a tensor begins, -1 where it is elsewhere."""
    try:
        distance = tensor.data_ptr() - full.buffer.data_ptr()
    except RuntimeError:  # tensors without storage: fake ones, some subclasses
        return -1
    return distance // full.buffer.element_size() if 0 <= distance < full.buffer.nbytes else -1


def _is_readable(full_ref: weakref.ref[FullValues]) -> bool:
    """Return whether the values are there, and nobody has written shards since."""
    full = full_ref()
    return full is not None and (full.is_whole or not full.is_locked)


def _num_unexplained(full: FullValues) -> int:
    """Return how many tensors share the buffer's storage beyond our own and what was noted."""
    full.saved[:] = [alias for alias in full.saved if alias() is not None]
    aliases = [getattr(param, "data_alias", None) for param in full.params.built]
    num_own = max(full.num_aliases, 0) + sum(alias is not None for alias in aliases)
    return storage_uses_of(full.buffer) - num_own - len(full.saved)


def _num_in_contexts(full: FullValues) -> int:
    """Return how many views the nodes of custom functions hold, which read them in a backward."""
    contexts = [each for each in gc.get_objects() if isinstance(each, FunctionCtx)]
    items = [item for each in contexts for item in vars(each).values()]
    items += [part for item in items if isinstance(item, (list, tuple)) for part in item]
    views = [item for item in items if torch.is_tensor(item) and _offset(full, item) != -1]
    return len({id(view) for view in views})


def _lend(full: FullValues) -> None:
    """Never free the memory again, nor let gradients take the place of values."""
    full.params.note_hidden_alias()
    if full.buffer.device.type == "cpu":
        storage = full.buffer.untyped_storage()
        torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    warnings.warn(
        f"memory of the full values of unit '{full.name}' is held beyond the forward, by a view "
        "in a list or a closure, or by an array made through dlpack. It is never freed on the CPU "
        "from now on, and has the values of the last gather. Keep a copy: weight.detach().clone().",
        stacklevel=2,
    )
