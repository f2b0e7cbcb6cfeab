"""What a program has kept of full parameters, while `unshard_params` shows others.

The parameters of a scope are other objects, in a buffer of their own. A program that has kept the
full parameters of a forward (a list, a cached property) means the same parameters: until the scope
ends, each kept object stands for the scope's, on which all its operations run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from composable_shard.flat_param.param_classes import ALL, UnshardedDTensor, UnshardedParameter
from composable_shard.tensor import share_attributes


def _shown_for(kept: Any) -> Any:
    """Return the parameter that the open scope shows in place of a kept one."""
    shown = kept.shard_aliases.handle().shown
    if kept.shard_position != ALL:
        return shown.scope.params[kept.shard_position]
    at_rest = shown.flat.sharded
    return at_rest if shown.scope.full is None else shown.scope.full.flat_param(at_rest)


def _replace(item: Any) -> Any:
    """Return an argument with the parameters that a scope shows in place of kept ones."""
    if isinstance(item, _StandsForShown):
        return _shown_for(item)
    if type(item) in (list, tuple):
        return type(item)(map(_replace, item))
    return {key: _replace(value) for key, value in item.items()} if type(item) is dict else item


def _of_shown(name: str) -> Callable[..., Any]:
    """Return the method of this name of the parameter that the scope shows."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(_shown_for(self), name)(*args, **kwargs)

    return run


def _property_of_shown(name: str) -> property:
    def get(self: Any) -> Any:
        return getattr(_shown_for(self), name)

    def change(self: Any, value: Any) -> None:
        setattr(_shown_for(self), name, value)

    return property(get, change)


class _StandsForShown:
    """What the class of a kept parameter becomes for the length of a scope.

    Operations come to `__torch_function__`; the rest is what the classes below define in Python.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on what the scope shows."""
        found = _replace(args)
        result = func(*found, **_replace(kwargs or {}))
        # `weights[0] *= 2` must leave the kept object in the list.
        pairs = zip(args, found, strict=True)
        return next((given for given, shown in pairs if result is shown is not given), result)

    data = _property_of_shown("data")
    grad = _property_of_shown("grad")
    requires_grad = _property_of_shown("requires_grad")
    detach = _of_shown("detach")
    numpy = _of_shown("numpy")
    set_ = _of_shown("set_")
    register_post_accumulate_grad_hook = _of_shown("register_post_accumulate_grad_hook")

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Set the flag of the parameter that the scope shows; return this one."""
        self.requires_grad = requires_grad
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(_shown_for(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _shown_for(self).__reduce_ex__(protocol)


class _KeptParameter(_StandsForShown, UnshardedParameter):
    __slots__ = ()


class _KeptDTensor(_StandsForShown, UnshardedDTensor):
    pass


def stand_for(kept: nn.Parameter | None, shown: Tensor | None) -> None:
    """Let a full parameter stand for the one that a scope shows; None: made when it is needed."""
    kind = type(kept)
    if kept is not None and kind in (UnshardedParameter, UnshardedDTensor):
        _change_class(kept, _KeptParameter if kind is UnshardedParameter else _KeptDTensor)
        if shown is not None:
            share_attributes(kept, shown)


def stand_for_itself(kept: nn.Parameter | None, sharded: Tensor) -> None:
    """Undo `stand_for`; the attributes are those of the sharded parameter again."""
    if isinstance(kept, _StandsForShown):
        share_attributes(kept, sharded)
        is_plain = isinstance(kept, UnshardedParameter)
        # Last: after an interrupt the class says that both are to be repeated.
        _change_class(kept, UnshardedParameter if is_plain else UnshardedDTensor)


def _change_class(param: nn.Parameter, kind: type) -> None:
    object.__setattr__(param, "__class__", kind)  # a DTensor refuses programs
