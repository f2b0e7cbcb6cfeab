"""How long does a step take in a plain loop, as a user writes it, and what makes it differ?

`benchmarks.step_time` keeps all peers in two processes, with one thread each and a barrier before
each step. Here each peer runs alone, under `torchrun`, which sets the number of threads: new data
and `loss.item()` in each step, no barrier, `gc` as Python starts it, DDP with its defaults. Peers
run one after another in rotating order. A run's figures are medians over its steps after those for
warming up, of the slower rank; ratios to DDP are taken inside each round. Page faults are those of
a step: memory that malloc gave back to the kernel and asks for again.

    python -m benchmarks.step_time loop                          # 48 x 128: DDP, FSDP2, ours
    python -m benchmarks.step_time loop --variants plain,malloc  # beside malloc that keeps memory

The variants change one thing each. `malloc`: freed memory is kept (docs/speed.md). `no_gc`:
Python's collector is off. `threads`: two threads on each rank, on two cores. `barrier`: one before
each step. `same`: the same data in each step. `late`: 30 steps for warming up.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import peers, report
from benchmarks.rounds import in_turn
from tests.common.models import make_batch, make_llama

REFERENCE = "ddp"
VARIANTS: dict[str, dict[str, str]] = {  # environment of the processes
    "plain": {},
    "malloc": {
        "MALLOC_MMAP_THRESHOLD_": "2000000000",
        "MALLOC_TRIM_THRESHOLD_": "8000000000",
    },
    "threads": {"OMP_NUM_THREADS": "2"},
    "no_gc": {},
    "barrier": {},
    "same": {},
    "late": {},
}
Figures = dict[str, float]


def train(peer: str, model_name: str, steps: int, variant: str) -> Figures:
    """Train as a script would; return the figures of a step of this rank."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = peers.build(peer, make_llama(model_name))
    optimizer = peers.make_optimizer(peer, model)
    if variant == "no_gc":
        gc.disable()
    warm = 30 if variant == "late" else 10
    found: list[list[float]] = []
    last = _clocks()
    for number in range(warm + steps):
        tokens, targets = make_batch(model_name, rank + 2 * number * (variant != "same"))
        if variant == "barrier":
            dist.barrier()
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        loss.item()
        now = _clocks()
        found.append([a - b for a, b in zip(now, last, strict=True)])
        last = now
    medians = [statistics.median(column) for column in zip(*found[warm:], strict=True)]
    highest = torch.tensor(medians, dtype=torch.float64)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return dict(zip(("seconds", "cpu", "faults"), highest.tolist(), strict=True))


def _clocks() -> list[float]:
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return [time.perf_counter(), time.process_time(), float(faults)]


def run(peer: str, model_name: str, steps: int, variant: str) -> Figures:
    """Return the figures of a run in processes of its own."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "figures")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", "-m", "benchmarks.step_time", "loop"]
        command += ["--train", peer, "--model", model_name]
        command += ["--steps", str(steps), "--variants", variant, "--output", str(path)]
        subprocess.run(
            command,
            env=os.environ | VARIANTS[variant],
            check=True,
            timeout=300,
            stderr=subprocess.DEVNULL,
        )
        return json.loads(path.read_text())  # type: ignore[no-any-return]


def rows(samples: dict[str, dict[str, list[Figures]]]) -> list[list[str]]:
    """Return one row for each variant and peer."""
    lines = []
    for variant, found in samples.items():
        for peer, runs in found.items():
            pairs = list(zip(runs, found[REFERENCE], strict=True))
            cells = [report.spread([each["seconds"] * 1e3 for each in runs], 0)]
            cells += [
                report.spread([one[key] / other[key] for one, other in pairs])
                for key in ("seconds", "cpu")
            ]
            faults = statistics.median(each["faults"] for each in runs)
            lines.append([variant, peer, *cells, f"{faults:.0f}"])
    return lines


def parse(argv: Sequence[str] | None) -> Any:
    """Return the options."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", default="tiny", help="out of std, hf, tiny, micro")
    parser.add_argument("--peers", default="ddp,fsdp2,ours", help="ddp among them")
    parser.add_argument("--variants", default="plain", help=f"out of {', '.join(VARIANTS)}")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each peer and variant")
    parser.add_argument("--steps", type=int, default=20, help="steps of a run")
    parser.add_argument("--train", metavar="PEER", help="be a rank of torchrun's")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, measure, report."""
    args = parse(argv)
    if args.train:
        figures = train(args.train, args.model, args.steps, args.variants)
        if dist.get_rank() == 0:
            args.output.write_text(json.dumps(figures))
        dist.barrier()
        os._exit(0)  # gloo's threads may abort the process while the interpreter shuts down
    names, variants = peers.parse_peers(args.peers), args.variants.split(",")
    samples: dict[str, dict[str, list[Figures]]] = {
        variant: {name: [] for name in names} for variant in variants
    }
    for turn in range(args.rounds):
        for variant in variants:
            for name in in_turn(names, turn):
                figures = run(name, args.model, args.steps, variant)
                samples[variant][name].append(figures)
    markdown = report.header(
        f"A step of a plain loop: {args.model}",
        "fp32, forward + backward + fused AdamW, 2 gloo ranks started by torchrun",
        f"{args.rounds} rounds, each a run of {args.steps} steps after 10; median (quartiles)",
    )
    columns = ["variant", "peer", "step ms", "time / ddp", "CPU / ddp", "page faults of a step"]
    report.emit(markdown + "\n" + report.table(columns, rows(samples)), args.output)
