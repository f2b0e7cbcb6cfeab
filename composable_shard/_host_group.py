"""All ranks talk about a checkpoint: over a gloo group of its own, in host memory.

Training goes on while a background thread writes. Its messages must not mix with the collectives
of training, whose order they would change, so no group that anybody else uses can carry them. They
are not counted as collectives of training either.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["HostGroup", "get_host_group"]

_KINDS = {"ValueError": ValueError, "RuntimeError": RuntimeError}


class HostGroup:
    """All ranks of the default process group, or this process alone.

    Every method but `is_first` is a collective, for all ranks in the same order, and for one thread
    at a time.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        self.pending: Any = None  # the save that runs in the background

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's JSON value on rank 0, in rank order; an empty list elsewhere."""
        if self._group is None:
            return [value]
        data = _to_tensor(value)
        sizes = self._all_gather(torch.tensor([data.numel()])).tolist()
        largest = max(sizes)
        padded = torch.zeros(largest, dtype=torch.uint8)
        padded[: data.numel()] = data
        parts = [torch.empty(largest, dtype=torch.uint8) for _ in sizes] if self.is_first else []
        self._group.gather([parts] if parts else [], [padded], dist.GatherOptions()).wait()
        return [_from_tensor(part[:n]) for part, n in zip(parts, sizes, strict=False)]

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's JSON value on every rank."""
        if self._group is None:
            return value
        data = _to_tensor(value) if self.is_first else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([data.numel()])
        self._broadcast(size)
        if not self.is_first:
            data = torch.empty(int(size), dtype=torch.uint8)
        self._broadcast(data)
        return _from_tensor(data)

    def agree(self, error: Exception | None) -> None:
        """Raise on every rank if any rank has an error: the same one, with the ranks' numbers.

        Raises:
            ValueError: If the error of the first rank that has one is a ValueError.
            RuntimeError: If it is any other.
        """
        if self._group is None:
            found = [_describe(error)]
        else:
            has_error = torch.tensor([int(error is not None)])
            if not self._all_gather(has_error).any():
                return
            found = self.broadcast(self.gather(_describe(error)))
        _raise_first(found, error)

    def on_first(self, function: Callable[[], Any]) -> Any:
        """Run `function` on rank 0; return its JSON value, or raise its error, on every rank."""
        outcome: dict[str, Any] = {}
        error: Exception | None = None
        if self.is_first:
            try:
                outcome["value"] = function()
            except Exception as caught:
                error = caught
                outcome["error"] = _describe(caught)
        outcome = self.broadcast(outcome)
        if "error" in outcome:
            _raise_first([outcome["error"]], error)
        return outcome["value"]

    def _all_gather(self, numbers: Tensor) -> Tensor:
        assert self._group is not None
        output = torch.empty(self.size * numbers.numel(), dtype=numbers.dtype)
        self._group._allgather_base(output, numbers).wait()
        return output

    def _broadcast(self, tensor: Tensor) -> None:
        assert self._group is not None
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        self._group.broadcast([tensor], options).wait()


def get_host_group() -> HostGroup:
    """Return the group of all ranks of the default process group.

    It is made the first time, by all ranks together. Without a default process group it is this
    process alone.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    known = _groups.get(0)
    if known is None or known[0] is not world:
        group = None if world is None else dist.new_group(backend="gloo")
        pending = None if known is None else known[1].pending
        _groups[0] = known = world, HostGroup(group)
        known[1].pending = pending  # goes on over the group before, which it keeps
    return known[1]


# The one in use, beside the default group that it belongs to: there may be another one later.
_groups: dict[int, tuple[dist.ProcessGroup | None, HostGroup]] = {}


def _to_tensor(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_tensor(data: Tensor) -> Any:
    return json.loads(bytes(data.untyped_storage())[data.storage_offset() :][: data.numel()])


def _describe(error: Exception | None) -> list[str] | None:
    if error is None:
        return None
    kind = "ValueError" if isinstance(error, ValueError) else "RuntimeError"
    is_plain = type(error) in (ValueError, RuntimeError)
    return [kind, str(error) if is_plain else f"{type(error).__name__}: {error}"]


def _raise_first(found: list[list[str] | None], own: Exception | None) -> None:
    first = next((entry for entry in found if entry is not None), None)
    if first is None:
        return
    kind, text = first
    ranks = [rank for rank, entry in enumerate(found) if entry == first]
    where = f" (on ranks {ranks})" if 0 < len(ranks) < len(found) else ""
    raise _KINDS[kind](f"{text}{where}") from own
