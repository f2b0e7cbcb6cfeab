"""Random programs of which one rank deviates at a random step.

A seed draws strategies and options of the units, and what rank 1 does differently in one of its
steps. What is wanted of each: both ranks end with equal weights where nothing that matters was
different, or both raise Python errors, at least one of which names both ranks' places; no process
dies, and none waits longer than the group's timeout and 10 s. For minutes, or for one seed again:

    python -m tests.fuzz_lockstep --seconds 600 --seed 1000
    python -m tests.fuzz_lockstep --only 1234
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from random import Random

import torch
import torch.distributed as dist

import composable_shard as cs
from composable_shard import ShardingStrategy, fully_shard
from composable_shard.comm import devices
from tests import differences
from tests.differences import DIFFERENCES, Cell, Chain, Difference, Run
from tests.harness import ranks

_OPTIONS = ("", "", "", "buckets", "whole", "flat", "mixed", "first", "later")
# Where ranks may do these differently and every strategy ends right or says so.
_LEFT_OUT = {
    # Collectives of the program's own, which carry no identity.
    "barrier_of_torch",
    "all_reduce_of_torch",
}


@dataclass(frozen=True)
class Deviation:
    """What a seed draws.

    Attributes:
        strategies: Of the four blocks and the root.
        deeds: Names of differences that rank 1 does one after another in its third step.
        option: One of `OPTIONS` or `WAYS` of the differences; "" for none.
    """

    strategies: tuple[str, ...]
    deeds: tuple[str, ...]
    option: str


def draw_case(seed: int) -> Deviation:
    """Return the case of a seed."""
    random = Random(seed)
    names = [
        name
        for name, each in DIFFERENCES.items()
        if name not in _LEFT_OUT
        and each.others is Run.step
        and each.units == Difference(Run.step).units
        and not name.startswith(("die_", "end_", "sleep_"))
    ]
    kinds = [each.name for each in ShardingStrategy]
    if random.random() < 0.5:
        strategies = (random.choice(kinds),) * 5
    else:
        strategies = tuple(random.choice(kinds) for _ in range(5))
    deeds = tuple(random.sample(names, random.choice((1, 1, 2))))
    return Deviation(strategies, deeds, random.choice(_OPTIONS))


def run_deviation(seed: int, directory: str, timeout_s: int) -> None:
    """Train on one rank, deviate, and write down what came of it."""
    rank, case = int(os.environ["RANK"]), draw_case(seed)
    differences.join_ranks(rank, directory, timeout_s)
    strategies = [ShardingStrategy[each] for each in case.strategies]
    model, warm_up = Chain(), differences.WAYS.get(case.option, 0)
    if case.option in differences.WAYS:
        devices.MAX_EXCHANGE_SIZE = 0
    options = differences.OPTIONS.get(case.option, {})
    for block, strategy in zip(model.blocks, strategies, strict=False):
        fully_shard(block, strategy=strategy, **options)
    fully_shard(model, strategy=strategies[-1], **options)
    run = Run(model, rank)
    run.directory = directory

    def act(run: Run) -> None:
        for name in case.deeds if rank == differences.DEVIANT else ():
            DIFFERENCES[name].act(run)
        for _ in case.deeds if rank != differences.DEVIANT else ():
            run.step()

    differences.train_and_note(run, act, lambda: _are_equal(run), timeout_s, warm_up)


def _are_equal(run: Run) -> bool:
    """Return whether both ranks have the same weights: replicas must not drift apart."""
    # As programs end. A rank that is a step ahead would else wait in a collective of its own.
    cs.save_checkpoint(f"{run.directory}/end", run.model, run.optimizer, step=differences.NUM_STEPS)
    # In one dtype: units that a rank has left unsharded show values of the compute dtype.
    values = torch.cat(
        [differences.whole_value(param).flatten().double() for param in run.model.parameters()]
    )
    both = [torch.empty_like(values) for _ in range(2)]
    dist.all_gather(both, values)
    return torch.equal(*both)


def measure_case(seed: int, timeout_s: int) -> Cell:
    """Run the case of a seed in two fresh processes."""
    return differences.measure_with(partial(run_deviation, seed), f"seed {seed}", timeout_s)


def failing_cases(seeds: range, *, timeout_s: int = 3, deadline: float = float("inf")) -> list[str]:
    """Run cases until the deadline; return a line for each that failed."""
    failed = []
    for seed in seeds:
        if time.monotonic() > deadline:
            break
        cell = measure_case(seed, timeout_s)
        case = draw_case(seed)
        line = f"seed {seed}: {cell.kind} after {cell.seconds:.1f} s, {case}"
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        # Where a strategy lets ranks do as they like, both end; they must end alike.
        if cell.kind in ("ABORT", "HANG", "SILENT", "unnamed"):
            failed.append("\n".join([line, *(text[:800] for text in cell.texts)]))
    return failed


def run_for_minutes() -> None:
    """Run cases for some time, or one seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--timeout", type=int, default=3)
    args = parser.parse_args()
    ranks.GRACE_S = int(args.timeout + differences.SPARE_S)  # type: ignore[assignment]
    if args.only is not None:
        failed = failing_cases(range(args.only, args.only + 1), timeout_s=args.timeout)
    else:
        seeds = range(args.seed, args.seed + 1_000_000)
        deadline = time.monotonic() + args.seconds
        failed = failing_cases(seeds, timeout_s=args.timeout, deadline=deadline)
    ranks.shut_down_workers()
    sys.stdout.write("\n".join(["", f"{len(failed)} failed", *failed, ""]))
    sys.exit(bool(failed))


if __name__ == "__main__":
    from tests import fuzz_lockstep  # by its name, under which the processes find `run_deviation`

    fuzz_lockstep.run_for_minutes()
