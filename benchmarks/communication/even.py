"""Which way of gathering and reducing equal shards is the fastest on gloo, and does it overlap?

Milliseconds of one call on all ranks, medians of interleaved rounds; the bytes are those of the
whole buffer. The choice is made in `collectives.py`.

- the library's exchange: messages from each rank to each other one, and local sums;
- collective: the all-gather or reduce-scatter of the backend, in place where it can be;
- each owner: a broadcast from, or a reduce to, each rank;
- all-to-all: one all-to-all; sums are taken by the receiver.

Overlap: what part of a gather's time passes while matrices of about the same time are multiplied,
1 being all of it: (gather + compute - both) / the shorter of the two.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from benchmarks import report
from benchmarks.communication.uneven import (
    Case,
    gather_by_all_to_all,
    gather_by_broadcasts,
    reduce_by_all_to_all,
    reduce_to_owners,
)
from benchmarks.ranks import run_ranks
from composable_shard.comm import algorithms, collectives


def gather_by_collective(case: Case) -> None:
    case.group._allgather_base(case.full, case.own).wait()


def gather_as_the_library(case: Case) -> None:
    collectives.all_gather(case.full, case.own, case.group).wait()


def reduce_by_collective(case: Case) -> None:
    options = dist.ReduceScatterOptions()
    case.group._reduce_scatter_base(case.output, case.full, options).wait()


def reduce_as_the_library(case: Case) -> None:
    scratch = None if case.size == 2 else case.terms
    reduction = algorithms.ReduceScatter(case.group, case.full.dtype, case.full.device)
    reduction.start(case.output, case.full, scratch).finish()


COLUMNS = ("the library's exchange", "collective", "each owner", "all-to-all")
WAYS = {
    "gather": (
        gather_as_the_library,
        gather_by_collective,
        gather_by_broadcasts,
        gather_by_all_to_all,
    ),
    "reduce": (reduce_as_the_library, reduce_by_collective, reduce_to_owners, reduce_by_all_to_all),
}


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds of a call that all ranks begin together, those of the slowest."""
    dist.barrier()
    start = time.perf_counter()
    call()
    elapsed = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return elapsed.item()


def measure(rank: int, nbytes: int, rounds: int) -> list[list[str]]:
    """Return one row for each direction."""
    rows = []
    world_size = dist.get_world_size()
    case = Case([nbytes // 4 // world_size] * world_size, rank)
    for name, ways in WAYS.items():
        times: list[list[float]] = [[] for _ in ways]
        for turn in range(rounds + 1):
            for place in range(len(ways)):
                chosen = (place + turn) % len(ways)
                times[chosen].append(1e3 * seconds_of(partial(ways[chosen], case)))
        figures = [report.spread(each[1:]) for each in times]
        rows.append([str(world_size), name, f"{nbytes >> 10} KiB", *figures])
    return rows


def measure_overlap(rank: int, nbytes: int, rounds: int) -> list[list[str]]:
    """Return one row: how much of a gather passes behind a computation."""
    world_size = dist.get_world_size()
    case = Case([nbytes // 4 // world_size] * world_size, rank)
    matrix = torch.randn(256, 256)

    def compute(repeats: int) -> None:
        for _ in range(repeats):
            matrix @ matrix

    def both(repeats: int) -> None:
        work = collectives.all_gather(case.full, case.own, case.group)
        compute(repeats)
        work.wait()

    gather = partial(gather_as_the_library, case)
    product = statistics.median(seconds_of(partial(compute, 1)) for _ in range(9))
    repeats = max(1, round(statistics.median(seconds_of(gather) for _ in range(9)) / product))
    shares = []
    for _ in range(rounds):
        apart = [seconds_of(gather), seconds_of(partial(compute, repeats))]
        shares.append((sum(apart) - seconds_of(partial(both, repeats))) / min(apart))
    return [[str(world_size), f"{nbytes >> 10} KiB", report.spread(shares)]]


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, comma-separated")
    parser.add_argument("--sizes", default="64,256,1024,4096,16384", help="KiB, comma-separated")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args(argv)
    sizes = [int(size) << 10 for size in args.sizes.split(",")]
    numbers = [int(number) for number in args.ranks.split(",")]
    rows, overlap = [], []
    for number, size in itertools.product(numbers, sizes):
        rows += run_ranks(number, measure, size, args.rounds)
        overlap += run_ranks(number, measure_overlap, size, args.rounds)
    markdown = report.header(
        "Ways of gathering and reducing on gloo",
        f"fp32, one thread per rank, {args.rounds} rounds; ms, median (quartiles)",
    )
    markdown += "\n" + report.table(["ranks", "what", "bytes", *COLUMNS], rows)
    markdown += "\n" + report.table(["ranks", "bytes gathered", "share overlapped"], overlap)
    report.emit(markdown, args.output)
