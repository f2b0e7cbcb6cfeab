"""How long does a training step take, next to DDP, ZeroRedundancyOptimizer, FSDP1 and FSDP2?

Wall time of forward, backward and fused AdamW on two gloo ranks of one thread each. All peers live
in the same two processes and take turns in rotating order; a step's time is the slower rank's; the
ratios to the references are taken inside each round, so that the machine's load cancels out. The
CPU time of all threads, likewise of the slower rank, hardly depends on that load. The last loss is
shown because a fast step that computes something else is worth nothing.

With the peer `bare` a second table says what a step can't fall below: the computation alone, and
the messages that the peer sends in a step alone, on the same ranks, after the peer's turn of each
round. Where each rank has a core of its own and no more, their sum is the limit, not the larger.

    python -m benchmarks.step_time --model std                # what every strategy costs
    python -m benchmarks.step_time --model tiny
    python -m benchmarks.step_time --model hf                 # pip install '.[benchmark]'
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import peers, report
from benchmarks.ranks import run_ranks
from benchmarks.rounds import in_turn, ratios
from benchmarks.step_time import limit
from tests.common.models import make_batch, make_llama

Trainer = tuple[nn.Module, torch.optim.Optimizer]


def train_step(trainer: Trainer, batch: tuple[Tensor, Tensor]) -> tuple[list[float], float]:
    """Take one step and return what `limit.clocks` says it took on this rank, and its loss."""
    model, optimizer = trainer
    dist.barrier()
    start = limit.clocks()
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return (limit.clocks() - start).tolist(), loss.item()


def measure(rank: int, model_name: str, names: list[str], rounds: int, steps: int) -> Any:
    """Return each peer's seconds by `limit.clocks`, medians of every round, and its last loss.

    And the messages of a step where they are known, and their seconds when they are sent alone.
    """
    trainers: dict[str, Trainer] = {}
    for name in names:
        model = peers.build(name, make_llama(model_name))
        trainers[name] = model, peers.make_optimizer(name, model)
    batch = make_batch(model_name, rank)
    for trainer in trainers.values():
        for _ in range(2):
            train_step(trainer, batch)
    messages = {
        name: sent
        for name, trainer in trainers.items()
        if (sent := limit.find_messages(name, trainer[0], partial(train_step, trainer, batch)))
    }
    longest = max(map(max, messages.values()), default=0)
    buffer = torch.ones(dist.get_world_size(), longest, dtype=torch.uint8)
    wires: dict[str, list[list[float]]] = {name: [] for name in messages}
    times: dict[str, list[list[float]]] = {name: [] for name in names}
    losses: dict[str, float] = {}
    for name, seconds, losses[name] in take_turns(trainers, batch, rounds, steps):
        times[name].append(_medians(seconds))
        if name in messages:
            alone = [limit.send_messages(messages[name], buffer) for _ in range(steps)]
            wires[name].append(_medians(alone))
    return {"seconds": times, "losses": losses, "wires": wires, "messages": messages}


def _medians(seconds: list[list[float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*seconds, strict=True)]


def take_turns(
    trainers: Mapping[str, Trainer], batch: tuple[Tensor, Tensor], rounds: int, steps: int
) -> Iterator[tuple[str, list[list[float]], float]]:
    """Yield of each trainer and round seconds of each step by `limit.clocks`, and the last loss.

    Seconds are those of the slowest rank; each round begins with another trainer.
    """
    for turn in range(rounds):
        for name in in_turn(trainers, turn):
            results = [train_step(trainers[name], batch) for _ in range(steps)]
            seconds = torch.tensor([each for each, _ in results])
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            yield name, seconds.tolist(), results[-1][1]


def rows(result: Any, references: list[str]) -> list[list[str]]:
    """Return one table row per peer, fastest first."""
    wall, cpu = (
        {name: [pair[column] for pair in pairs] for name, pairs in result["seconds"].items()}
        for column in (0, 1)
    )
    lines = []
    for name in sorted(wall, key=lambda name: statistics.median(wall[name])):
        milliseconds = [seconds * 1e3 for seconds in wall[name]]
        cells = [
            report.spread(ratios(times, name, reference))
            for reference in references
            for times in (wall, cpu)
        ]
        loss = f"{result['losses'][name]:.7g}"
        lines.append([name, report.spread(milliseconds, 0), *cells, loss])
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, measure, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", default="tiny", help="out of std, hf, tiny, micro")
    parser.add_argument("--rounds", type=int, default=20, help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=2, help="steps per peer and round")
    parser.add_argument(
        "--peers",
        default="bare,ddp,ddp_view,zero1,fsdp1,fsdp2,ours,ours_gradop,ours_optim,"
        "ours_noshard,ours_noshard_merged,ours_noshard_one,ours_buckets",
        help="comma-separated",
    )
    parser.add_argument(
        "--references", default="ddp_view,zero1,fsdp2", help="peers that the ratios are to"
    )
    parser.add_argument("--world-size", type=int, default=2, help="gloo ranks")
    parser.add_argument("--deadline", type=float, default=1800.0, help="give up after seconds")
    args = parser.parse_args(argv)
    names = peers.parse_peers(args.peers)
    references = args.references.split(",")
    if missing := set(references) - set(names):
        parser.error(f"--peers must hold the references, not so: {', '.join(sorted(missing))}")
    result = run_ranks(
        args.world_size,
        measure,
        args.model,
        names,
        args.rounds,
        args.steps,
        deadline=args.deadline,
    )
    markdown = report.header(
        f"Step time: {args.model}",
        f"fp32, forward + backward + fused AdamW, {args.world_size} gloo ranks of one thread",
        f"{args.rounds} rounds, each the median of {args.steps} steps; median (quartiles)",
        "bare trains without communication, so its loss is that of rank 0's data alone",
    )
    titles = [f"{kind} / {name}" for name in references for kind in ("time", "CPU")]
    columns = ["peer", "step ms", *titles, "last loss"]
    markdown += "\n" + report.table(columns, rows(result, references))
    if "bare" in names:
        lines = limit.rows(result["seconds"], result["wires"], result["messages"])
        markdown += "\n" + report.table(limit.COLUMNS, lines)
    report.emit(markdown, args.output)
