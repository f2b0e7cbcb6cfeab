"""What a program keeps of parameters of a class with FSDP2's methods, [Note: Extended gathers].

Such an object is of a user's class, which has operations of its own. So at rest, where it stands
for what the modules show, it has a class of the same name below the user's: operations ask that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from composable_shard.flat_param.kept_params import Kept, as_itself, run_on_shown, values_for
from composable_shard.flat_param.param_classes import Aliases
from composable_shard.flat_param.readers import Readers
from composable_shard.torch_private import disabled_torch_function


class _AtRest(Kept):
    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        notes = object.__getattribute__(self, "shard_aliases")
        if name in notes.own_names and values_for(self) is not self:
            raise RuntimeError(
                f"'{name}' of the full parameter '{self.shard_label}' was asked for at rest, where "
                f"the object that was kept has no values of class {type(self).__name__}. Read the "
                "module's own parameter, or call unshard(module) before."
            )
        return super().__getattribute__(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self.shard_aliases.handle()) in memo:
            raise RuntimeError(
                f"a model that keeps the full parameter '{self.shard_label}' of a forward can't be "
                f"copied: a copy of class {type(self).__name__} would belong to no unit. Drop what "
                "the forward has kept before."
            )
        if (found := values_for(self)) is not self:
            return copy.deepcopy(found, memo)
        with as_itself(self):
            return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if (found := values_for(self)) is not self:
            return found.__reduce_ex__(protocol)
        with as_itself(self):
            return self.__reduce_ex__(protocol)


def _run(
    func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Run an operation on what has the values; where the objects have them, as their class does."""
    with ExitStack() as stack:
        own = [each for each in args if isinstance(each, _AtRest) and values_for(each) is each]
        for each in own:
            stack.enter_context(as_itself(each))
        return func(*args, **(kwargs or {})) if own else run_on_shown(func, types, args, kwargs)


class ClassNotes(Aliases):
    """Notes of a parameter of a user's class, whose class follows them.

    Args:
        param: The parameter, which gets these notes.
        readers: Who may read its values.
    """

    __slots__ = ("_at_rest", "_kind", "_torch_function", "own_names")

    def __init__(self, param: Any, readers: Readers) -> None:
        self._kind: Any = type(param)
        self._at_rest: Any = type(self._kind.__name__, (_AtRest, self._kind), {"__slots__": ()})
        bases = [base for base in self._kind.__mro__ if base not in Tensor.__mro__]
        defined = {name for base in bases for name in vars(base) if not name.startswith("__")}
        #: What the class may read of the object without an operation.
        self.own_names = frozenset({*defined, *self._kind.__tensor_flatten__(param)[0]})
        super().__init__(readers)
        vars(param)["shard_aliases"] = self

    @property
    def torch_function(self) -> Any:
        """See [Note: Kept objects]."""
        return self._torch_function

    @torch_function.setter
    def torch_function(self, function: Callable[..., Any]) -> None:
        is_own = function is disabled_torch_function
        self._torch_function = disabled_torch_function if is_own else _run
        if (handle := self.handle()) is not None:
            kind = self._kind if is_own else self._at_rest
            object.__setattr__(handle.entries[0].unsharded, "__class__", kind)
