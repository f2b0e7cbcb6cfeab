"""Which collectives does a step issue, and how many bytes does sharding copy around them?

Exact counts of one forward and backward on two gloo ranks, after two warm-up steps. P is the size
of all parameters. The payload of a collective is its full-size buffer. Bytes written are summed
over every operator's outputs and mutated arguments, less those of the plain model, collectives
and waits for them excluded (gloo copies inside `wait`); for ours also excluded is work inside its
collectives layer, where a local sum stands in for a backend's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from benchmarks import peers, report
from benchmarks.ranks import run_ranks
from tests.common.models import make_batch, make_llama, param_nbytes
from tests.common.step_counter import Counts, StepCounter, is_inside_collective


def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """Run one forward and backward."""
    model(*batch).backward()


def measure(rank: int, model_name: str, peer: str, verbose: bool) -> dict[str, Any]:
    """Return the collectives of one step and the bytes it wrote."""
    model = peers.build(peer, make_llama(model_name))
    batch = make_batch(model_name, rank)
    optimizer = peers.make_optimizer(peer, model)
    for _ in range(2):
        step(model, batch)
        optimizer.step()
        optimizer.zero_grad()
    is_ours = peer.startswith("ours")
    counting: Any = nullcontext()
    if is_ours:
        counting = importlib.import_module("composable_shard").count_collectives()
    counter = StepCounter(is_inside_collective if is_ours else None)
    with counting as log, counter.see_waits(), counter:
        step(model, batch)
    optimizer.step()
    optimizer.zero_grad()
    counts = _logged_counts(log.events) if is_ours else counter.counts()
    if peer.startswith("fsdp2"):
        _check_with_comm_debug_mode(model, batch, counts)
    if rank == 0 and verbose:
        print(peer, counter.counts(), counter.written.most_common(25), sep="\n")
    return {"counts": counts, "written": counter.written.total(), "seen": counter.counts()}


def _logged_counts(events: list[Any]) -> Counts:
    counts: Counts = {}
    for event in events:
        entry = counts.setdefault(event.kind, [0, 0])
        entry[0] += 1
        entry[1] += event.nbytes
    return counts


def _check_with_comm_debug_mode(
    model: nn.Module, batch: tuple[Tensor, Tensor], counts: Counts
) -> None:
    with CommDebugMode() as debug:
        step(model, batch)
    ours = sum(number for number, _ in counts.values())
    if debug.get_total_counts() != ours:
        raise RuntimeError(f"CommDebugMode saw {debug.get_comm_counts()}, this script {counts}")


def row(peer: str, model_name: str, result: dict[str, Any], bare: int) -> list[str]:
    """Return a table row: collectives as `number, bytes in P`, and bytes written in P."""
    size = param_nbytes(make_llama(model_name))
    cells = [model_name, peer]
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        number, nbytes = result["counts"].get(kind, (0, 0))
        cells.append(f"{number}, {nbytes / size:.3f} P" if number else "-")
    others = {kind: entry for kind, entry in result["counts"].items() if kind not in _SHOWN}
    cells.append("; ".join(f"{n} {kind}, {b} bytes" for kind, (n, b) in others.items()) or "-")
    return [*cells, f"{(result['written'] - bare) / size:.3f} P"]


_SHOWN = ("all_gather", "reduce_scatter", "all_reduce")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, measure, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--models", default="std,tiny", help="out of std, tiny, micro")
    parser.add_argument(
        "--peers",
        default="ddp,ddp_view,fsdp1,fsdp2,fsdp2_raf,fsdp2_keep,ours,ours_keep",
        help="peers",
    )
    parser.add_argument("--world-size", type=int, default=2, help="gloo ranks")
    parser.add_argument("--verbose", action="store_true", help="print bytes written by operator")
    args = parser.parse_args(argv)
    rows = []
    for name in args.models.split(","):
        bare = run_ranks(1, measure, name, "bare", args.verbose)["written"]
        for peer in peers.parse_peers(args.peers):
            result = run_ranks(args.world_size, measure, name, peer, args.verbose)
            rows.append(row(peer, name, result, bare))
    markdown = report.header(
        "Collectives and bytes copied per step",
        f"fp32, forward + backward, {args.world_size} gloo ranks, rank 0's counts",
        "std has 13 units, tiny 49; fsdp2 keeps the root gathered, fsdp2_raf reshards it as well",
        "goal for ours: 2N-1 all-gathers and N reductions, each"
        " direction within padding of its parameters, at most 1.0 P written beyond the plain model",
    )
    columns = ["model", "peer", "all-gather", "reduce-scatter", "all-reduce", "other", "written"]
    report.emit(markdown + "\n" + report.table(columns, rows), args.output)
