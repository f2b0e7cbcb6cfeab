"""What `.grad` of a sharded parameter is while gradients wait for a reduction.

[Note: Pending gradients]
Gradients that `no_sync`, or a reduction that was put off, keeps are no shards yet. In plain torch
they would be in `.grad`, where `zero_grad()`, `p.grad = None` and `p.grad.zero_()` reach them, in
code that first asks whether `.grad` is None. So a `PendingGradient` stands for them there: whoever
sets another value drops them, and `zero_` counts. It has no values; whatever would read them raises
an error with the name of the parameter. An optimizer's step must not see it, for some of its state
would have changed before the error: while it is shown, the parameter has a class whose `grad` hides
it from steps, which skip the parameter as they skip any without a gradient, with a warning. No
optimizer is hooked, and without pending gradients a parameter's class is the usual one.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from composable_shard.tensor.flat_shard import (
    FlatShard,
    FlatShardOfDTensor,
    gradient_of,
    set_gradient,
    wrap,
)
from composable_shard.tensor.shard_spec import ShardSpec
from composable_shard.torch_private import (
    COMPILER_MODULE,
    STEP_CODE,
    OpOverload,
    make_wrapper,
    schema_of,
)


class PendingNotice:
    """Warns once for all parameters of a tree."""

    def __init__(self) -> None:
        self.was_given = False

    def give(self, fqn: str) -> None:
        """Warn of a step that skips a parameter, the first time."""
        if not self.was_given:
            self.was_given = True
            warnings.warn(
                f"optimizer.step() skips parameters such as '{fqn}', whose gradients wait for a "
                "reduction, as under no_sync. Run the last backward of a step outside no_sync, or "
                "call reduce_pending_gradients(module) before the step.",
                stacklevel=6,
            )


class PendingState:
    """What a `PendingGradient` and its aliases have in common."""

    def __init__(self, reduced: Tensor | None, notice: PendingNotice) -> None:
        # What earlier backwards have reduced already: the `.grad` there would be else
        self.reduced = reduced
        self.is_zeroed = False  # `zero_` has run on it, so that what waits counts as zeros
        self.notice = notice  # warns of steps

    def zero(self) -> None:
        """Set the whole gradient to zero."""
        self.is_zeroed = True
        if self.reduced is not None:
            self.reduced.zero_()

    def add(self, other: Tensor) -> None:
        """Add a gradient that needs no reduction, as of a loss of the sharded parameters."""
        self.reduced = other.detach().clone() if self.reduced is None else self.reduced.add_(other)


class PendingGradient(FlatShard):
    """Stands for a gradient that waits for a reduction, see [Note: Pending gradients]."""

    _state: PendingState

    @staticmethod
    def __new__(
        cls: type[PendingGradient],
        like: Tensor,
        spec: ShardSpec,
        state: PendingState,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> PendingGradient:
        """Make one for a parameter of this spec."""
        self: PendingGradient = make_wrapper(
            cls,
            spec.shape,
            spec.stride,
            dtype=dtype or like.dtype,
            device=device or like.device,
        )
        self._shard_spec, self._guard, self._state = spec, None, state
        return self

    @property
    def _local(self) -> NoReturn:  # type: ignore[override] # no values
        """Raise: so does everything that reads values."""
        raise RuntimeError(
            f"the gradient of parameter '{self._shard_spec.label}' waits for a reduction, as under "
            "no_sync, so this rank has no shard of it. Run a backward that reduces it, or call "
            "reduce_pending_gradients(module); get_pending_gradients(module) shows this rank's own."
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # as FlatShard's
        cls,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run what drops or zeroes gradients, and what brings them elsewhere; raise otherwise."""
        kwargs = kwargs or {}
        name = schema_of(func).name.removeprefix("aten::")
        target = args[0] if args else None
        if name == "_foreach_zero_":
            for each in args[0]:
                each.zero_()
            return None
        if isinstance(target, cls):
            if name == "zero_":
                target._state.zero()
                return target
            if name == "add_" and len(args) == 2 and not kwargs:
                target._state.add(args[1])
                return target
            if name in _ALIASES:
                place = kwargs.get("dtype"), kwargs.get("device")
                return cls(target, target._shard_spec, target._state, *place)
        shards = [arg for arg in args if isinstance(arg, list | tuple)]
        for each in [*args, *kwargs.values(), *(item for items in shards for item in items)]:
            if isinstance(each, cls):
                each._local  # noqa: B018 -- raises
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # as FlatShard's
        """Say what waits; no communication."""
        return f"{type(self).__name__}('{self._shard_spec.label}', shape={tuple(self.shape)})"


