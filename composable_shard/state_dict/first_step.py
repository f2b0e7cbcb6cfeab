"""The state that an optimizer's first step will make, found by a step of its class.

[Note: Trial step]
The step runs on small plain parameters in the place of the optimizer's, on this rank alone, and
without the hooks of the optimizer. So it may differ from the real one: an optimizer may look at
sizes, or at the model. What it communicates raises, because other ranks may not be here.
"""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composable_shard.torch_private import TorchDispatchMode

_MOST = 8  # elements along a dim
_HOOKS = "_optimizer_"  # how the names of attributes with hooks begin
_NUMBERS = (bool, int, float, str)


def try_first_step(optimizer: Optimizer) -> dict[Any, Any]:
    """Return the state that a first step would make, by the optimizer's parameters or other keys.

    The values are of small plain parameters. Nothing changes: not the optimizer, nor generators of
    random numbers. [Note: Trial step]

    Raises:
        Exception: What the step raises, or the copy of what the optimizer has.
    """
    problem: Exception | None = None
    with _undisturbed():
        for arguments in ((), (_closure,)):
            small = {id(param): _small(param) for param in _params(optimizer)}
            originals = {id(small[id(param)]): param for param in _params(optimizer)}
            try:
                tried = _copy(optimizer, {**small})
                if callable(train := getattr(tried, "train", None)):
                    train()  # of a schedule-free one, without which its step raises
                with _NoCollectives(), torch.enable_grad():
                    _step_of(optimizer)(tried, *arguments)
            except Exception as error:  # of any kind: the code is the program's
                problem = problem or error
                continue
            return {originals.get(id(key), key): value for key, value in tried.state.items()}
    assert problem is not None
    raise problem


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _closure() -> Tensor:
    return torch.zeros(())


def _small(param: Tensor) -> nn.Parameter:
    """Return a plain parameter with as many dims, a gradient, and attributes that are numbers."""
    values = torch.ones([min(size, _MOST) for size in param.shape], dtype=param.dtype)
    if values.is_floating_point():
        values = torch.arange(values.numel()).sin().view(values.shape).to(param.dtype)
    small = nn.Parameter(values, requires_grad=param.requires_grad)
    if param.requires_grad:
        small.grad = values.cos()
    for name, value in vars(param).items():
        if not name.startswith("_") and isinstance(value, _NUMBERS):
            setattr(small, name, value)
    return small


def _copy(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Return an optimizer of the same class with copies of what it has; `memo` as in `deepcopy`."""
    copied: Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = copied
    found = {
        name: value
        for name, value in vars(optimizer).items()
        # A scheduler may have replaced the method, and knows the optimizer itself.
        if name != "step" and not (name.startswith(_HOOKS) and isinstance(value, dict))
    }
    for name, value in vars(optimizer).items():
        if name not in found and name != "step":
            vars(copied)[name] = type(value)()  # no hooks
    for value in _within([*found.values()]):
        if isinstance(value, nn.Module):
            raise NotImplementedError(f"it has a {type(value).__name__}")
        if isinstance(value, Optimizer) and id(value) not in memo:
            _copy(value, memo)
    vars(copied).update(copy.deepcopy(found, memo))
    return copied


def _within(value: Any) -> Iterator[Any]:
    """Yield what is in lists and dicts, at any depth."""
    if isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _within(item)
    else:
        yield value


def _step_of(optimizer: Optimizer) -> Callable[..., Any]:
    """Return the step of the class, without what runs hooks around it."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Restore random number generators, and warn and compile nothing."""
    numpy = sys.modules.get("numpy")
    state = random.getstate(), numpy and numpy.random.get_state()
    is_compiling = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if is_compiling else nullcontext()
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), eager:
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(state[0])
        if numpy is not None:
            numpy.random.set_state(state[1])


class _NoCollectives(TorchDispatchMode):
    """Lets communication raise."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError(f"{func} needs other ranks")
        return func(*args, **(kwargs or {}))
