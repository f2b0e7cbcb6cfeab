"""Checksums of full values, so that the ranks can be compared without the values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from composable_shard.tensor import ParamLabel, WriteGuard


class InitialValues:
    """Checksums of full values, so that the ranks can be compared without the values.

    Args:
        guard: Counts the writes to the shard; after a write the checksums are invalid.
    """

    def __init__(self, guard: WriteGuard) -> None:
        self._guard = guard
        self._num_writes = -1
        self._labels: Sequence[ParamLabel] = ()
        self._sums: Tensor | None = None  # (len(self._labels),)

    def note(self, params: Sequence[Tensor], labels: Sequence[ParamLabel]) -> None:
        """Take checksums of dense tensors; their parameters' names may still change."""
        self._sums = torch.stack([*map(checksum, params)])
        self._labels, self._num_writes = labels, self._guard.num_writes

    def forget(self) -> None:
        """Drop the checksums: the parameters have other values."""
        self._sums, self._labels = None, ()

    def take(self) -> list[tuple[str, int | None]]:
        """Return and drop names and checksums; None for values that may have been written since."""
        is_valid = self._sums is not None and self._guard.num_writes == self._num_writes
        sums = self._sums.tolist() if is_valid else [None] * len(self._labels)  # type: ignore[union-attr] # not None
        found = [(label.fqn, each) for label, each in zip(self._labels, sums, strict=True)]
        self.forget()
        return found


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits as whole numbers of 64 bits, 0-d on its device."""
    # torch sums only int64 at the speed of memory; misaligned data are copied.
    data = tensor.contiguous().view(-1)
    if data.storage_offset() * data.itemsize % 8:
        data = data.clone()
    if data.nbytes % 8 == 0:
        return data.view(torch.int64).sum()
    data = data.view(torch.uint8)
    num_whole = data.numel() // 8 * 8
    return data[:num_whole].view(torch.int64).sum() + data[num_whole:].sum()
