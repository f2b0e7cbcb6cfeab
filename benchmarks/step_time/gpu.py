"""How long does a step of a Llama of 1 billion parameters take on one GPU, and with what memory?

Forward, backward and fused AdamW in bf16, between CUDA events, of the plain model, FSDP2 and this
library, over torch's `fake` group of 8 ranks or over NCCL of 1. The peers live in one process and
take turns in rotating order; ratios are taken inside each round. The memory of a step is what the
peer adds to the memory of those before it: exact in bytes allocated, about so in bytes reserved.
`--trace` exports a profile of each peer, and says how much of what side streams do passes while the
compute stream is busy.

    python -m benchmarks.step_time gpu --group fake
    python -m benchmarks.step_time gpu --group nccl --trace out/trace
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import peers, report
from benchmarks.rounds import ratios
from benchmarks.step_time import gpu_runs
from benchmarks.step_time.gpu_runs import Memory
from tests.common.gpu_steps import Step, overlap, trace

GOALS = {"bare": 1.02, "fsdp2": 0.97}  # of ours


def measure(
    names: Sequence[str], model_name: str, rounds: int, num_steps: int
) -> tuple[dict[str, Step], dict[str, list[float]], dict[str, Memory]]:
    """Return each peer's step, its milliseconds in each round, and its memory."""
    steps, memory = {}, {}
    for name in names:
        make = partial(gpu_runs.make_trainer, name, model_name)
        trainer, memory[name] = gpu_runs.measure_memory(make)
        steps[name] = trainer.step
    return steps, gpu_runs.take_turns(steps, rounds, num_steps), memory


def rows(
    times: dict[str, list[float]],
    memory: dict[str, Memory],
    overlapped: dict[str, float],
    losses: dict[str, float],
) -> list[list[str]]:
    """Return one table row per peer, fastest first."""
    return [
        [
            name,
            report.spread(times[name], 1),
            *(report.spread(ratios(times, name, other), 3) for other in GOALS),
            *(
                f"{nbytes / 2**30:.2f}"
                for nbytes in (memory[name].peak, memory[name].rest, memory[name].reserved)
            ),
            f"{overlapped[name]:.2f}" if name in overlapped else "",
            f"{losses[name]:.6g}",
        ]
        for name in gpu_runs.by_speed(times)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, measure, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--group", default="fake", help="fake (8 ranks) or nccl (1 rank)")
    parser.add_argument("--model", default="1b", help="out of tests/common/models.py")
    parser.add_argument("--rounds", type=int, default=10, help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=5, help="steps per peer and round")
    parser.add_argument("--peers", default="bare,fsdp2,ours", help="comma-separated")
    parser.add_argument("--trace", type=Path, metavar="PREFIX", help="export profiles to PREFIX...")
    args = parser.parse_args(argv)
    names = peers.parse_peers(args.peers)
    if missing := set(GOALS) - set(names):
        parser.error(f"--peers must hold the references, not so: {', '.join(sorted(missing))}")
    if not torch.cuda.is_available():
        print(gpu_runs.SKIPPED)
        return
    gpu_runs.join_group(args.group)
    steps, times, memory = measure(names, args.model, args.rounds, args.steps)
    overlapped = {}
    if args.trace is not None:
        args.trace.parent.mkdir(parents=True, exist_ok=True)
        for name in names:
            path = args.trace.with_name(f"{args.trace.name}.{name}.json.gz")
            overlapped[name] = overlap(trace(steps[name], path))
    losses = {name: step().item() for name, step in steps.items()}
    goals = ", ".join(f"<= {goal:.2f} of {name}" for name, goal in GOALS.items())
    markdown = report.header(
        f"Step time on one GPU: {args.model}",
        f"GPU: {torch.cuda.get_device_name()}; group: {args.group}",
        f"bf16, {args.rounds} rounds of {args.steps} steps; median (quartiles); goal: {goals}",
        "GiB of one step beyond what was there before the peer; overlapped: part of the side"
        " streams' time in which the compute stream is busy",
    )
    columns = ["peer", "step ms", *(f"/ {other}" for other in GOALS)]
    columns += ["peak GiB", "rest GiB", "reserved GiB", "overlapped", "last loss"]
    table = report.table(columns, rows(times, memory, overlapped, losses))
    report.emit(markdown + "\n" + table, args.output)
    dist.destroy_process_group()
