"""Methods other than forward that gather a unit, as forward does.

[Note: Forward methods]
A unit is gathered by hooks of its module, which only a call of the module runs. So a registered
method runs inside such a call, in which it replaces forward until it begins: users' hooks run too,
and code that inspects the running calls sees one. The object in the module's dictionary that
replaces the method refers to the module weakly, and its copies refer to copies.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from composable_shard.runtime import (
    get_states,
    is_sharded,
    managed_params,
)
from composable_shard.torch_private import COMPILED_CALL, modules_in, never_compile

_FORWARD = "forward"


class ForwardMethod:
    """Stands for a method of a sharded module; a call of it is a call of the module.

    Args:
        module: The module.
        name: Name of the method.
        given: The method, if it is an attribute of the module itself; None: its class has it, or
            passes it on.
    """

    def __init__(self, module: nn.Module, name: str, given: Callable[..., Any] | None) -> None:
        self._module = weakref.ref(module)
        self._name = name
        self._given = given
        documented = given or getattr(type(module), name, None) or _passed_on(module, name)
        functools.update_wrapper(self, documented, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method in the place of the module's forward."""
        module = self._module()
        if module is None:
            raise RuntimeError(f"the module of method '{self._name}' is deleted")
        attributes = vars(module)
        own = {name: attributes[name] for name in (_FORWARD, COMPILED_CALL) if name in attributes}

        def restore() -> None:
            attributes.pop(_FORWARD, None)
            attributes.update(own)

        def run(*args: Any, **kwargs: Any) -> Any:
            restore()
            method = self._given or _passed_on(module, self._name)
            return method(*args, **kwargs)

        attributes[_FORWARD] = run
        if COMPILED_CALL in own:  # compiled code does not see the replaced `forward`
            attributes[COMPILED_CALL] = None
        try:
            return module(*args, **kwargs)
        finally:
            if attributes.get(_FORWARD) is run:
                restore()

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardMethod:
        module = self._module()
        assert module is not None  # it is being copied
        return ForwardMethod(memo.get(id(module), module), self._name, self._given)


def _passed_on(module: nn.Module, name: str) -> Any:
    """Return the method that the module's class has, or passes on, as a compiled module does."""
    of_class = getattr(type(module), name, None)
    return module.__getattr__(name) if of_class is None else of_class.__get__(module)


never_compile(ForwardMethod.__call__)


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method other than forward gather the full parameters of its unit, as forward does.

    For `model.generate(...)`, `model.encode(...)` and the like, which use parameters outside of
    forward; they train too. The module's forward hooks run around the method. A module without
    units is left as it is, so that a script runs unsharded too; a second call does nothing.

    Args:
        module: A sharded module.
        method_name: The method's name.

    Raises:
        ValueError: If there is no such method, or a unit around the module manages its parameters.
    """
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")
    if isinstance(method, ForwardMethod) or method_name == _FORWARD:
        return
    if is_sharded(module):
        given = vars(module).get(method_name)
        vars(module)[method_name] = ForwardMethod(module, method_name, given)
    elif any(map(managed_params, modules_in(module))) and not get_states(module):
        raise ValueError(
            f"the parameters of this {type(module).__name__} belong to the unit of a module around "
            "it. Register a method of that module, or call fully_shard on this one too, before."
        )