_ALIASES = frozenset({"alias", "detach", "lift_fresh", "_to_copy"})


def reduced_gradient(param: Tensor) -> Tensor | None:
    """Return the part of a parameter's `.grad` that is reduced."""
    grad = gradient_of(param)
    return grad._state.reduced if isinstance(grad, PendingGradient) else grad


class _AwaitingShard(FlatShard):
    """A parameter whose `.grad` is a `PendingGradient`."""

    @property
    def grad(self) -> Tensor | None:
        """The gradient; an optimizer's step sees the reduced part alone."""
        grad = gradient_of(self)
        if isinstance(grad, PendingGradient) and _is_read_by_step(sys._getframe(1)):
            state = grad._state
            if state.reduced is None:
                state.notice.give(self._shard_spec.label.fqn)
            return state.reduced
        return grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        set_gradient(self, value)

    @grad.deleter
    def grad(self) -> None:
        set_gradient(self, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the parameter alone: it has no pending gradient."""
        twin = super().__deepcopy__(memo)
        if type(twin) in _USUAL:
            twin.__class__ = _USUAL[type(twin)]
        return twin


class _AwaitingShardOfDTensor(_AwaitingShard, FlatShardOfDTensor):
    """Such a parameter that was a DTensor."""


_AWAITING: dict[type, type] = {
    FlatShard: _AwaitingShard,
    FlatShardOfDTensor: _AwaitingShardOfDTensor,
}
_USUAL: dict[type, type] = {awaiting: usual for usual, awaiting in _AWAITING.items()}
AWAITING_TYPES: tuple[type, ...] = tuple(_USUAL)


def _is_read_by_step(frame: FrameType | None) -> bool:
    """Return whether the frame that reads `.grad` belongs to the step of an optimizer.

    Not to a closure that the step runs, nor to a `zero_grad` that it calls.
    """
    while frame is not None:
        name = frame.f_code.co_name
        if frame.f_code is STEP_CODE:
            return True
        is_own = isinstance(frame.f_locals.get("self"), Optimizer) and name != "zero_grad"
        is_own = is_own or frame.f_globals.get("__name__") == COMPILER_MODULE
        if not is_own and name not in ("<listcomp>", "<genexpr>"):
            return False
        frame = frame.f_back
    return False


def show_pending(param: FlatShard, notice: PendingNotice) -> PendingState:
    """Let `.grad` of a parameter stand for a gradient that waits; return what it shares."""
    grad = gradient_of(param)
    state = PendingState(grad, notice)
    set_gradient(param, PendingGradient(param, param._shard_spec, state))
    param.__class__ = _AWAITING.get(type(param), type(param))
    return state


def hide_pending(param: FlatShard, state: PendingState) -> bool:
    """Let `.grad` be the reduced part again; return whether nobody has set it otherwise."""
    grad = gradient_of(param)
    param.__class__ = _USUAL.get(type(param), type(param))
    if not isinstance(grad, PendingGradient):
        return False
    reduced = state.reduced if grad._state is state else None
    if reduced is not None and (reduced.dtype != param.dtype or reduced.device != param.device):
        reduced = reduced.to(param.device, param.dtype)
    param.grad = reduced
    return grad._state is state


class _WithoutGraph(torch.autograd.Function):
    """Identity for a gradient that was computed with create_graph, and lost its graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, gradient: FlatShard) -> FlatShard:
        """Return an alias, as autograd wants an output of its own."""
        ctx.label = gradient._shard_spec.label
        return wrap(gradient._local, gradient._shard_spec)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> NoReturn:
        """Raise: what it should add would be missing."""
        raise RuntimeError(
            f"a backward reached the .grad of parameter '{ctx.label}', which was reduced over the "
            "ranks and has no graph: create_graph of backward() gives no graph to gradients of "
            "sharded parameters. A penalty on them can't be trained; one on gradients of inputs or "
            "activations can: torch.autograd.grad(loss, x, create_graph=True)."
        )


def refuse_graphs(params: Sequence[FlatShard], used: Sequence[bool]) -> None:
    """Make a backward raise that reaches the `.grad` of parameters that were used."""
    for param, is_used in zip(params, used, strict=True):
        grad = param.grad
        if is_used and isinstance(grad, FlatShard):
            with torch.enable_grad():
                anchor = torch.zeros((), requires_grad=True)
                param.grad = _WithoutGraph.apply(anchor, grad)  # type: ignore[no-untyped-call]
