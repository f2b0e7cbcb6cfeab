"""Whole results of gathered ops, for the ops that follow: [Note: Kept wholes]."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composable_shard.torch_private import version_of

_MAX_KEPT = 4  # of the latest results; a Newton-Schulz step of a square matrix has three


class _Kept(NamedTuple):
    shard: weakref.ref[Any]
    local: Tensor
    versions: tuple[int, int]  # of the shard, which ops bump, and of its local tensor
    whole: Tensor
    number: int


class KeptWholes:
    """Whole tensors, each beside the shard that was cut from it, in one thread's running step."""

    __slots__ = ("_kept", "_number")

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._number = 0

    def __bool__(self) -> bool:
        return bool(self._kept)

    def keep(self, shard: Any, whole: Tensor) -> None:
        """Keep the whole of a new shard; it must lie in memory as the shard's spec says."""
        spec = shard._shard_spec
        self._number += 1  # of a result that can't be kept too: its kind is the same on all ranks
        if torch.is_inference_mode_enabled() or spec.tensor_parallel is not None:
            return  # without version counters; of a tensor that is sharded twice
        if whole.stride() != spec.stride:
            return
        latest = [each for each in self._kept if each.number > self._number - _MAX_KEPT]
        reference = weakref.ref(shard, self._drop_freed)
        self._kept = [
            *latest,
            _Kept(reference, shard._local, _versions(shard), whole, self._number),
        ]

    def of(self, shards: Mapping[int, Any]) -> dict[int, Tensor]:
        """Return the wholes of those shards, and their aliases, that are as they were, by key."""
        found: dict[int, Tensor] = {}
        for key, shard in shards.items():
            for each in self._kept:
                kept, spec = each.shard(), shard._shard_spec
                if kept is None or not kept._local is each.local is shard._local:
                    continue
                if each.versions == _versions(kept) == _versions(shard):
                    found[key] = each.whole.as_strided(spec.dense_shape, spec.dense_stride)
        return found

    def drop(self) -> None:
        """Drop all."""
        self._kept = []

    def _drop_freed(self, reference: weakref.ref[Any]) -> None:
        self._kept = [each for each in self._kept if each.shard is not reference]


def _versions(shard: Any) -> tuple[int, int]:
    return version_of(shard), version_of(shard._local)
