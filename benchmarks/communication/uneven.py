"""Which way of gathering and reducing shards of different sizes is the fastest on gloo?

Milliseconds of one call on all ranks, the least of several calls.
Memory is allocated before. Shards are uneven by rows (the mean, and 64 elements more or less), or
half of the ranks own everything, or one does.

- exchange: messages from each rank to each other one; sums are taken by the receiver;
- each owner: a broadcast from, or a reduce to, each rank that has a shard;
- padded: one all-gather or reduce-scatter of shards of the largest size, and copies;
- all-to-all: one all-to-all with those sizes; sums are taken by the receiver.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import report
from benchmarks.ranks import run_ranks
from composable_shard.comm.algorithms import UnevenGather
from composable_shard.comm.messages import exchange
from composable_shard.comm.order import order_of

Way = Callable[["Case"], None]
WAYS = ("exchange", "each owner", "padded", "all-to-all")


class Case:
    """The tensors of one call, on one rank."""

    def __init__(self, numels: Sequence[int], rank: int) -> None:
        self.group: Any = dist.group.WORLD
        self.rank, self.size = rank, len(numels)
        self.numels, self.largest = list(numels), max(numels)
        self.full = torch.ones(sum(numels))
        self.parts = self.full.split(self.numels)
        self.own = self.parts[rank]
        self.output = torch.zeros_like(self.own)
        self.terms = torch.zeros(self.size, self.own.numel())
        self.padded = torch.zeros(self.size, self.largest)
        self.padded_own = torch.zeros(self.largest)

    def others(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the tensors of the other ranks, by rank."""
        return {rank: each for rank, each in enumerate(tensors) if rank != self.rank}


def gather_by_exchange(case: Case) -> None:
    parts = case.others(case.parts)
    order = order_of(case.group)
    order.enter(0)
    exchange([(rank, case.own) for rank in parts], parts.items(), case.group, order).wait()


def gather_by_broadcasts(case: Case) -> None:
    UnevenGather(case.full, case.parts, case.own, case.group).start().wait()


def gather_padded(case: Case) -> None:
    case.padded_own[: case.own.numel()] = case.own
    case.group._allgather_base(case.padded.view(-1), case.padded_own).wait()
    for part, padded in zip(case.parts, case.padded, strict=True):
        part.copy_(padded[: part.numel()])


def gather_by_all_to_all(case: Case) -> None:
    case.terms.copy_(case.own)
    splits = case.numels, [case.own.numel()] * case.size
    options = dist.AllToAllOptions()
    case.group.alltoall_base(case.full, case.terms.view(-1), *splits, options).wait()


def reduce_by_exchange(case: Case) -> None:
    case.terms[case.rank].copy_(case.own)
    terms = case.others(case.terms.unbind())
    order = order_of(case.group)
    order.enter(0)
    exchange(case.others(case.parts).items(), terms.items(), case.group, order).wait()
    torch.sum(case.terms, 0, out=case.output)


def reduce_to_owners(case: Case) -> None:
    works = []
    for rank, part in enumerate(case.parts):
        if part.numel():
            options = dist.ReduceOptions()
            options.rootRank = rank
            works.append(case.group.reduce([part], options))
    for work in works:
        work.wait()
    case.output.copy_(case.own)


def reduce_padded(case: Case) -> None:
    for part, padded in zip(case.parts, case.padded, strict=True):
        padded[: part.numel()] = part
    flat, options = case.padded.view(-1), dist.ReduceScatterOptions()
    case.group._reduce_scatter_base(case.padded_own, flat, options).wait()
    case.output.copy_(case.padded_own[: case.own.numel()])


def reduce_by_all_to_all(case: Case) -> None:
    splits = [case.own.numel()] * case.size, case.numels
    options = dist.AllToAllOptions()
    case.group.alltoall_base(case.terms.view(-1), case.full, *splits, options).wait()
    torch.sum(case.terms, 0, out=case.output)


GATHERS = (gather_by_exchange, gather_by_broadcasts, gather_padded, gather_by_all_to_all)
REDUCTIONS = (reduce_by_exchange, reduce_to_owners, reduce_padded, reduce_by_all_to_all)


def numels_of(kind: str, numel: int, size: int) -> list[int]:
    """Return the elements of each rank's shard."""
    if kind == "rows":
        numels = [numel // size + (64 if rank % 2 else -64) for rank in range(size)]
    else:
        num_owners = 1 if kind == "one owner" else size // 2
        numels = [numel // num_owners] * num_owners + [0] * (size - num_owners)
    numels[0] += numel - sum(numels)
    return numels


def measure(rank: int, sizes: list[int], rounds: int) -> list[list[str]]:
    """Return one row for each size, kind of unevenness and direction."""
    rows = []
    world_size = dist.get_world_size()
    for nbytes in sizes:
        for kind in ("rows", "half own", "one owner"):
            case = Case(numels_of(kind, nbytes // 4, world_size), rank)
            for name, ways in (("gather", GATHERS), ("reduce", REDUCTIONS)):
                least = [least_ms(case, way, rounds) for way in ways]
                figures = [f"{value:.2f}" for value in least]
                rows.append([str(world_size), name, f"{nbytes >> 10} KiB", kind, *figures])
    return rows


def least_ms(case: Case, way: Way, rounds: int) -> float:
    """Return the least milliseconds of a call, all ranks together."""
    times = []
    for _ in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        way(case)
        dist.barrier()
        times.append(time.perf_counter() - start)
    return min(times[1:]) * 1e3


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, measure, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--ranks", default="2,4,10", help="numbers of ranks, comma-separated")
    parser.add_argument("--kib", default="64,1024,32768", help="sizes, comma-separated")
    parser.add_argument("--rounds", type=int, default=15, help="calls of which the least counts")
    args = parser.parse_args(argv)
    sizes = [int(size) << 10 for size in args.kib.split(",")]
    rows = []
    for num_ranks in args.ranks.split(","):
        rows += run_ranks(int(num_ranks), measure, sizes, args.rounds)
    markdown = report.header(
        "Gathers and reductions of uneven shards on gloo",
        "milliseconds of a call on all ranks, one thread each, and two barriers: the least of "
        f"{args.rounds}",
    )
    columns = ["ranks", "call", "bytes", "shards", *WAYS]
    report.emit(markdown + "\n" + report.table(columns, rows), args.output)
