"""The `.grad` of a sharded parameter while gradients wait for a reduction.

[Note: Pending gradients]
Gradients kept by `no_sync` or by a postponed reduction are not shards yet. In plain torch they
would be in `.grad`, where `zero_grad()` and `p.grad = None` drop them. Code that does so first asks
whether `.grad` is None; if it were, gradients would silently survive a `zero_grad()`. So a
`PendingGradient` stands for them, and setting another value drops them. It has no values; an op
that reads or writes values raises an error with the parameter's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from composable_shard.tensor.flat_shard import FlatShard, Unreachable, set_gradient, wrap
from composable_shard.torch_private import DisableTorchFunctionSubclass, OpOverload, make_wrapper

aten = torch.ops.aten


class PendingGradient(FlatShard):
    """Stands for a gradient that waits for a reduction, see [Note: Pending gradients]."""

    reduced: Tensor | None  # part reduced by earlier backwards, else `.grad`

    @staticmethod
    def __new__(
        cls: type[PendingGradient],
        like: FlatShard,
        reduced: Tensor | None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> PendingGradient:
        """Make a placeholder for a parameter, or one like another placeholder."""
        spec = like._shard_spec
        self: PendingGradient = make_wrapper(
            cls,
            spec.shape,
            spec.stride,
            dtype=dtype or like.dtype,
            device=device or like.device,
        )
        self._shard_spec, self._guard, self.reduced = spec, None, reduced
        return self

    @property
    def _local(self) -> NoReturn:  # type: ignore[override] # no values
        """Raise, and so make every op raise that reads or writes values."""
        raise RuntimeError(
            f"the gradient of parameter '{self._shard_spec.label}' waits for a reduction, as under "
            "no_sync, so this rank has no shard of it. Run a backward that reduces it, or call "
            "reduce_pending_gradients(module); get_pending_gradients(module) shows this rank's "
            "own. To drop it set it to None, as zero_grad() does without set_to_none=False."
        )

    @property
    def is_sparse(self) -> bool:  # type: ignore[override] # what an optimizer asks first
        """Raise, before an optimizer changes its state."""
        return self._local

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # as FlatShard's
        cls,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Follow the parameter in `Module.to`; all other ops read `_local`, and so raise."""
        options = kwargs or {}
        if func is aten._to_copy.default:
            return cls(args[0], args[0].reduced, options.get("dtype"), options.get("device"))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # as FlatShard's
        """Say what waits; no communication."""
        return f"{type(self).__name__}('{self._shard_spec.label}', shape={tuple(self.shape)})"


class HiddenGradient(PendingGradient):
    """Stands for a gradient at rest while modules show full parameters, which have none."""

    @property
    def _local(self) -> NoReturn:  # type: ignore[override] # no values
        raise RuntimeError(
            f"the gradient of parameter '{self._shard_spec.label}' is not shown while its full "
            "value is. Read and edit it after reshard(module), or inside unshard_params(module, "
            "with_grads=True). To drop it set it to None, as zero_grad() does without "
            "set_to_none=False."
        )


def reduced_gradient(param: Tensor) -> Tensor | None:
    """Return the part of a parameter's `.grad` that is reduced."""
    grad = param.grad
    return grad.reduced if isinstance(grad, PendingGradient) else grad


def show_pending(param: FlatShard) -> None:
    """Set `.grad` of a parameter to a PendingGradient, for a gradient that waits."""
    set_gradient(param, PendingGradient(param, param.grad))


def hide_pending(param: FlatShard) -> bool:
    """Set `.grad` to the reduced part; return whether the PendingGradient was still there."""
    grad = param.grad
    if not isinstance(grad, PendingGradient):
        return False
    reduced = grad.reduced
    param.grad = None if reduced is None else reduced.to(param.device, param.dtype)
    return True


class _WithoutGraph(FlatShard):
    """A gradient of `backward(create_graph=True)`, which has no graph."""

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Raise in `torch.autograd.grad`, which would say that no parameter was used."""
        if function is torch.autograd.grad:
            for output in args[0]:
                if (error := getattr(output.grad_fn, "error", None)) is not None:
                    raise RuntimeError(error)
        with DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def refuse_graphs(params: Sequence[FlatShard], used: Sequence[bool]) -> None:
    """Make a backward raise that reaches the `.grad` of parameters that were used."""
    for param, is_used in zip(params, used, strict=True):
        grad = param.grad
        if is_used and isinstance(grad, FlatShard):
            with torch.enable_grad():
                anchor = torch.zeros((), requires_grad=True)
                alias = partial(wrap, grad._local, grad._shard_spec)
                error = (
                    f"a backward reached the .grad of parameter '{grad._shard_spec.label}', which "
                    "was reduced over the ranks and has no graph: create_graph of backward() gives "
                    "no graph to gradients of sharded parameters. A penalty on them can't be "
                    "trained; one on gradients of inputs or activations can: "
                    "torch.autograd.grad(loss, x, create_graph=True). Second-order optimizers "
                    "(AdaHessian, SophiaH) need a Hessian of the full parameters, which "
                    "list(model.parameters()) are between unshard(model, recurse=True) and "
                    "reshard(model, recurse=True)."
                )
                param.grad = Unreachable.apply(anchor, alias, error)  # type: ignore[no-untyped-call]
                param.grad.__class__ = _WithoutGraph
