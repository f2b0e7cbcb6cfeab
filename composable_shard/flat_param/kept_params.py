"""What a program keeps of full parameters: it stands for what the modules show.

A full parameter has values near the forwards and backwards of its unit, and `unshard_params` shows
other objects. A program that has kept the object (a list, a cached property, a hook) means the
parameter. So at rest and in a scope a kept object stands for what the modules show instead, on
which its operations run.

[Note: Kept objects]
Torch asks an operand for `__torch_function__` as for any attribute of an object. Here that is a
property made of C functions, which reads notes that the parameters of a handle share. So one write
changes all of them, and a step, in which the modules show these parameters, calls no function.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any

from torch import Tensor

from composable_shard.tensor import FlatShard
from composable_shard.torch_private import (
    DisableTorchFunctionSubclass,
    ParameterMeta,
    disabled_torch_function,
    is_compiling,
)

ALL = -1  # position of the one parameter that stands for all


class KeptMeta(ParameterMeta):  # type: ignore[misc] # see there
    """The class of a class of kept parameters, which the compiler asks in place of the object."""

    @property
    def __torch_function__(cls) -> Any:
        """None in compiled code, where modules show the parameters."""
        return disabled_torch_function if is_compiling() else run_on_shown


class Kept:
    """A full parameter that programs may keep, see [Note: Kept objects]."""

    __slots__ = ()
    shard_label: object
    shard_aliases: Any
    shard_position: int

    __torch_function__ = property(attrgetter("shard_aliases.torch_function"))


def shown_for(kept: Any) -> Any:
    """Return what modules show in place of a full parameter; itself if they show it."""
    aliases, position = kept.shard_aliases, kept.shard_position
    # Before the handle is asked: the notes of a parameter that is being built have none yet, and
    # where a model was deleted, memory that nobody frees or writes still serves who was shown it.
    if aliases.torch_function is disabled_torch_function:
        return kept
    handle = aliases.handle()
    if handle is None:
        raise RuntimeError(
            f"the full parameter '{kept.shard_label}' was kept and is used after its model was "
            "deleted. Clone in the forward what you want to keep."
        )
    shown = handle.shown
    return shown.form.shown_at(position, shown.scope)


def values_for(kept: Any) -> Any:
    """Return what has the values of a full parameter: itself if it has the current ones."""
    shown = shown_for(kept)
    if shown is kept:
        return kept
    handle = kept.shard_aliases.handle()
    is_own = handle.shown.scope is None and handle.full.is_readable()
    # `p.data = x` at rest: the next forward takes the new values over.
    is_own = is_own and all(each.sharded._local is each.shard_view for each in handle.shown.at_rest)
    return kept if is_own else shown


@contextmanager
def as_itself(kept: Any) -> Iterator[None]:
    """Let the parameters of a handle stand for themselves, whatever the modules show."""
    notes = kept.shard_aliases
    before, notes.torch_function = notes.torch_function, disabled_torch_function
    try:
        yield
    finally:
        notes.torch_function = before


def run_on_shown(
    func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Run an operation on what has the values of kept parameters."""
    named = kwargs or {}
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    if attribute == "grad" or attribute.startswith("_"):
        with DisableTorchFunctionSubclass():  # the library asks the object; users get `Kept.grad`
            return func(*args, **named)
    if attribute == "requires_grad":
        return shown_for(args[0]).requires_grad  # its getter
    has_own: list[Any] = []
    found, found_named = _replace(args, has_own), _replace(named, has_own)
    with DisableTorchFunctionSubclass() if has_own else nullcontext():
        result = _call(func, attribute, found, found_named)
    # `weights[0] *= 2` must leave the kept object in the list.
    pairs = [*zip(args, found, strict=True), *((named[key], found_named[key]) for key in named)]
    return next((given for given, shown in pairs if result is shown is not given), result)


def _replace(item: Any, has_own: list[Any]) -> Any:
    """Return an argument with what has the values of kept parameters; note those that have them."""
    if isinstance(item, Kept):
        found = values_for(item)
        if found is item:
            has_own.append(item)
        return found
    if type(item) in (list, tuple):
        return type(item)([_replace(each, has_own) for each in item])
    if type(item) is dict:
        return {key: _replace(value, has_own) for key, value in item.items()}
    return item


def _call(func: Any, attribute: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function; of a shard the method or property of its class, which may be another."""
    name, first = getattr(func, "__name__", ""), args[0] if args else None
    if isinstance(first, FlatShard):
        if name == "__get__":
            return getattr(first, attribute)
        if name == "__set__":
            return setattr(first, attribute, *args[1:])
        if getattr(Tensor, name, None) is func:
            func = getattr(type(first), name)
    return func(*args, **kwargs)
