"""Gradients as users find them: slices of a reduced shard, their wrappers, and their memory.

[Note: Lent pieces]
Elsewhere each backward needs a shard of memory for gradients, until they are dropped. To make the
tensors anew took a quarter of all host time of a unit. So on the CPU they are kept from step to
step: the shard, its views, and their wrappers, which `.grad` is set to. When the last of these
`.grad`s is set to None, and nobody else has one or an alias, the shard's storage is resized to
nothing. The next reduction gives it memory again. While one is in use, others are made.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from sys import getrefcount
from typing import cast

import torch
from torch import Tensor

from composable_shard.flat_param.entries import ParamEntry
from composable_shard.layout import FlatLayout
from composable_shard.tensor import (
    FlatShard,
    ShardSpec,
    WriteGuard,
    gradient_of,
    is_trainable,
    set_gradient,
    wrap,
)
from composable_shard.torch_private import (
    DisableTorchFunctionSubclass,
    make_wrapper,
    storage_uses_of,
    use_count_of,
)


def _count_local() -> int:
    probe = object()
    return getrefcount(probe)


_LOCAL = _count_local()  # references that a local variable is counted with: 2 before Python 3.14


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
        self._is_lent, self._num_refs = False, 0  # [Note: Lent pieces]; to the storage, by itself
        self._entries: Sequence[ParamEntry] = ()
        self._shard: Tensor | None = None
        self._views: Sequence[Tensor] = []
        self._pieces: list[FlatShard | None] = []

    def publish(
        self,
        shard: Tensor,
        entries: Sequence[ParamEntry],
        guard: WriteGuard,
        used: Sequence[bool],
    ) -> None:
        """Set the gradients of parameters that were used, or add to those they have.

        `shard` has all of them, shape `(layout.shard_numel,)`; `guard` is that of the parameters.
        """
        pieces = self._cut(shard, entries)
        num_set = set_gradients(entries, pieces, used)
        if self._is_lent and pieces is self._pieces:
            guard.lent.lend(num_set, partial(_take_back, weakref.ref(self)))
            if num_set == 0:
                self.forget()

    def _cut(self, shard: Tensor, entries: Sequence[ParamEntry]) -> Sequence[FlatShard | None]:
        """Return the slices of parameters: None for those that another rank holds whole."""
        if shard is self._shard and (
            self._is_lent
            # They may have been moved out of the shard, or have got other data by hand.
            or all(
                piece is None or piece._local is view
                for piece, view in zip(self._pieces, self._views, strict=True)
            )
        ):
            return self._pieces
        views = self.split(shard)
        pieces = wrap_all(views, [each.spec for each in entries])
        is_lent = not self._is_kept and shard.device.type == "cpu"
        if is_lent and self._shard is not None:
            is_lent = self._shard is shard or not self._shard.untyped_storage().nbytes()
        is_lent = is_lent and shard.untyped_storage().nbytes() == shard.nbytes
        if self._is_kept or is_lent:
            self._shard, self._pieces, self._views = shard, pieces, views
            self._is_lent, self._entries = is_lent, entries
            self._num_refs = getrefcount(shard.untyped_storage())
        return pieces

    def lend(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Return the shard with memory again; None where it is in use, or is another one."""
        if self._shard is not None and self._shard.untyped_storage().nbytes():
            self.take_back()
        shard = self._shard
        if not self._is_lent or shard is None or shard.untyped_storage().nbytes():
            return None
        if shard.dtype != dtype or shard.numel() != numel:
            return None
        shard.untyped_storage().resize_(shard.nbytes)
        return shard

    def take_back(self) -> int:
        """Free the memory once no piece is a gradient; return how many still are."""
        shard = self._shard
        if shard is None or not self._is_lent:
            return 0
        pieces = zip(self._entries, self._pieces, strict=True)
        num = sum([gradient_of(entry.sharded) is piece is not None for entry, piece in pieces])
        if num:
            return num
        del pieces  # it holds the last one
        is_held = getrefcount(shard) > 1 + _LOCAL or use_count_of(shard) > 1
        is_held = is_held or getrefcount(shard.untyped_storage()) > self._num_refs
        # Numpy has had it; or processes have.
        is_held = is_held or not shard.untyped_storage().resizable()
        is_held = is_held or shard.untyped_storage().is_shared()
        if is_held or self._are_changed() or self.are_held(shard, 1):
            self.forget()
        else:
            shard.untyped_storage().resize_(0)
        return 0

    def _are_changed(self) -> bool:
        """Return whether a user has done anything to the pieces that would outlive a step."""
        for piece, view in zip(self._pieces, self._views, strict=True):
            if piece is not None and (piece._local is not view or len(vars(piece)) > 3):
                return True
        return any([piece is not None and is_trainable(piece) for piece in self._pieces])

    def split(self, shard: Tensor) -> list[Tensor]:
        """Return the parameters' parts of a shard of shape `(layout.shard_numel,)`."""
        parts = shard.unsafe_split_with_sizes(self._sizes)  # which don't hold the shard itself
        return [parts[index] for index in self._indices]

    def are_held(self, memory: Tensor, num_uses: int) -> bool:
        """Return whether anybody else holds pieces, or other views of their memory.

        Args:
            memory: That of the shard.
            num_uses: How often its storage is used, pieces apart.
        """
        if storage_uses_of(memory) > num_uses + len(self._views):
            return True
        for index in range(len(self._views)):  # zip and enumerate would hold their last items
            piece, view = self._pieces[index], self._views[index]
            is_view = piece is not None and piece._local is view
            # By a list and the variable; a view by its piece too.
            if is_view and (
                getrefcount(piece) > 1 + _LOCAL or use_count_of(cast(Tensor, piece)) > 1
            ):
                return True
            if getrefcount(view) > 1 + is_view + _LOCAL or use_count_of(view) > 1:
                return True
        return False

    def forget(self) -> None:
        """Give up the memory that pieces are views of."""
        self._shard, self._views, self._pieces, self._is_lent = None, [], [], False


