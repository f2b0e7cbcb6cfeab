"""The numbers in the parameter groups of optimizers, which must be the same on all ranks.

[Note: Numbers of groups]
A rank with a learning rate of its own steps its shards otherwise than the others do. An optimizer
that computes one step size from all of its parameters (D-Adaptation, Prodigy, AvaGrad) computes
another on each rank under granularity "param", where a rank sees only what it owns. Both show in
`param_groups`. So each backward compares them, of the optimizers that have stepped since the last
one: before gradients are published, and after a scheduler has set what the next step uses.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor
from torch.optim import Optimizer

from composable_shard.comm import OptimizerNumbers, is_capturing

_NUMBERS = (float, int, str, complex, type(None))  # also those of other packages, as numpy's
# How a rank computes its step, or draws for it: as it likes
_OF_A_RANK = frozenset({"params", "param_names", "foreach", "fused", "triton", "setup", "seed"})
_NOTHING = object()


class _Group:
    """The numbers of one group as last seen, so that a step costs what has changed."""

    def __init__(self) -> None:
        self._seen: dict[str, Any] = {}  # what can't change in place, and what is no number
        self._digests: dict[str, int] = {}
        self._num_keys = 0
        self.numbers: Mapping[str, Any] = {}  # never written: the ranks may compare it later
        self.digest = 0  # of 32 bits, whatever the order of the keys

    def update(self, group: dict[str, Any], reads_device: bool) -> None:
        """Take what differs from what was seen."""
        seen = self._seen
        found = {key: x for key, x in group.items() if seen.get(key, _NOTHING) is not x}
        if not found and self._num_keys == len(group):
            return
        self._num_keys = len(group)
        for key in self.numbers.keys() - group.keys():
            found[key] = _NOTHING
        self._take(found, reads_device)
        for key in seen.keys() - group.keys():
            del seen[key]

    def _take(self, found: dict[str, Any], reads_device: bool) -> None:
        numbers = dict(self.numbers)
        for key, value in found.items():
            is_fixed, number = _number_of(key, value, reads_device)
            if is_fixed:
                self._seen[key] = value
            else:
                self._seen.pop(key, None)
            self.digest -= self._digests.pop(key, 0)
            numbers.pop(key, None)
            if number is not _NOTHING:
                numbers[key] = number
                self._digests[key] = zlib.crc32(f"{key} {number!r}".encode())
                self.digest += self._digests[key]
        self.numbers = numbers
        self.digest &= _ALL_BITS


_ALL_BITS = (1 << 32) - 1
_known: WeakKeyDictionary[Optimizer, list[_Group]] = WeakKeyDictionary()


def numbers_of(
    optimizers: Iterable[ref[Optimizer]], *, reads_device: bool
) -> list[OptimizerNumbers]:
    """Return the numbers of the groups of each optimizer that lives.

    Args:
        optimizers: Those that have stepped, in an order that is the same on all ranks.
        reads_device: Also read tensors of one element on an accelerator, for which the host waits.
    """
    found = []
    for reference in optimizers:
        optimizer = reference()
        if optimizer is None:
            continue
        known = _known.get(optimizer)
        if known is None or len(known) != len(optimizer.param_groups):
            known = _known[optimizer] = [_Group() for _ in optimizer.param_groups]
        name = type(optimizer).__name__
        digest = zlib.crc32(name.encode())
        for each, group in zip(known, optimizer.param_groups, strict=True):
            each.update(group, reads_device)
            digest = zlib.crc32(each.digest.to_bytes(4, "little"), digest)
        numbers = [each.numbers for each in known]
        found.append(OptimizerNumbers((name, len(numbers)), numbers, digest))
    return found


def _number_of(key: str, value: Any, reads_device: bool) -> tuple[bool, Any]:
    """Return whether the value can't change in place, and the number or numbers in it."""
    if key in _OF_A_RANK or value is _NOTHING:
        return True, _NOTHING
    if isinstance(value, _NUMBERS):
        return True, value
    if isinstance(value, (list, tuple)):
        is_numbers = all(isinstance(each, _NUMBERS) for each in value)
        return type(value) is tuple and is_numbers, tuple(value) if is_numbers else _NOTHING
    if type(value) is Tensor and value.numel() == 1 and _is_readable(value, reads_device):
        return False, value.item()
    return not isinstance(value, Tensor), _NOTHING


def _is_readable(value: Tensor, reads_device: bool) -> bool:
    if value.device.type == "cpu":
        return True
    return reads_device and value.device.type != "meta" and not is_capturing(value.device)
