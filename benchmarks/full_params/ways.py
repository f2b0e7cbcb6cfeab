"""Ways to do one thing on a model each, in turn: their times, and what each needs at its peak."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from benchmarks import malloc_counter, peers
from tests.common.models import make_llama

T = TypeVar("T")
Ways = Mapping[str, tuple[str, Callable[[nn.Module], Any]]]  # by name: of `peers`, and what to do


def measure_times(
    ways: Ways, do: Callable[[nn.Module, Any], T], model_name: str, rounds: int
) -> dict[str, list[T]]:
    """Return what `do` returns for each way, by round, after two rounds to warm up."""
    models = {peer: peers.build(peer, make_llama(model_name)) for peer, _ in ways.values()}
    times: dict[str, list[T]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(-2, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            peer, way = ways[name]
            taken = do(models[peer], way)
            if number >= 0:
                times[name].append(taken)
    return times


def measure_peak(
    ways: Ways, do: Callable[[nn.Module, Any], object], model_name: str, name: str
) -> int:
    """Return the bytes that one way needs at its peak, beyond those held before it."""
    peer, way = ways[name]
    model = peers.build(peer, make_llama(model_name))
    for _ in range(2):
        do(model, way)
    gc.collect()
    dist.barrier()
    start = malloc_counter.held_nbytes()
    malloc_counter.restart_peak()
    do(model, way)
    return malloc_counter.peak_nbytes() - start
