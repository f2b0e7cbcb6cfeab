"""Numbers that a step computes of parameters that one rank owns.

[Note: Numbers of owners]
Under granularity "param" each rank steps the parameters that it owns. A number of one parameter, as
its norm, may change that parameter. One that combines several parameters (the mean of all second
moments) would be another on each rank. So inside a step the reduction of an owner's values is an
`OwnedNumber`, which knows its parameters, and results of operations on it know them too. It raises
where it enters the shard of another parameter and, if it is of several, where it is read.

When the step ends those that are left become plain tensors, for optimizers keep them as state. What
was read (`item()`) is not followed; [Note: Numbers of groups] finds some of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import ref

from torch import Tensor

from composable_shard.tensor.labels import ParamLabel
from composable_shard.tensor.write_guard import RUNNING
from composable_shard.torch_private import DisableTorchFunctionSubclass

_READS = frozenset(
    {"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__complex__"}
)
_Sources = frozenset[ParamLabel]


class OwnedNumber(Tensor):
    """A plain tensor that knows of which parameters it was computed, [Note: Numbers of owners]."""

    sources: _Sources

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch, and note of which parameters its results are."""
        options, name = kwargs or {}, getattr(func, "__name__", "")
        operands = [*args, *options.values()]
        rows = _by_item(operands) if name.startswith("_foreach_") else [operands]
        sources = [_check(name, list(_tensors_in(row))) for row in rows]
        with DisableTorchFunctionSubclass():
            result = func(*args, **options)
        changed = args[0] if result is None else result
        if len(rows) == 1:
            mark(changed, sources[0])
        elif isinstance(changed, list | tuple):
            for item, found in zip(changed, sources, strict=True):
                mark(item, found)
        return result


def mark(result: Any, sources: _Sources) -> None:
    """Let the plain tensors in a result know of which parameters they are; until the step ends."""
    for each in _tensors_in(result):
        if type(each) is Tensor and sources:
            each.__class__ = OwnedNumber
            RUNNING.numbers.append(ref(each))
        if isinstance(each, OwnedNumber):
            each.sources = sources


def end_numbers() -> None:
    """Make plain tensors of all that are left of the step."""
    for reference in RUNNING.numbers:
        number = reference()
        if number is not None:
            number.__class__ = Tensor
    RUNNING.numbers.clear()


def _tensors_in(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def _by_item(operands: list[Any]) -> list[list[Any]]:
    """Return the operands of each item of a function of lists."""
    lengths = [len(each) for each in operands if isinstance(each, list | tuple)]
    return [
        [each[index] if isinstance(each, list | tuple) else each for each in operands]
        for index in range(min(lengths, default=0))
    ]


def _check(name: str, operands: list[Any]) -> _Sources:
    """Return of which parameters a result is; raise if it would combine them in a shard."""
    found = [each.sources for each in operands if isinstance(each, OwnedNumber)]
    sources = frozenset[ParamLabel]().union(*found)
    labels = {each._shard_spec.label for each in operands if hasattr(each, "_shard_spec")}
    joined = sources | labels
    if len(joined) > 1 and sources and (labels or name in _READS):
        optimizer = RUNNING.steps[-1][0]() if RUNNING.steps else None
        names = " and ".join(sorted(f"'{label.fqn}'" for label in joined)[:2])
        raise RuntimeError(
            f"a step of {type(optimizer).__name__} combines numbers of the parameters {names} "
            '(granularity="param"), and each rank has only those that it owns, so that each would '
            "take a step of its own. Shard the model in the default granularity for this optimizer."
        )
    return sources
