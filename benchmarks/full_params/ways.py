"""Ways to do one thing on a model each, in turn: their times, and what each needs at its peak.

A case is a module with `WAYS`, by name the peer and what it does, and `take(model, way)`, which
does it and returns what it took.
"""

from __future__ import annotations

import gc
from argparse import ArgumentParser, Namespace
from importlib import import_module
from typing import Any

import torch.distributed as dist

from benchmarks import malloc_counter, peers, report
from benchmarks.ranks import run_ranks
from benchmarks.rounds import in_turn
from tests.common.models import make_llama


def make_parser(description: str | None) -> ArgumentParser:
    """Return a parser of what all cases ask for."""
    parser = report.make_parser(description)
    parser.add_argument("--model", default="50m", help="out of 50m, std, tiny, micro")
    parser.add_argument("--world-size", type=int, default=2, help="gloo ranks")
    parser.add_argument("--rounds", type=int, default=20, help="rounds after two to warm up")
    return parser


def measure(case: str, args: Namespace) -> tuple[dict[str, list[Any]], dict[str, int]]:
    """Return by way what it took in each round, and the bytes that it needs at its peak."""
    times = run_ranks(args.world_size, _measure_times, case, args.model, args.rounds)
    with malloc_counter.preloaded():
        peaks = {
            name: run_ranks(args.world_size, _measure_peak, case, args.model, name)
            for name in import_module(case).WAYS
        }
    return times, peaks


def _measure_times(rank: int, case: str, model_name: str, rounds: int) -> dict[str, list[Any]]:
    module = import_module(case)
    ways = module.WAYS
    models = {peer: peers.build(peer, make_llama(model_name)) for peer, _ in ways.values()}
    times: dict[str, list[Any]] = {name: [] for name in ways}
    for number in range(-2, rounds):
        for name in in_turn(ways, number):
            peer, way = ways[name]
            taken = module.take(models[peer], way)
            if number >= 0:
                times[name].append(taken)
    return times


def _measure_peak(rank: int, case: str, model_name: str, name: str) -> int:
    """Return the bytes beyond those held before."""
    module = import_module(case)
    peer, way = module.WAYS[name]
    model = peers.build(peer, make_llama(model_name))
    for _ in range(2):
        module.take(model, way)
    gc.collect()
    dist.barrier()
    start = malloc_counter.held_nbytes()
    malloc_counter.restart_peak()
    module.take(model, way)
    return malloc_counter.peak_nbytes() - start
