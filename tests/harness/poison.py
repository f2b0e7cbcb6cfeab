"""NaN in memory that nobody may read: freed, just allocated, or written by a gather in flight.

A read without a claim then gives the same wrong numbers each time, and not by chance the right
ones. With COMPOSABLE_SHARD_POISON=1 the workers do all they do so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from composable_shard.comm import Waitable, calls
from composable_shard.comm.launches import issuers
from composable_shard.comm.watch import explained
from composable_shard.flat_param import extended_gathers, full_values, gradients, handle, memory
from composable_shard.flat_param.full_values import FullState, FullValues
from composable_shard.flat_param.handle import FlatParamHandle
from composable_shard.flat_param.storage import alloc_storage, free_storage
from composable_shard.runtime import launched_gathers
from composable_shard.runtime.unit import TreeContext

SWITCH = "COMPOSABLE_SHARD_POISON"
_gather = FullValues.gather
_launch = launched_gathers._launch


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill memory that nobody may read with NaN inside the block; gathers block."""
    with pytest.MonkeyPatch.context() as patch:
        # Its frames are the library's, so that errors name a line of the program.
        patch.setitem(calls._packages, __name__, calls._PACKAGE)
        patch.setattr(FullValues, "gather", _gather_hidden)
        patch.setattr(launched_gathers, "_launch", _launch_hidden)
        for module in (full_values, gradients, handle, extended_gathers):
            patch.setattr(module, "alloc_storage", _alloc)
            patch.setattr(module, "free_storage", _free)
        patch.setattr(memory, "free_storage", _free)
        yield


def _spoil(tensor: Tensor) -> None:
    """Fill a tensor of floating point or complex numbers with NaN, seen by no version."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        with torch.no_grad():
            tensor.data.fill_(math.nan)


def _alloc(tensor: Tensor) -> None:
    is_new = tensor.untyped_storage().nbytes() != tensor.nbytes
    alloc_storage(tensor)
    if is_new:
        _spoil(tensor)


def _free(tensor: Tensor, *, refuses_reads: bool = False) -> None:
    storage = tensor.untyped_storage()
    if storage.nbytes() and storage.resizable():
        _spoil(tensor)
    free_storage(tensor, refuses_reads=refuses_reads)


def _gather_hidden(full: FullValues, streams: Any, when: str) -> None:
    _gather(full, streams, when)
    if full.shard.shard_group.group not in issuers:
        _hide(full, streams)


def _launch_hidden(context: TreeContext, handles: Sequence[FlatParamHandle], when: str) -> None:
    _launch(context, handles, when)
    for each in handles if len(handles) > 1 else ():
        _hide(each.full, context.streams)


def _hide(full: FullValues, streams: Any) -> None:
    if full.state is FullState.GATHERING and full._gather is not None:
        try:
            full._gather = _HiddenGather(full, full._gather)
        except BaseException:
            full._abandon(streams)
            raise


class _HiddenGather:
    """A gather whose values are hidden until the wait, except this rank's part."""

    def __init__(self, full: FullValues, gather: Waitable) -> None:
        with explained(full.shard.shard_group.group):
            gather.wait()
        output, own_part = full.unversioned, full.own_part
        self._output, self._values = output, output.clone()
        # The own part, perhaps the shard itself, keeps its values: an interrupt would lose them.
        start = own_part.storage_offset() - output.storage_offset()
        _spoil(output[:start])
        _spoil(output[start + own_part.numel() :])

    def wait(self) -> None:
        """Write the values where they belong."""
        self._output.copy_(self._values)
