"""Ranges in the traces of a profiler.

[Note: Ranges]
A range costs host time even without a profiler. So when a call of a tree finds that a profiler
runs, the methods that send and wait are replaced by methods with ranges; when a call finds that
none runs, they come back. Processes that are never profiled pay nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.profiler import record_function

from composable_shard.comm import trace
from composable_shard.flat_param.full_values import FullValues
from composable_shard.flat_param.gradients import FlatGradients


def _gather(full: FullValues) -> str | None:
    return f"all_gather {full.label.name}" if full.is_sharded else None


def _wait_gather(full: FullValues) -> str | None:
    return None if full._gather is None else f"wait all_gather {full.label.name}"


def _reduction(grads: FlatGradients) -> str:
    return "reduce_scatter" if grads.reduction.shard_group.size > 1 else "all_reduce"


def _reduce(grads: FlatGradients) -> str | None:
    if grads.reduction.shard_group.num_ranks == 1:
        return None
    return f"{_reduction(grads)} {grads.reduction.label.name}"


def _wait_reduce(grads: FlatGradients) -> str | None:
    if grads.reduction.output is None:
        return None
    return f"wait {_reduction(grads)} {grads.reduction.label.name}"


_NAMES: tuple[tuple[type, str, Callable[[Any], str | None]], ...] = (
    (FullValues, "gather", _gather),
    (FullValues, "wait", _wait_gather),
    (FlatGradients, "issue", _reduce),
    (FlatGradients, "add_result", _wait_reduce),
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
    """Switch the methods' ranges on or off, [Note: Ranges]."""
    for method, (kind, name, _) in zip(_RANGED if flag else _UNRANGED, _NAMES, strict=True):
        setattr(kind, name, method)


trace.profiling.switches.append(show_ranges)
