"""Bytes written by operators, and collectives, of everything that runs inside a block."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Counts", "StepCounter", "is_inside_collective"]

# c10d operator -> the kind it counts as, and the argument that is its full-size buffer
_COLLECTIVES = {
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "alltoall_base_": ("reduce_scatter", 1),  # an exchange of slices that a local sum follows
    "allreduce_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
}
_ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "resize_", "set_")
Counts = dict[str, list[int]]  # by kind: number and bytes
_COLLECTIVES_LAYER = tuple(
    str(Path("composable_shard", "comm", name))
    for name in ("algorithms.py", "collectives.py", "messages.py")
)


def is_inside_collective() -> bool:
    """Return whether a collective of the library is running, so that its work can be left out."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COLLECTIVES_LAYER):
            return True
        frame = frame.f_back
    return False


class StepCounter(TorchDispatchMode):
    """Counts bytes written, by operator, and the collectives of everything that runs inside it."""

    def __init__(self, is_inside: Callable[[], bool] | None = None) -> None:
        """Count; with `is_inside` leave out bytes that are written where it returns True."""
        super().__init__()
        self.written: Counter[str] = Counter()
        self.issued: Counter[str] = Counter()
        self.payload: Counter[str] = Counter()
        self._is_inside = is_inside or (lambda: False)
        self._num_waiting = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator and record it."""
        kwargs = kwargs or {}
        storages = {_storage(tensor) for tensor in _tensors_in((args, kwargs))}
        result = func(*args, **kwargs)
        if func.namespace == "c10d":
            self._record_collective(func.overloadpacket.__name__, args)
        elif not self._is_excluded() and func.overloadpacket.__name__ not in _ALLOCATIONS:
            new = [tensor for tensor in _tensors_in(result) if _storage(tensor) not in storages]
            written = [*new, *_mutated(func, args, kwargs, result)]
            self.written[str(func)] += sum(_local(tensor).nbytes for tensor in written)
        return result

    def _is_excluded(self) -> bool:
        return self._num_waiting > 0 or self._is_inside()

    @contextmanager
    def see_waits(self) -> Iterator[None]:
        """Tell the backend's work inside `Work.wait` from the rest in the enclosed block."""
        original = dist.Work.wait

        def wait(work: dist.Work, *args: Any) -> bool:
            self._num_waiting += 1
            try:
                return original(work, *args)
            finally:
                self._num_waiting -= 1

        dist.Work.wait = wait
        try:
            yield
        finally:
            dist.Work.wait = original

    def _record_collective(self, name: str, args: tuple[Any, ...]) -> None:
        kind, index = _COLLECTIVES.get(name, (name, 0))
        self.issued[kind] += 1
        self.payload[kind] += sum(tensor.nbytes for tensor in _tensors_in(args[index]))

    def counts(self) -> Counts:
        """Return number and bytes of every kind of collective."""
        return {kind: [self.issued[kind], self.payload[kind]] for kind in sorted(self.issued)}


def _tensors_in(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _storage(tensor: Tensor) -> int:
    return _local(tensor).untyped_storage()._cdata


def _mutated(func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> Iterator[Tensor]:
    if func.overloadpacket.__name__ == "all_gather_copy_in":  # its schema hides what it writes
        yield result[0]
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = kwargs.get(argument.name) if argument.kwarg_only else args[position : position + 1]
        yield from _tensors_in(given)
