"""Which function a program has called, read off the frames of the interpreter.

A collective that no unit asks for is named after the function that the program has called, found in
the frames of the interpreter. The name includes arguments that are numbers and flags, because they
must be the same on all ranks: `clip_grad_norm_(max_norm=1.0)` on one rank and
`clip_grad_norm_(max_norm=2.0)` on another are two different collectives. Strings, such as paths,
and tensors may differ.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

_PACKAGE = __name__.partition(".")[0]
_TORCH = torch.__name__
_TRANSPARENT = sys.stdlib_module_names - {"__main__"}
_WAYS_TO_OPS = frozenset({"__torch_function__", "run_direct_op"})  # that not all ranks take
_PLAIN = (bool, int, float)
_packages: dict[Any, str] = {}  # by the name of a module: each collective walks some frames


def find_call(frame: FrameType | None) -> tuple[str, bool, FrameType | None]:
    """Return what a program has called: the function, whether it is ours, and the caller's frame.

    The name is empty if it has called neither this library nor torch.
    """
    name, ours = "", None
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        package = _packages.get(module)
        if package is None:
            package = _packages[module] = str(module).partition(".")[0]
        if package == _PACKAGE:
            # The op is the same where a `LeadingShard` is first in a list, or direct ops are off.
            ours = ours if frame.f_code.co_name in _WAYS_TO_OPS else frame
        elif package == _TORCH:
            name = name or f"{frame.f_code.co_name}()"
        elif package not in _TRANSPARENT:
            break
        frame = frame.f_back
    return name if ours is None else _name_of(ours), ours is not None, frame


def _name_of(frame: FrameType) -> str:
    code, values = frame.f_code, frame.f_locals
    if code.co_name.startswith("__torch_"):
        return f"{values.get('func', code.co_name)}()"
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    given = [f"{name}={values[name]}" for name in names if type(values.get(name)) in _PLAIN]
    return f"{code.co_name}({', '.join(given)})"


def function_called(*, with_arguments: bool = True) -> str:
    """Return the library's function that the program has called.

    With numbers and flags, except for functions that compare these between the ranks.
    """
    name = find_call(sys._getframe(1))[0]
    return name if with_arguments else f"{name.partition('(')[0]}()"
