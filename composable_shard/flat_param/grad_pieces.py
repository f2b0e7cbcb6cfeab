"""Gradients cut from a reduced shard, and small ones that wait for each other.

[Note: Small gradients]
What is done for a gradient as it arrives costs the host more than the copy of a small one does.
So once a round has begun in the ordinary way, small gradients stay in `.grad` of their unsharded
parameters until 64 KiB of them are there, or the unit is over. That is all the memory it takes,
and no more than a cache holds. Where every gradient counts as it arrives (hooks of users, buckets,
units that end with their last gradient, graphs of gradients), none waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable_shard.comm import ShardGroup
from composable_shard.layout import FlatLayout
from composable_shard.tensor import FlatShard, ShardSpec, wrap

__all__ = [
    "AwaitedGradients",
    "GradPieces",
    "SmallGradients",
    "local_gradient",
    "move_out_gradients",
    "packing_scale",
    "set_gradients",
    "write_gradient",
    "write_gradients",
]


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


class GradPieces:
    """Cuts a gradient shard into those of the parameters, each a view.

    Args:
        layout: The flat parameter's.
        rank: Whose shard it is.
        is_kept: The shard is the same memory in every step, so that views of it may be, too.
    """

    def __init__(self, layout: FlatLayout, rank: int, *, is_kept: bool) -> None:
        sizes = layout.piece_numels(rank)
        # Most gaps are empty, and each view costs a microsecond.
        kept = [index for index, size in enumerate(sizes) if index % 2 or size]
        self._sizes = [sizes[index] for index in kept]
        self._indices = [place for place, index in enumerate(kept) if index % 2]
        self._is_kept = is_kept
        self._shard: Tensor | None = None
        self._views: Sequence[Tensor] = []
        self._pieces: list[FlatShard | None] = []

    def cut(self, shard: Tensor, specs: list[ShardSpec]) -> Sequence[FlatShard | None]:
        """Return the parameters' slices of a shard of shape `(layout.shard_numel,)`.

        None for those that another rank holds whole: optimizers shall skip them.
        """
        if shard is self._shard and all(
            # They may have been moved out of the shard, or have got other data by hand.
            piece is None or piece._local is view
            for piece, view in zip(self._pieces, self._views, strict=True)
        ):
            return self._pieces
        parts = shard.split_with_sizes(self._sizes)
        pieces = [
            None if spec.is_elsewhere else wrap(parts[index], spec)
            for index, spec in zip(self._indices, specs, strict=True)
        ]
        if self._is_kept:
            self._shard, self._pieces = shard, pieces
            self._views = [parts[index] for index in self._indices]
        return pieces

    @staticmethod
    def wrap(
        pieces: Sequence[Tensor | None], specs: Sequence[ShardSpec]
    ) -> Sequence[FlatShard | None]:
        """Return slices that are there already, None where there is none, as for `cut`."""
        pairs = zip(pieces, specs, strict=True)
        return [
            None if piece is None or spec.is_elsewhere else wrap(piece, spec)
            for piece, spec in pairs
        ]

    def forget(self) -> None:
        """Give up the memory that pieces are views of."""
        self._shard, self._views, self._pieces = None, [], []


def packing_scale(
    group: ShardGroup, reduce_dtype: torch.dtype, *, is_cast: bool
) -> tuple[float, Tensor]:
    """Return what gradients are multiplied with while they are packed: 1 / ranks, or 1 for later.

    A sum of fp16 gradients may overflow where their mean does not. Else where it saves a pass: the
    whole buffer comes back, or sums are taken on the CPU and the division is exact.

    Args:
        group: The ranks whose gradients are averaged.
        reduce_dtype: In which they are packed.
        is_cast: Whether they come in another one.

    Returns:
        The scale, and the same as a CPU tensor of 0 dimensions, which kernels take fastest where it
        needs no conversion.
    """
    is_exact = group.device.type == "cpu" and group.num_ranks & (group.num_ranks - 1) == 0
    is_cheap = not is_cast and (group.size == 1 or is_exact)
    scale = 1.0 / group.num_ranks if is_cheap or reduce_dtype is torch.float16 else 1.0
    factor = torch.tensor(scale, dtype=torch.float64, device="cpu")
    if reduce_dtype.is_floating_point and factor.to(reduce_dtype).item() == scale:
        factor = factor.to(reduce_dtype)
    return scale, factor


def set_gradients(
    params: Sequence[FlatShard], shards: Sequence[FlatShard | None], used: Sequence[bool]
) -> None:
    """Set the gradients of sharded parameters that were used, or add to those they have.

    Raises:
        RuntimeError: If one that a parameter has is not a shard like the parameter.
    """
    for param, shard, is_used in zip(params, shards, used, strict=True):
        if not is_used or shard is None:
            continue
        grad = param.grad
        if grad is None:
            param.grad = shard
        elif isinstance(grad, FlatShard) and grad._local.shape == shard._local.shape:
            grad._local.add_(shard._local)
        else:
            raise RuntimeError(
                f"expected .grad of parameter '{param._shard_spec.label}' to be None or a "
                f"FlatShard, got {type(grad).__name__}. Let backward() set it, or assign a "
                "FlatShard."
            )


def move_out_gradients(params: Sequence[FlatShard], memory: Tensor) -> None:
    """Give gradients of sharded parameters that are views of `memory` memory of their own."""
    start = memory.untyped_storage().data_ptr()
    for param in params:
        grad = param.grad
        if isinstance(grad, FlatShard):
            local = grad._local
            if local.numel() and local.untyped_storage().data_ptr() == start:
                grad._local = local.clone()


def local_gradient(gradient: Tensor, spec: ShardSpec) -> Tensor:
    """Return the dense gradient that belongs to a parameter's local part.

    A DTensor gradient is brought to its parameter's placements first: layers with sequence
    parallelism produce partial sums.
    """
    if spec.tensor_parallel is None:
        return gradient
    mesh, placements = spec.tensor_parallel
    return cast(DTensor, gradient).redistribute(mesh, placements).to_local()


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