def _take_back(pieces_ref: weakref.ref[GradPieces]) -> int:
    pieces = pieces_ref()
    return 0 if pieces is None else pieces.take_back()


def wrap_all(
    locals_: Sequence[Tensor | None], specs: Sequence[ShardSpec]
) -> list[FlatShard | None]:
    """Return shards of these specs; None for no tensor, and for a parameter of another owner.

    As `wrap` does, of tensors of one dtype and device: each call and question takes its time.
    """
    first = next((each for each in locals_ if each is not None), None)
    kind = () if first is None else (first.dtype, torch.strided, first.device)
    shards: list[FlatShard | None] = []
    for local, spec in zip(locals_, specs, strict=True):
        shard = None
        if local is not None and not spec.is_owned_by_other_rank:
            shard = make_wrapper(FlatShard, spec.shape, spec.stride, None, None, *kind)
            shard.__dict__ = {"_local": local, "_shard_spec": spec, "_guard": None}
        shards.append(shard)
    return shards


def set_gradients(
    entries: Sequence[ParamEntry],
    shards: Sequence[FlatShard | None],
    used: Sequence[bool],
) -> int:
    """Set the gradients of sharded parameters that were used, or add to those they have.

    Returns:
        How many are set.

    Raises:
        RuntimeError: If one that a parameter has is not a shard like the parameter.
    """
    num_set = 0
    with DisableTorchFunctionSubclass():  # [Note: Many getters]
        for entry, shard, is_used in zip(entries, shards, used, strict=True):
            if not is_used or shard is None:
                continue
            param = entry.sharded
            grad = gradient_of(param)
            if grad is None:
                set_gradient(param, shard)
                num_set += 1
            elif isinstance(grad, FlatShard) and grad._local.shape == shard._local.shape:
                grad._local.add_(shard._local)
            else:
                take_gradient(param, grad)._local.add_(shard._local)
    return num_set


def take_gradient(param: FlatShard, grad: Tensor) -> FlatShard:
    """Return the gradient of a sharded parameter as a shard.

    It is a plain tensor after a use outside of all units, where this rank holds the parameter
    whole: such a use is right with one rank, and of parameters alone under `NO_SHARD`.

    Raises:
        RuntimeError: If it is no shard like the parameter, nor can become one.
    """
    spec = param._shard_spec
    if isinstance(grad, FlatShard) and grad._shard_spec == spec:
        return grad
    if type(grad) is Tensor and spec.is_whole and grad.shape == param.shape:
        param.grad = shard = wrap(spec.slice(grad), spec)
        return shard
    raise RuntimeError(
        f"expected .grad of parameter '{spec.label}' to be None or a FlatShard, got "
        f"{type(grad).__name__}. Let backward() set it, or assign a FlatShard."
    )
