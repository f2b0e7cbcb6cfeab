"""What `.grad` of a sharded parameter is while gradients wait for a reduction.

[Note: Pending gradients]
Gradients that `no_sync`, or a reduction that was put off, keeps are no shards yet. In plain torch
they would be in `.grad`, where `zero_grad()` and `p.grad = None` reach them, in code that first
asks whether `.grad` is None: where it were, gradients would be kept over a `zero_grad()`, and
nobody would know. So a `PendingGradient` stands for them: whoever sets another value drops them,
and `zero_` counts. It has no values; whatever would read them raises an error with the name of the
parameter, optimizers before they have made state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from composable_shard.tensor.flat_shard import FlatShard, set_gradient, wrap
from composable_shard.tensor.shard_spec import ShardSpec
from composable_shard.torch_private import (
    OpOverload,
    is_in_step,
    make_wrapper,
    schema_of,
)


class PendingState:
    """What a `PendingGradient` and its aliases have in common."""

    def __init__(self, reduced: Tensor | None) -> None:
        # What earlier backwards have reduced already: the `.grad` there would be else
        self.reduced = reduced
        self.is_zeroed = False  # `zero_` has run on it, so that what waits counts as zeros

    def zero(self) -> None:
        """Set the whole gradient to zero."""
        self.is_zeroed = True
        if self.reduced is not None:
            self.reduced.zero_()


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

    @property
    def is_sparse(self) -> bool:  # type: ignore[override] # what an optimizer asks first
        """False; raise for an optimizer's step, which would go on to change its state."""
        return is_in_step() and self._local

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
    grad = param.grad
    return grad._state.reduced if isinstance(grad, PendingGradient) else grad


def show_pending(param: FlatShard) -> PendingState:
    """Let `.grad` of a parameter stand for a gradient that waits; return what it shares."""
    grad = param.grad
    state = PendingState(grad)
    set_gradient(param, PendingGradient(param, param._shard_spec, state))
    return state


def hide_pending(param: FlatShard, state: PendingState) -> bool:
    """Let `.grad` be the reduced part again; return whether nobody has set it otherwise."""
    grad = param.grad
    if not isinstance(grad, PendingGradient):
        return False
    reduced = state.reduced if grad._state is state else None
    if reduced is not None and (reduced.dtype != param.dtype or reduced.device != param.device):
        reduced = reduced.to(param.device, param.dtype)
    param.grad = reduced
    return grad._state is state


def forget_pending_of(param: FlatShard) -> None:
    """Let `.grad` be the reduced part again, whoever has shown what waits, and how much of it."""
    grad = param.grad
    if isinstance(grad, PendingGradient):
        hide_pending(param, grad._state)


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
