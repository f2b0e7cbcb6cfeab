"""Storages of buffers: allocated and freed.

[Note: Storage and autograd]
The unsharded buffer and the reduce buffer are allocated once and keep their identity; only their
storages are resized, to nothing and back. Views of them therefore stay valid: the unsharded
parameters that modules compute with, what autograd saved of them in forward, and the views that
gradients are packed into. Each unsharded parameter is built on its own `.data` alias, and
collectives write through another: an alias has its own version counter, so refilling the buffer
for backward does not look like an in-place change of what forward saved.
"""

from __future__ import annotations

from torch import Tensor

from composable_shard.torch_private import allow_reads, number_of, refuse_reads

_IS_FREED = (
    "a view of full parameters is read after the unit has freed them. Keep a copy instead "
    "(`view.clone()`), or call unshard(module) before."
)


def alloc_storage(tensor: Tensor) -> None:
    """Give `tensor`, which spans its whole storage, memory again; no-op if it has some."""
    storage, nbytes = tensor.untyped_storage(), tensor.nbytes
    if storage.nbytes() != nbytes:
        if allow_reads is not None:
            allow_reads(number_of(storage))
        storage.resize_(nbytes)


def free_storage(tensor: Tensor, *, refuses_reads: bool = False) -> None:
    """Give back the memory of `tensor`'s storage; the tensor and its views stay, unreadable.

    No-op if torch has lent the memory permanently, as to a numpy array. With `refuses_reads` a read
    raises instead of crashing the process, if torch can do that.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() != 0 and storage.resizable():
        storage.resize_(0)
        if refuses_reads and refuse_reads is not None and allow_reads is not None:
            refuse_reads(number_of(storage), _IS_FREED)
