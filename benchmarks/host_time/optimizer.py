"""What does an optimizer step cost the host, over 435 small parameters?

Process CPU time of `AdamW.step()` in its three forms: fused, foreach, and one parameter at a time;
and, as a fourth form, of `zero_grad()` after a fused step.
The model is "micro": 48 layers of nine parameters, so small that what is left is host work. The
process group is torch's `fake` backend, which moves no data. Every step follows a forward and a
backward of its own, so the gradients are new ones, as in training. The peers run interleaved in one
process, in rotating order, and the ratio to FSDP2 is taken inside each round. `subclass` is the
plain model with parameters, gradients and state of a tensor subclass that does nothing: what torch
itself takes to ask each of them for `__torch_function__`.

    python -m benchmarks.host_time optimizer
    python -m benchmarks.host_time optimizer --profile ours --forms loop
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import peers, report
from benchmarks.rounds import Samples, interleave, ratios
from tests.common.models import make_batch, make_llama

FORMS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
    "zero_grad": {"fused": True},
}
GOALS = {  # ratio to fsdp2
    "ours": {"fused": 0.35, "foreach": 0.6, "loop": 0.55},
    "ours_flat": {"fused": 0.06, "foreach": 0.13, "loop": 0.04},
}


def stepper(peer: str, form: str) -> Callable[[Callable[[], Any] | None], float]:
    """Return what trains the peer's model by one step and returns the CPU seconds of its form."""
    model = peers.build(peer, make_llama("micro"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **FORMS[form])
    batch = make_batch("micro", 0)
    is_zeroing = form == "zero_grad"
    timed = optimizer.zero_grad if is_zeroing else optimizer.step

    def step(around: Callable[[], Any] | None = None) -> float:
        model(*batch).backward()
        if peer == "subclass":
            for values in optimizer.state.values():
                for name in values.keys() - {"step"}:
                    values[name] = values[name].as_subclass(peers.Subclass)
        toggle = around or (lambda: None)
        if is_zeroing:
            optimizer.step()
        toggle()
        start = time.process_time()
        timed()
        elapsed = time.process_time() - start
        toggle()
        optimizer.zero_grad()
        return elapsed

    return step


def profile(peer: str, form: str, steps: int = 20) -> None:
    """Print where the time of one peer goes; the profiler inflates Python about threefold."""
    step = stepper(peer, form)
    for _ in range(3):
        step(None)
    profiler = cProfile.Profile()
    for _ in range(steps):
        is_on = [False]

        def toggle(is_on: list[bool] = is_on) -> None:
            is_on[0] = not is_on[0]
            (profiler.enable if is_on[0] else profiler.disable)()

        step(toggle)
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(25)


def rows(samples: Samples, form: str) -> list[list[str]]:
    """Return one table row per peer."""
    result = []
    for name, seconds in samples.items():
        goal = GOALS.get(name, {}).get(form)
        result.append(
            [
                form,
                name,
                report.spread([value * 1e3 for value in seconds]),
                report.spread(ratios(samples, name, "fsdp2"), 3),
                report.spread(ratios(samples, name, "bare"), 3) if "bare" in samples else "",
                "" if goal is None else f"<= {goal:.2f}",
            ]
        )
    return result


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, measure, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=3, help="steps per peer and round")
    parser.add_argument("--world-size", type=int, default=8, help="of the fake process group")
    parser.add_argument("--forms", default=",".join(FORMS), help="what is timed")
    parser.add_argument("--peers", default="bare,subclass,fsdp1,fsdp2,ours,ours_flat")
    parser.add_argument("--profile", metavar="PEER", help="print a cProfile of this peer instead")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.world_size)
    forms = args.forms.split(",")
    if args.profile:
        for form in forms:
            profile(args.profile, form)
        return
    names = peers.parse_peers(args.peers)
    if "fsdp2" not in names:
        parser.error("--peers must hold fsdp2: the ratios are to it")
    lines = []
    for form in forms:
        timed = {name: partial(stepper(name, form)) for name in names}
        lines += rows(interleave(timed, args.rounds, args.steps), form)
    markdown = report.header(
        "Host cost of an AdamW step over 435 parameters",
        "process CPU time of `optimizer.step()` after a forward and a backward, one thread",
        f"model micro, fake backend at world size {args.world_size}, {args.rounds} rounds of"
        f" {args.steps} steps; fsdp1 and ours_flat with one flat parameter per unit",
        "figures: median (quartiles)",
    )
    columns = ["form", "peer", "ms", "ratio to fsdp2", "ratio to bare", "goal"]
    report.emit(markdown + "\n" + report.table(columns, lines), args.output)
