"""Small gradients wait for each other, so that many are packed at once.

[Note: Small gradients]
What is done for a gradient as it arrives costs the host more than the copy of a small one does.
So once a round has begun in the ordinary way, small gradients stay in `.grad` of their unsharded
parameters until 64 KiB of them are there, or the unit is over. That is all the memory it takes,
and no more than a cache holds. Where every gradient counts as it arrives (hooks of users, buckets,
units that end with their last gradient, graphs of gradients), none waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["SmallGradients", "write_gradient", "write_gradients"]

_BATCH_NBYTES = 1 << 16


class SmallGradients:
    """Which gradients of a flat parameter wait to be packed.

    Attributes:
        indices: The parameters whose gradients wait, in the order in which they came.
    """

    __slots__ = ("_may_wait", "_nbytes", "_room", "indices")

    def __init__(self) -> None:
        self.indices: list[int] = []
        self._nbytes: list[int] = []
        self._may_wait: list[bool] | None = None  # by parameter; None while none may
        self._room = 0

    def bind(self, views: Sequence[Tensor]) -> None:
        """Take the sizes of the gradients from the views that they are packed into."""
        self.close()
        self._nbytes = [view.nbytes for view in views]

    def open(self, has_arrived: Sequence[bool]) -> None:
        """Let gradients wait from now on: small ones that are not in the buffer yet."""
        if self._may_wait is None:
            self._room = _BATCH_NBYTES
            self._may_wait = [
                nbytes < _BATCH_NBYTES and not arrived
                for nbytes, arrived in zip(self._nbytes, has_arrived, strict=True)
            ]

    def close(self) -> None:
        """Let no gradient wait, and forget those that did."""
        self._may_wait, self.indices = None, []

    def take(self) -> list[int]:
        """Return the parameters whose gradients are to be packed now."""
        indices, self.indices, self._room = self.indices, [], _BATCH_NBYTES
        return indices

    def receive(self, index: int, arrive: Callable[[int], object], _: Tensor) -> None:
        """Let the gradient of parameter `index` wait if it may and there is room; else arrive.

        In a single function, as it runs for each parameter: a hook of the unsharded one.
        """
        may_wait = self._may_wait
        if may_wait is not None and may_wait[index]:
            room = self._room = self._room - self._nbytes[index]
            if room >= 0:
                may_wait[index] = False
                self.indices.append(index)
                return
        arrive(index)


def write_gradient(view: Tensor, gradient: Tensor, factor: Tensor | None) -> None:
    """Copy a gradient, times a tensor of 0 dimensions, into a view: one kernel, one pass."""
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    if factor is None:
        view.copy_(gradient)
    else:
        torch.mul(gradient, factor, out=view)


def write_gradients(
    views: Sequence[Tensor], params: Sequence[nn.Parameter | None], factor: Tensor | None
) -> list[int]:
    """Move the gradients of parameters, times a tensor of 0 dimensions, into views.

    Returns:
        The positions of those that have one: a hook of a user may have taken it away.
    """
    positions, targets, gradients = [], [], []
    for position, (view, param) in enumerate(zip(views, params, strict=True)):
        gradient = None if param is None else param.grad
        if gradient is not None:
            param.grad = None  # type: ignore[union-attr]
            positions.append(position)
            targets.append(view)
            gradients.append(gradient)
    if factor is None and targets and not any(gradient.is_sparse for gradient in gradients):
        torch._foreach_copy_(targets, gradients)
        return positions
    for view, gradient in zip(targets, gradients, strict=True):
        write_gradient(view, gradient, factor)
    return positions
