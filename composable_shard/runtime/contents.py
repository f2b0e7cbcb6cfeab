"""Whether modules or parameters below a module have changed since they were last looked at."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import chain
from operator import attrgetter, getitem
from typing import Any

from torch import nn
from torch.jit import ScriptModule

from composable_shard.flat_param import UnshardedParameter
from composable_shard.tensor import FlatShard
from composable_shard.torch_private import modules_in, modules_of, parameters_of


class _Contents:
    """The modules and parameters below a module when it was last looked at.

    Objects are compared by `id`; `freed` counts too, as a new module may reuse an id.
    """

    __slots__ = ("empty", "filled", "flags", "freed", "ids", "num_children", "places", "refs")

    def __init__(self, module: nn.Module | None = None) -> None:
        found = [] if module is None else modules_in(module)
        # A ScriptModule's contents never change, and it has no dicts of them.
        modules = [each for each in found if not isinstance(each, ScriptModule)]
        children, params = ([*map(of, modules)] for of in (modules_of, parameters_of))
        self.empty = [each for each in (*children, *params) if not each]
        self.filled = [each.values() for each in (*children, *params) if each]  # they follow it
        self.ids = [*map(id, chain.from_iterable(self.filled))]
        self.num_children = sum(map(len, children))
        self.freed: list[Any] = []
        self.refs = [weakref.ref(each, self.freed.append) for each in modules]
        items = [(each, key, item) for each in params for key, item in each.items()]
        items = [item for item in items if not isinstance(item[-1], _MANAGED)]
        self.places = [each for each, _, _ in items], [key for _, key, _ in items]
        self.flags = [param.requires_grad for _, _, param in items]

    def __reduce__(self) -> Any:
        """Start empty in copies, because the contents are of these modules."""
        return _Contents, ()


_MANAGED = FlatShard, UnshardedParameter, type(None)

_CONTENTS_KEY = "_composable_shard_contents"

_requires_grad: Callable[[Any], bool] = attrgetter("requires_grad")


def has_changed(module: nn.Module) -> bool:
    """Return whether a module's contents changed since `note_contents`; runs in each forward."""
    known: _Contents | None = module.__dict__.get(_CONTENTS_KEY)
    return known is not None and (
        [*map(id, chain.from_iterable(known.filled))] != known.ids
        or any(known.empty)
        or bool(known.freed)
        or [*map(_requires_grad, map(getitem, *known.places))] != known.flags
    )


def note_contents(module: nn.Module) -> bool:
    """Note the contents of a module; return whether modules are new or were taken out."""
    known, found = module.__dict__.get(_CONTENTS_KEY, _Contents()), _Contents(module)
    # The entry is the module's and not the unit's: hooks of the modules inside lead to the unit.
    module.__dict__[_CONTENTS_KEY] = found
    children = found.ids[: found.num_children]
    return bool(known.freed) or children != known.ids[: known.num_children]
