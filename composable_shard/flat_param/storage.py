"""Storages of buffers: allocated, freed, and filled with NaN where tests ask for it.

[Note: Storage and autograd]
The unsharded buffer and the reduce buffer are allocated once and keep their identity; only their
storages are resized, to nothing and back. Views of them therefore stay valid: the unsharded
parameters that modules compute with, what autograd saved of them in forward, and the views that
gradients are packed into. Each unsharded parameter is built on its own `.data` alias, and
collectives write through another: an alias has its own version counter, so refilling the buffer
for backward does not look like an in-place change of what forward saved.
"""

from __future__ import annotations

import math
import os

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard.comm import (
    Waitable,
    explained,
)
from composable_shard.torch_private import allow_reads, refuse_reads, storage_of

_IS_FREED = (
    "a view of full parameters is read after the unit has freed them. Keep a copy instead "
    "(`view.clone()`), or call unshard(module) before."
)


class Poison:
    """Fills memory that must not be read with NaN: freed, just allocated, or in flight.

    Tests switch it on, with COMPOSABLE_SHARD_POISON=1 or `is_on`. A read without a claim then gives
    the same wrong numbers each time, and not by chance the right ones. Gathers block.
    """

    is_on = os.environ.get("COMPOSABLE_SHARD_POISON", "0") == "1"

    @staticmethod
    def fill(tensor: Tensor) -> None:
        """Fill a tensor of floating point or complex numbers with NaN, seen by no version."""
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            with torch.no_grad():
                tensor.data.fill_(math.nan)


class PoisonedGather:
    """A gather whose values are hidden until the wait, except this rank's part."""

    def __init__(
        self, gather: Waitable, output: Tensor, own_part: Tensor, group: dist.ProcessGroup
    ) -> None:
        with explained(group):
            gather.wait()
        self._output, self._values = output, output.clone()
        # The own part, perhaps the shard itself, keeps its values: an interrupt would lose them.
        start = own_part.storage_offset() - output.storage_offset()
        Poison.fill(output[:start])
        Poison.fill(output[start + own_part.numel() :])

    def wait(self) -> None:
        """Write the values where they belong."""
        self._output.copy_(self._values)


def alloc_storage(tensor: Tensor) -> None:
    """Give `tensor`, which spans its whole storage, memory again; no-op if it has some."""
    storage, nbytes = tensor.untyped_storage(), tensor.nbytes
    if storage.nbytes() != nbytes:
        if allow_reads is not None:
            allow_reads(storage_of(tensor))
        storage.resize_(nbytes)
        if Poison.is_on:
            Poison.fill(tensor)


def free_storage(tensor: Tensor, *, refuses_reads: bool = False) -> None:
    """Give back the memory of `tensor`'s storage; the tensor and its views stay, unreadable.

    No-op if torch has lent the memory permanently, as to a numpy array. With `refuses_reads` a read
    raises instead of crashing the process, if torch can do that.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() != 0 and storage.resizable():
        if Poison.is_on:
            Poison.fill(tensor)
        storage.resize_(0)
        if refuses_reads and refuse_reads is not None and allow_reads is not None:
            refuse_reads(storage_of(tensor), _IS_FREED)
