"""What does clipping the gradients of 435 small parameters cost, and how many collectives?

Process CPU time of one call and of reading the norm: `torch.nn.utils.clip_grad_norm_` for the plain
model and FSDP2, FSDP1's own method, and `composable_shard.clip_grad_norm_`. The model is "micro",
so small that what is left is host work; the process group is torch's `fake` backend, which moves
no data. Every call follows a forward and a backward of its own. The peers run interleaved in one
process, in rotating order, and the ratio to FSDP2 is taken inside each round. The all-reduces of
one call are counted by torch's CommDebugMode, ours by the library. Then two gloo ranks compare the
norms of all peers with the plain model's, of the ranks' mean gradient.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import peers, report
from benchmarks.ranks import run_ranks
from benchmarks.rounds import interleave, ratios
from tests.common.models import make_batch, make_llama

MAX_NORM = 0.1
GOALS = {"ours": 0.3}


def clip(peer: str, model: nn.Module) -> float:
    """Clip the model's gradients the peer's way and return the norm."""
    norm: Tensor
    if peer.startswith("ours"):
        norm = importlib.import_module("composable_shard").clip_grad_norm_(model, MAX_NORM)
    elif peer.startswith("fsdp1"):
        norm = model.clip_grad_norm_(MAX_NORM)
    else:
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return norm.item()


def clipper(peer: str) -> Callable[[], float]:
    """Return what takes gradients, clips them and returns the CPU seconds of the clipping."""
    model = peers.build(peer, make_llama("micro"))
    batch = make_batch("micro", 0)

    def step() -> float:
        model(*batch).backward()
        start = time.process_time()
        clip(peer, model)
        elapsed = time.process_time() - start
        model.zero_grad()
        return elapsed

    return step


def compare_norms(rank: int, names: list[str]) -> dict[str, tuple[float, int]]:
    """Return each peer's norm, relative to the plain model's, and its collectives in one call."""
    plain = make_llama("micro")
    losses = [plain(*make_batch("micro", each)) for each in range(dist.get_world_size())]
    torch.stack(losses).mean().backward()
    expected = clip("bare", plain)
    results = {}
    for name in names:
        model = peers.build(name, make_llama("micro"))
        model(*make_batch("micro", rank)).backward()
        library = importlib.import_module("composable_shard")
        with CommDebugMode() as counter, library.count_collectives() as log:
            norm = clip(name, model)
        results[name] = (norm / expected - 1, counter.get_total_counts() or len(log.events))
    return results


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, measure, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="interleaved rounds")
    parser.add_argument("--calls", type=int, default=3, help="calls per peer and round")
    parser.add_argument("--world-size", type=int, default=8, help="of the fake process group")
    parser.add_argument("--peers", default="bare,fsdp1,fsdp2,ours,ours_flat")
    args = parser.parse_args(argv)
    names = peers.parse_peers(args.peers)
    if "fsdp2" not in names:
        parser.error("--peers must hold fsdp2: the ratios are to it")
    norms = run_ranks(2, compare_norms, [name for name in names if name != "bare"])
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.world_size)
    samples = interleave({name: clipper(name) for name in names}, args.rounds, args.calls)
    lines = []
    for name, seconds in samples.items():
        error, issued = norms.get(name, ("", ""))
        lines.append(
            [
                name,
                report.spread([value * 1e3 for value in seconds]),
                report.spread(ratios(samples, name, "fsdp2")),
                f"<= {GOALS[name]:.2f}" if name in GOALS else "",
                str(issued),
                f"{error:.1e}" if error != "" else "",
            ]
        )
    markdown = report.header(
        "Host cost of clipping the gradients of 435 parameters",
        "process CPU time of clip_grad_norm_ and norm.item(), after a forward and a backward,"
        " one thread",
        f"model micro, fake backend at world size {args.world_size}, {args.rounds} rounds of"
        f" {args.calls} calls; fsdp1 and ours_flat with one flat parameter per unit",
        "figures: median (quartiles); collectives and norms on two gloo ranks, the norm's relative"
        " difference from the plain model's of the mean gradient",
    )
    columns = ["peer", "ms", "ratio to fsdp2", "goal", "collectives", "norm"]
    report.emit(markdown + "\n" + report.table(columns, lines), args.output)
