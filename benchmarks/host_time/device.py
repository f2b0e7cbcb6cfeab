"""What does sharding cost the host thread that feeds an accelerator, per unit?

CPU time of the threads that issue (the program's, and autograd's for the device) in forward and
backward, sharded minus plain, divided by the number of units. On the accelerator of threads of
`tests/common/device`: kernels and collectives run in threads of their own, which are not counted,
so the parameters' size does not matter. What it takes to issue one kernel is this device's, some
10 us; on CUDA it is about 5. Two ranks; the peers run interleaved in one process, in rotating
order, and the ratio to FSDP2 is taken inside each round.

    python -m benchmarks.host_time device
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from benchmarks import peers, report
from benchmarks.host_time.units import per_unit_us
from benchmarks.ranks import run_ranks
from benchmarks.rounds import Samples, interleave, ratios
from tests.common import device
from tests.common.models import MatrixChain

GOAL = "<= 0.20"
_WARM = 12  # steps until no identities are exchanged any more


class _Issuing:
    """CPU time of the threads that issue work."""

    def __init__(self) -> None:
        found: list[int] = []
        x = torch.ones(1, device=device.NAME, requires_grad=True)
        x.register_hook(lambda _: found.append(threading.get_ident()))
        x.sum().backward()
        idents = {threading.get_ident(), *found}
        self._clocks = [time.pthread_getcpuclockid(ident) for ident in idents]

    def seconds(self) -> float:
        """Return the time so far."""
        return sum(time.clock_gettime(clock) for clock in self._clocks)


def _timed(model: nn.Module, x: Tensor, issuing: _Issuing) -> Callable[[], float]:
    def step() -> float:
        device.synchronize()
        start = issuing.seconds()
        model(x).backward()
        elapsed = issuing.seconds() - start
        model.zero_grad()
        return elapsed

    return step


def measure(
    rank: int, names: list[str], num_layers: int, num_params: int, rounds: int, steps: int
) -> Samples:
    """Return each peer's samples; one sample is the median of a few steps."""
    issuing = _Issuing()
    x = torch.ones(1, 16, device=device.NAME, requires_grad=True)
    timed = {}
    for name in names:
        model = peers.build(name, MatrixChain(num_layers, num_params).to(device.NAME))
        timed[name] = _timed(model, x, issuing)
        for _ in range(_WARM):
            timed[name]()
    before = device.counts()["tasks"]
    for name in names:
        timed[name]()
        after = device.counts()["tasks"]
        if rank == 0:
            print(f"{name}: {after - before} tasks in a step", file=sys.stderr)
        before = after
    return interleave(timed, rounds, steps)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, measure, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=3, help="steps per peer and round")
    parser.add_argument("--units", type=int, default=12, help="layers; the root is one more unit")
    parser.add_argument("--params", default="1,9,32", help="parameters per unit, comma-separated")
    parser.add_argument("--peers", default="fsdp2,ours", help="fsdp2 and any of ours, ...")
    args = parser.parse_args(argv)
    names = ["bare", *peers.parse_peers(args.peers)]
    rows = []
    for num_params in map(int, args.params.split(",")):
        samples = run_ranks(
            2, measure, names, args.units, num_params, args.rounds, args.steps, on_device=True
        )
        costs = {name: per_unit_us(samples, name, args.units + 1) for name in names[1:]}
        for name, cost in costs.items():
            ratio = report.spread(ratios(costs, name, "fsdp2"))
            goal = GOAL if name == "ours" and num_params == 9 else ""
            rows.append([str(num_params), name, report.spread(cost, 0), ratio, goal])
    markdown = report.header(
        "Host cost per unit on an accelerator, beyond the plain model",
        "CPU time of the threads that issue forward and backward, sharded minus plain; kernels,",
        "copies and collectives run in other threads of the accelerator (tests/common/device)",
        f"{args.units} layers and the root, {args.rounds} rounds of {args.steps} steps, 2 ranks",
        "figures: median (quartiles)",
    )
    columns = ["parameters per unit", "peer", "us per unit", "ratio to fsdp2", "goal"]
    report.emit(markdown + "\n" + report.table(columns, rows), args.output)
