"""How long does it take to shard 324 M parameters, and how much memory is held meanwhile?

From a model on the CPU, the sharding alone; from a model on the meta device, sharding, `to_empty`
and the initialisation of every parameter by `reset_parameters`, which here gives the values of an
unsharded model, and with FSDP2 on the CPU the same values to every rank's slice; "ours:slices" does
what FSDP2 does. Wall time and process CPU time on two gloo ranks, of the slower one; peers
interleaved in the same two processes in rotating order, the ratio to FSDP2 taken inside each round.
The peak of the bytes held from malloc beyond those before the model was built, on rank 0, every
peer in processes of its own that have sharded a small model before.
Needs gcc and 6 GB of memory.
"""

from __future__ import annotations

import gc
import time

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import malloc_counter, peers, report
from benchmarks.ranks import run_ranks
from benchmarks.rounds import in_turn, ratios
from tests.common.models import make_llama, param_nbytes

SLICES = ":slices"  # of a peer that fills its slices independently of all others
STARTS = ("CPU", "meta")
GOALS = {"CPU": 0.4 / 0.51, "meta": 1.1}  # ratio of ours to fsdp2
Figures = dict[str, float]


def initialise(model: nn.Module, *, only_slices: bool) -> None:
    """Give every parameter its first values, as each module's own `reset_parameters` does.

    Args:
        model: A sharded model, whose memory holds anything.
        only_slices: Fill what this rank holds and nothing else: every rank then draws the same
            values for its slices, as FSDP2 does for a model on the CPU.
    """
    with torch.no_grad():
        if only_slices:
            for param in model.parameters():
                param.to_local().uniform_(-0.1, 0.1)
            return
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()


def set_up(model_name: str, peer: str, start: str) -> Figures:
    """Shard a model; return wall and CPU seconds and, where malloc is counted, bytes."""
    gc.collect()
    is_counted = malloc_counter.is_preloaded()
    held = malloc_counter.held_nbytes() if is_counted else 0
    with torch.device(start.lower()):
        model = make_llama(model_name)
    dist.barrier()
    if is_counted:
        malloc_counter.restart_peak()
    wall, cpu = time.perf_counter(), time.process_time()
    model = peers.build(peer.removesuffix(SLICES), model)
    if start == "meta":
        model.to_empty(device="cpu")
        initialise(model, only_slices=peer.endswith(SLICES))
    figures = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    if is_counted:
        figures["peak"] = malloc_counter.peak_nbytes() - held
        dist.barrier()
        figures["after"] = malloc_counter.held_nbytes() - held
    return figures


def measure_times(
    rank: int, model_name: str, names: list[str], start: str, rounds: int
) -> dict[str, list[Figures]]:
    """Return every peer's figures, round by round."""
    for name in names:
        set_up("micro", name, start)  # what the peer imports and builds the first time
    samples: dict[str, list[Figures]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in in_turn(names, turn):
            dist.barrier()
            figures = set_up(model_name, name, start)
            times = torch.tensor([figures["wall"], figures["cpu"]], dtype=torch.float64)
            dist.all_reduce(times, dist.ReduceOp.MAX)
            samples[name].append(dict(zip(("wall", "cpu"), times.tolist(), strict=True)))
    return samples


def measure_memory(rank: int, model_name: str, name: str, start: str) -> Figures:
    """Return one peer's figures in processes of their own."""
    set_up("micro", name, start)
    return set_up(model_name, name, start)


def main() -> None:
    """Parse the options, measure, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", default="big", help="a name in tests/common/models.py")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds")
    parser.add_argument("--peers", default="fsdp2,ours", help="fsdp2 and others")
    args = parser.parse_args()
    names = peers.parse_peers(args.peers)
    if "fsdp2" not in names:
        parser.error("--peers must hold fsdp2: the ratios are to it")
    with torch.device("meta"):
        model = make_llama(args.model)
    size, unit = param_nbytes(model), max(map(param_nbytes, model.layers))
    rest = size - sum(map(param_nbytes, model.layers))
    lines = []
    for start in STARTS:
        usable = names if start == "CPU" else [*names, f"ours{SLICES}"]
        samples = run_ranks(2, measure_times, args.model, usable, start, args.rounds)
        walls = {name: [each["wall"] for each in samples[name]] for name in usable}
        cpus = {name: [each["cpu"] for each in samples[name]] for name in usable}
        for name in usable:
            with malloc_counter.preloaded():
                memory = run_ranks(2, measure_memory, args.model, name, start)
            lines.append(
                [
                    start,
                    name,
                    report.spread(walls[name]),
                    report.spread(ratios(walls, name, "fsdp2")),
                    report.spread(cpus[name]),
                    report.spread(ratios(cpus, name, "fsdp2")),
                    f"<= {GOALS[start]:.2f}" if name == "ours" else "",
                    f"{memory['peak'] / size:.3f} -> {memory['after'] / size:.3f}",
                ]
            )
    markdown = report.header(
        f"Setting up {size / 4e6:.0f} M parameters",
        f"fp32, 2 gloo ranks, one thread each; P = {size / 1e6:.0f} MB, a layer"
        f" {unit / size:.3f} P, the root unit {rest / size:.3f} P",
        f"seconds of {args.rounds} interleaved rounds: median (quartiles)",
        "peak -> after: bytes held from malloc, in P; P/2 is one rank's part",
    )
    columns = [
        "from",
        "peer",
        "wall s",
        "ratio to fsdp2",
        "CPU s",
        "ratio",
        "goal",
        "peak -> after",
    ]
    report.emit(markdown + "\n" + report.table(columns, lines), args.output)


if __name__ == "__main__":
    main()
