"""Finds in outputs of a forward what runs later: generators, functions, and the like.

[Note: Late outputs]
Such an object may hold full parameters, in a closure or as arguments: its unit keeps the full
values until parameters are written, as for graphs of gradients. Or it reads the parameters of a
module when it runs. Modules are at rest by then: under no_grad the read gathers, and while autograd
records it raises, with a text that names the object.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator, Mapping
from functools import partial
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

_AT_ONCE = (Tensor, nn.Module, str, bytes, int, float, type(None), type)
_CONTAINERS = (list, tuple, set, frozenset)
_DEPTH = 4  # of containers and objects, which may refer to each other


def find_late_output(output: Any, depth: int = _DEPTH) -> str:
    """Return what in an output may read parameters later; empty if there is nothing."""
    if isinstance(output, _AT_ONCE):
        return ""
    # These before the attributes, which functions and partials have too: what they read is
    # elsewhere.
    if isinstance(output, FunctionType):
        reads = output.__closure__ or output.__defaults__ or output.__kwdefaults__
        return f"a function ({output.__qualname__})" if reads else ""
    if isinstance(output, MethodType | BuiltinMethodType):
        is_bound = isinstance(output.__self__, Tensor | nn.Module)
        return f"a method ({output.__name__})" if is_bound else ""
    if isinstance(output, partial | Iterator | Coroutine):
        return f"a {type(output).__name__}"
    if isinstance(output, Mapping):
        items = output.values()
    else:
        is_container = isinstance(output, _CONTAINERS)
        items = output if is_container else getattr(output, "__dict__", {}).values()
    found = (find_late_output(item, depth - 1) for item in items if depth)
    return next(filter(None, found), "")
