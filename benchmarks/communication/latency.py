"""What does a step of many small units pay for the latency of its collectives?

On the accelerator of threads of `tests/common/device`, in modelled time: it follows from who waits
for whom, and neither from luck nor from the machine's load. 48 equal layers of 0.8 MB, one unit
each. A matrix product takes 25 us, other kernels and the host no time, a collective its latency and
its bytes at 100 GB/s. The latency is what a collective costs on many ranks, however few bytes it
has. Collectives that the backend groups count as one, as NCCL's do.

    python -m benchmarks.communication latency
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks import peers, report
from benchmarks.ranks import run_ranks
from tests.common import device

LATENCIES_US = (20, 50, 200)
NUM_LAYERS = 48
NUM_WARM = 12  # steps until no identities are exchanged any more
PEERS = "fsdp2,ours,ours_gradop,ours_optim,ours_noshard,ddp_view"
_WIDTH, _HIDDEN = 256, 400  # 0.8 MB
_PRODUCT_US = 25
_BYTE_US = 1e-5
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")

Found = tuple[list[float], dict[str, int]]


class Chain(nn.Module):
    """Layers in a list, as `peers.build` wants them."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(_WIDTH, _HIDDEN, bias=False), nn.Linear(_HIDDEN, _WIDTH, bias=False)
            )
            for _ in range(num_layers)
        )
        self.head = nn.Linear(_WIDTH, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def measure(rank: int, names: Sequence[str], num_layers: int = NUM_LAYERS) -> dict[str, Found]:
    """Return for each peer the us of a step for each latency, and its collectives by kind."""
    return {name: _measure(name, num_layers) for name in names}


def _measure(name: str, num_layers: int) -> Found:
    model = peers.build(name, Chain(num_layers).to(device.NAME))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.ones(2, _WIDTH, device=device.NAME)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(NUM_WARM):
        step()
    times, kinds = [], Counter[str]()
    for latency in LATENCIES_US:
        device.synchronize()
        costs = dict.fromkeys(_COLLECTIVES, device.Cost(latency, _BYTE_US))
        device.model_durations({**costs, "aten::mm": device.Cost(_PRODUCT_US)})
        step()
        times.append(device.device_time_us())
        kinds = Counter(span.name for span in device.timeline())
        device.model_durations({})
    return times, {kind: kinds[kind] for kind in _COLLECTIVES if kinds[kind]}


def main(arguments: Sequence[str]) -> None:
    """Measure, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--peers", default=PEERS, help="comma-separated; fsdp2 and others")
    args = parser.parse_args(arguments)
    found = run_ranks(2, measure, peers.parse_peers(args.peers), on_device=True)
    rows = []
    for name, (times, kinds) in found.items():
        cells = [
            f"{time / 1000:.2f} ({time / other:.2f})"
            for time, other in zip(times, found["fsdp2"][0], strict=True)
        ]
        rows.append([name, *cells, ", ".join(f"{number} {kind}" for kind, number in kinds.items())])
    markdown = report.header(
        f"A step of {NUM_LAYERS} units of 0.8 MB by the latency of a collective",
        "accelerators of threads, in modelled time: independent of the machine",
        f"a matrix product takes {_PRODUCT_US} us, a byte {_BYTE_US:g} us, the host nothing",
        "milliseconds of forward, backward and SGD, and the ratio to fsdp2; 2 ranks",
    )
    columns = ["peer", *(f"latency {each} us" for each in LATENCIES_US), "collectives of a step"]
    report.emit(markdown + "\n" + report.table(columns, rows), args.output)
