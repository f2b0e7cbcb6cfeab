"""How long does a step take with compiled layers, next to FSDP2 and DDP with compiled layers?

Forward, backward and fused AdamW on two gloo ranks of one thread each. A peer's name says when its
layers were compiled, each by itself with inductor and `fullgraph=True`: `ours+before` before they
are sharded, `ours+after` after that, `ours` not at all; `bare` trains without communication.
`ours+whole` compiles the sharded model itself, whose graph breaks at each unit. Peers
take turns in rotating order in the same two processes; a step's time is the slower rank's. The
least of all steps is shown too, which another job of the machine disturbs least. From the third
step on a recompilation is an error.

With `--first` it measures how long the first three steps take, each peer in processes of its own,
without anything that was compiled before.

    python -m benchmarks.step_time compiled --model std
    python -m benchmarks.step_time compiled --model std --first
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._inductor.utils import fresh_cache

from benchmarks import peers, report
from benchmarks.ranks import run_ranks
from benchmarks.step_time.gloo import take_turns, train_step
from tests.common.models import make_batch, make_llama

_PEERS = "bare,ddp_view,fsdp2_raf,ours,bare+after,ddp_view+before,fsdp2_raf+before,fsdp2_raf+after"


def build(name: str, model: nn.Module, backend: str) -> nn.Module:
    """Return a model that a peer trains, its layers compiled where the name says so."""
    peer, _, when = name.partition("+")

    def compile_layers(moment: str) -> None:
        for layer in model.layers if moment == when else ():
            layer.compile(backend=backend, fullgraph=True)

    compile_layers("before")
    built = peers.build(peer, model)
    compile_layers("after")
    if when == "whole":
        built.compile(backend=backend)
    return built


def first_steps(rank: int, model_name: str, name: str, backend: str) -> Any:
    """Return seconds of a peer's first steps, which find nothing compiled, and its graphs."""
    with fresh_cache():
        model = build(name, make_llama(model_name), backend)
        trainer = model, peers.make_optimizer(name.partition("+")[0], model)
        batch = make_batch(model_name, rank)
        steps = [train_step(trainer, batch)[0] for _ in range(3)]
    return {"steps": steps, "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]}


def first_rows(model_name: str, names: list[str], backend: str, deadline: float) -> list[list[str]]:
    """Return one table row per peer: the first steps' seconds, and what all but the last took."""
    lines = []
    for name in names:
        found = run_ranks(2, first_steps, model_name, name, backend, deadline=deadline)
        wall, cpu = zip(*(step[:2] for step in found["steps"]), strict=True)
        compiling = [sum(seconds) - 3 * seconds[-1] for seconds in (wall, cpu)]
        cells = [f"{seconds:.1f}" for seconds in (*wall, *compiling)]
        lines.append([name, str(found["graphs"]), *cells])
    return lines


def measure(
    rank: int, model_name: str, names: list[str], backend: str, rounds: int, steps: int
) -> Any:
    """Return each peer's wall and CPU seconds of each step, and its last loss."""
    trainers = {}
    batch = make_batch(model_name, rank)
    for name in names:
        model = build(name, make_llama(model_name), backend)
        trainers[name] = model, peers.make_optimizer(name.partition("+")[0], model)
        for _ in range(2):
            train_step(trainers[name], batch)
    seconds: dict[str, list[list[list[float]]]] = {name: [] for name in names}
    losses: dict[str, float] = {}
    with torch._dynamo.config.patch(error_on_recompile=True):
        for name, times, losses[name] in take_turns(trainers, batch, rounds, steps):
            seconds[name].append(times)
    return {"seconds": seconds, "losses": losses}


def rows(result: Any, reference: str) -> list[list[str]]:
    """Return one table row per peer, the least CPU time first."""
    wall, cpu = (
        {
            name: [min(step[column] for step in steps) * 1e3 for steps in rounds]
            for name, rounds in result["seconds"].items()
        }
        for column in (0, 1)
    )
    return [
        [
            name,
            f"{min(wall[name]):.0f}",
            f"{min(cpu[name]):.0f}",
            f"{min(wall[name]) / min(wall[reference]):.2f}",
            f"{min(cpu[name]) / min(cpu[reference]):.2f}",
            *(
                report.spread([a / b for a, b in zip(each[name], each[reference], strict=True)])
                for each in (wall, cpu)
            ),
            f"{result['losses'][name]:.7g}",
        ]
        for name in sorted(cpu, key=lambda name: min(cpu[name]))
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, measure, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", default="tiny", help="out of std, tiny, micro")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--rounds", type=int, default=8, help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=2, help="steps per peer and round")
    parser.add_argument("--peers", default=f"{_PEERS},ours+before,ours+after")
    parser.add_argument("--reference", default="fsdp2_raf+before", help="the ratios are to")
    parser.add_argument("--deadline", type=float, default=1800.0, help="give up after seconds")
    parser.add_argument("--first", action="store_true", help="measure the first steps instead")
    args = parser.parse_args(argv)
    names = args.peers.split(",")
    if args.first:
        markdown = report.header(
            f"First steps with compiled layers: {args.model}",
            "2 gloo ranks of one thread, which compile at the same time, each for itself; nothing"
            " is cached; CPU: of rank 0, without that of C++ compilers",
        )
        columns = ["peer", "graphs", *(f"step {n}, s" for n in (1, 2, 3)), "compiling, s", "CPU, s"]
        lines = first_rows(args.model, names, args.backend, args.deadline)
        report.emit(markdown + "\n" + report.table(columns, lines), args.output)
        return
    sizes = args.model, names, args.backend, args.rounds, args.steps
    result = run_ranks(2, measure, *sizes, deadline=args.deadline)
    markdown = report.header(
        f"Step time with compiled layers: {args.model}",
        "fp32, forward + backward + fused AdamW, 2 gloo ranks of one thread",
        f"{args.rounds} rounds of {args.steps} steps of each peer in turn; the least of all steps,"
        " and the ratios of each round's least times, median (quartiles)",
        "no peer compiled anything after its second step",
        "bare trains without communication, so its loss is that of rank 0's data alone",
    )
    kinds = "time", "CPU", "time by round", "CPU by round"
    ratios = [f"{kind} / {args.reference}" for kind in kinds]
    columns = ["peer", "step ms", "CPU ms", *ratios, "last loss"]
    report.emit(markdown + "\n" + report.table(columns, rows(result, args.reference)), args.output)
