"""The gradient of one parameter: whether it has come, its local part, and its sharded form."""

from __future__ import annotations

from typing import cast

from torch import Tensor
from torch.distributed.tensor import DTensor

from composable_shard._flat_shard import FlatShard
from composable_shard._shard_spec import ShardSpec

__all__ = ["AwaitedGradients", "add_to_grad", "local_gradient"]


class AwaitedGradients:
    """Counts the gradients of a flat parameter's parameters in a backward pass."""

    def __init__(self, num_params: int) -> None:
        self._is_awaited = [True] * num_params  # not counted yet in this backward
        self._num_awaited = num_params

    def count(self, index: int) -> bool:
        """Count an accumulated gradient; return whether it was the last that was awaited."""
        if not self._is_awaited[index]:
            return False
        # Once each: a backward nested in another, as reentrant checkpointing runs it, may
        # accumulate the gradient of one parameter again before that of another has come.
        self._is_awaited[index] = False
        self._num_awaited -= 1
        if self._num_awaited:
            return False
        self.reset()
        return True

    def reset(self) -> None:
        """Start counting anew, for the next backward."""
        if self._num_awaited == len(self._is_awaited):
            return
        self._num_awaited = len(self._is_awaited)
        self._is_awaited = [True] * self._num_awaited


def add_to_grad(param: FlatShard, shard: Tensor) -> None:
    """Add to the gradient that a sharded parameter has.

    Raises:
        RuntimeError: If it is not a shard like the parameter.
    """
    grad = param.grad
    if not isinstance(grad, FlatShard) or grad.to_local().shape != shard.shape:
        raise RuntimeError(
            f"expected .grad of parameter '{param._shard_spec.label}' to be None or a FlatShard, "
            f"got {type(grad).__name__}. Let backward() set it, or assign a FlatShard."
        )
    grad.to_local().add_(shard)


def local_gradient(gradient: Tensor, spec: ShardSpec) -> Tensor:
    """Return the dense gradient that belongs to a parameter's local part.

    A DTensor gradient is brought to its parameter's placements first: layers with sequence
    parallelism produce partial sums.
    """
    if spec.tensor_parallel is None:
        return gradient
    mesh, placements = spec.tensor_parallel
    return cast(DTensor, gradient).redistribute(mesh, placements).to_local()
