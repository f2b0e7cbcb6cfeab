"""What does a CUDA graph of a whole step save on one GPU?

Forward, backward and capturable AdamW in bf16 of the plain model and of this library, each step by
step and as a graph that is captured once and replayed. Small models tell most: their steps are
bound by the host.

    python -m benchmarks.step_time gpu_graph --group fake --model tiny
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from benchmarks import peers, report
from benchmarks.rounds import ratios
from benchmarks.step_time import gpu_runs
from tests.common.gpu_steps import Step, capture


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, measure, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--group", default="fake", help="fake (8 ranks) or nccl (1 rank)")
    parser.add_argument("--model", default="tiny", help="out of tests/common/models.py")
    parser.add_argument("--rounds", type=int, default=10, help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=10, help="steps per variant and round")
    parser.add_argument("--peers", default="bare,ours", help="comma-separated")
    args = parser.parse_args(argv)
    names = peers.parse_peers(args.peers)
    if not torch.cuda.is_available():
        print(gpu_runs.SKIPPED)
        return
    gpu_runs.join_group(args.group)
    steps: dict[str, Step] = {}
    for name in names:
        steps[name] = gpu_runs.make_trainer(name, args.model, capturable=True).step
        captured = gpu_runs.make_trainer(name, args.model, capturable=True)
        steps[f"{name}, graph"] = capture(captured.step)
    times = gpu_runs.take_turns(steps, args.rounds, args.steps)
    markdown = report.header(
        f"CUDA graphs of a step: {args.model}",
        f"GPU: {torch.cuda.get_device_name()}; group: {args.group}",
        f"bf16, {args.rounds} rounds of {args.steps} steps; median (quartiles)",
    )
    lines = [
        [
            name,
            report.spread(times[name], 2),
            report.spread(ratios(times, name, name.removesuffix(", graph")), 3),
        ]
        for name in gpu_runs.by_speed(times)
    ]
    table = report.table(["variant", "step ms", "/ step by step"], lines)
    report.emit(markdown + "\n" + table, args.output)
    dist.destroy_process_group()
