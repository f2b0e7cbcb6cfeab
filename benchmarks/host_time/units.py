"""What does sharding cost the host, per unit, beyond the plain model?

Process CPU time of forward and backward, sharded minus plain, divided by the number of units
(the layers and the root, all of the same size). The process group is torch's `fake` backend at
world size 2, which moves no data between processes; the units hold 16x16 parameters, so what is
left is host work. The peers run interleaved in one process, in rotating order, and the ratio to
FSDP2 is taken inside each round.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import peers, report
from benchmarks.rounds import Samples, interleave, ratios
from tests.common.models import MatrixChain

GOALS = {1: 0.25, 9: 0.25, 32: 0.30}  # ours / FSDP2, by parameters per unit


def cpu_seconds(model: nn.Module, x: Tensor) -> float:
    """Return the process CPU time of one forward and backward."""
    start = time.process_time()
    model(x).backward()
    elapsed = time.process_time() - start
    model.zero_grad()
    return elapsed


def measure(names: list[str], num_layers: int, num_params: int, rounds: int, steps: int) -> Samples:
    """Return each peer's samples; one sample is the median of a few steps."""
    models = {name: peers.build(name, MatrixChain(num_layers, num_params)) for name in names}
    x = torch.ones(1, 16, requires_grad=True)
    timed = {name: partial(cpu_seconds, model, x) for name, model in models.items()}
    return interleave(timed, rounds, steps)


def per_unit_us(samples: Samples, name: str, num_units: int) -> list[float]:
    """Return the peer's microseconds per unit beyond the plain model, round by round."""
    pairs = zip(samples[name], samples["bare"], strict=True)
    return [(sharded - plain) / num_units * 1e6 for sharded, plain in pairs]


def rows(samples: Samples, num_params: int, num_units: int) -> list[list[str]]:
    """Return one table row per sharded peer."""
    costs = {name: per_unit_us(samples, name, num_units) for name in samples if name != "bare"}
    result = []
    for name, cost in costs.items():
        goal = f"<= {GOALS[num_params]:.2f}" if name == "ours" and num_params in GOALS else ""
        result.append(
            [
                str(num_params),
                name,
                report.spread(cost, 0),
                report.spread(ratios(costs, name, "fsdp2")),
                goal,
            ]
        )
    return result


def collective_us(calls: int = 2000) -> tuple[float, float]:
    """Return the fake backend's own microseconds per all-gather and per reduce-scatter."""
    group = dist.group.WORLD
    full, part = torch.zeros(2 * 9 * 256), torch.zeros(9 * 256)
    result = []
    for call in (
        lambda: group._allgather_base(full, part),
        lambda: group._reduce_scatter_base(part, full),
    ):
        start = time.process_time()
        for _ in range(calls):
            call().wait()
        result.append((time.process_time() - start) / calls * 1e6)
    return result[0], result[1]


def profile(name: str, num_layers: int, num_params: int, steps: int = 20) -> None:
    """Print where the host time of one peer goes; the profiler inflates Python about threefold."""
    model = peers.build(name, MatrixChain(num_layers, num_params))
    x = torch.ones(1, 16, requires_grad=True)
    for _ in range(3):
        cpu_seconds(model, x)
    profiler = cProfile.Profile()
    for _ in range(steps):
        profiler.enable()
        model(x).backward()
        profiler.disable()
        model.zero_grad()
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(35)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, measure, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=5, help="steps per peer and round")
    parser.add_argument("--units", type=int, default=48, help="layers; the root is one more unit")
    parser.add_argument("--params", default="1,9,32", help="parameters per unit, comma-separated")
    parser.add_argument("--peers", default="fsdp2,ours", help="fsdp2 and any of fsdp1, ours, ...")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw samples here")
    parser.add_argument("--profile", metavar="PEER", help="print a cProfile of this peer instead")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    sizes = [int(size) for size in args.params.split(",")]
    if args.profile:
        for size in sizes:
            profile(args.profile, args.units, size)
        return
    names = ["bare", *peers.parse_peers(args.peers)]
    if "fsdp2" not in names:
        parser.error("--peers must hold fsdp2: the ratios are to it")
    raw = {size: measure(names, args.units, size, args.rounds, args.steps) for size in sizes}
    gather, reduce = collective_us()
    markdown = report.header(
        "Host cost per unit beyond the plain model",
        "process CPU time of forward + backward, sharded minus plain, one thread",
        f"{args.units} layers and the root, {args.rounds} rounds of {args.steps} steps",
        f"fake backend at world size 2; its own cost, in every figure below: {gather:.0f} us per"
        f" all-gather, {reduce:.0f} us per reduce-scatter (at 9 parameters)",
        "figures: median (quartiles)",
    )
    lines = [row for size in sizes for row in rows(raw[size], size, args.units + 1)]
    columns = ["parameters per unit", "peer", "us per unit", "ratio to fsdp2", "goal"]
    report.emit(markdown + "\n" + report.table(columns, lines), args.output)
    if args.json:
        args.json.write_text(json.dumps(raw))
