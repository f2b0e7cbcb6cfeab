"""What a program keeps of full parameters: it stands for what the modules show.

A full parameter has values near the forwards and backwards of its unit, and `unshard_params` shows
other objects. A program that has kept the object (a list, a cached property, a hook) means the
parameter. So at rest and in a scope a kept object stands for what the modules show instead, on
which its operations run.

[Note: Kept objects]
Torch asks an operand for `__torch_function__` as for any attribute of an object. Here that is a
property made of C functions, which reads notes that the parameters of a handle share. So one write
changes all of them, and a step, in which the modules show these parameters, calls no function.

Between `unshard` and `reshard` modules show full parameters after a step, too. So the first write
to the shards there changes the notes, and the next operation gathers the values of that step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
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
    return handle.shown.state.stand_in(handle.shown.form, position)


def values_for(kept: Any) -> Any:
    """Return what has the values of a full parameter: itself if it has the current ones."""
    shown = shown_for(kept)
    notes = kept.shard_aliases
    if notes.torch_function is disabled_torch_function:
        return kept
    handle = notes.handle()
    if handle.shown.shows_full():
        if handle.shown.notes.torch_function is not disabled_torch_function:
            _gather_again(handle)
        return shown_for(kept)  # new data of another dtype has new objects
    is_own = not handle.shown.state.is_fixed and handle.full.is_readable()
    # `p.data = x` at rest: the next forward takes the new values over.
    is_own = is_own and all(each.sharded._local is each.shard_view for each in handle.shown.at_rest)
    return kept if is_own else shown


def follow_writes(shown: Any) -> None:
    """Let the full parameters that modules show stand for themselves until shards are written."""
    shown.notes.torch_function = disabled_torch_function
    shown.guard.at_next_write("shown", partial(_note_write, weakref.ref(shown)))


def _note_write(shown_ref: weakref.ref[Any]) -> None:
    shown = shown_ref()
    if shown is None or not shown.shows_full():
        return
    handle = shown.notes.handle()
    if handle is not None and not handle.full.is_whole and not handle.full.params.is_locked:
        handle.full.params.warn_of_edits("between unshard and reshard")  # before they are gone
    shown.notes.torch_function = run_on_shown


def _gather_again(handle: Any) -> None:
    """Give the full parameters that modules show the values of shards that were written."""
    handle.shown.notes.torch_function = disabled_torch_function
    try:
        handle.adopt_changes()
        if not handle.full.can_write_back:
            handle.unshard(None, "read between unshard and reshard")
            handle.full.wait()
    except BaseException:
        # Values that could not be gathered have no memory, and must not be shown.
        handle.shown.show_sharded()
        raise
    follow_writes(handle.shown)


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
    if attribute == "requires_grad" and (shown := shown_for(args[0])) is not args[0]:
        return shown.requires_grad  # its getter
    if attribute in ("grad", "requires_grad") or attribute.startswith("_"):
        with DisableTorchFunctionSubclass():  # the library asks the object; users get `Kept.grad`
            return func(*args, **named)
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
