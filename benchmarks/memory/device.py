"""How much memory of an accelerator does a training step hold, and reserve, by its allocator?

On the accelerator of threads of `tests/common/device`: its allocator gives freed memory
back to the stream that it was allocated on, as CUDA's, but does not split blocks. Two ranks, AdamW,
rank 0's figures in units of P (all parameters in fp32), less what the plain model holds for
computing. Counts, not times: they do not depend on the machine's load.

    python -m benchmarks.memory device                 # peaks of a step, beside the formulas
    python -m benchmarks.memory device --steps 200     # reserved beside allocated, over many steps
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from benchmarks import report
from benchmarks.memory.formulas import DEVICE_FORMULAS, Sizes
from benchmarks.ranks import run_ranks
from composable_shard import MixedPrecisionPolicy, ShardingStrategy, fully_shard
from tests.common import device
from tests.common.models import make_batch, make_llama

Levels = dict[str, float]  # bytes, by column
STAGES = ("at rest", "peak forward", "peak backward", "after backward", "peak optimizer")
PRECISIONS: dict[str, dict[str, torch.dtype]] = {
    "fp32": {},
    "bf16, fp32 sums": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "bf16": {"param_dtype": torch.bfloat16},
}
PEERS: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "fsdp2_keep": {"reshard_after_forward": False},
    "ours": {},
    "ours_keep": {"reshard_after_forward": False},
    "ours_gradop": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "ours_optim": {"strategy": ShardingStrategy.SHARD_OPTIM},
    "ours_noshard": {"strategy": ShardingStrategy.NO_SHARD},
}


def build(peer: str, model: nn.Module, precision: str) -> nn.Module:
    """Shard each layer of a model, and the rest, as a peer does; "bare" leaves it as it is."""
    if peer == "bare":
        return model
    dtypes = PRECISIONS[precision]
    shard: Callable[..., Any]
    if peer.startswith("fsdp2"):
        shard, options = torch_fully_shard, {"mp_policy": TorchMixedPrecisionPolicy(**dtypes)}
    else:
        # Layers of real models are larger than what is gathered ahead at once.
        shard, options = fully_shard, {"mp_policy": MixedPrecisionPolicy(**dtypes)}
        options["prefetch_nbytes"] = 0
    for module in (*model.layers, model):
        shard(module, **options, **PEERS[peer])
    return model


def sizes_of(model_name: str, precision: str, num_ranks: int) -> Sizes:
    """Return what the formulas need."""
    dtypes = PRECISIONS[precision]
    values = dtypes.get("param_dtype", torch.float32)
    reduced = dtypes.get("reduce_dtype", values)
    sizes = Sizes.of(make_llama(model_name), num_ranks)
    return replace(sizes, values=values.itemsize / 4, reduced=reduced.itemsize / 4)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
) -> Levels:
    """Take one step; return the bytes at its stages, and those that are reserved in the end."""
    levels: Levels = {"at rest": device.counts()["allocated"]}
    device.reset_peak_memory()
    loss = model(*batch)
    levels["peak forward"] = device.counts()["peak"]
    device.reset_peak_memory()
    loss.backward()
    levels["peak backward"] = device.counts()["peak"]
    levels["after backward"] = device.counts()["allocated"]
    device.reset_peak_memory()
    optimizer.step()
    levels["peak optimizer"] = device.counts()["peak"]
    optimizer.zero_grad()
    levels["reserved"] = device.counts()["reserved"]
    return levels


def train(
    rank: int, model_name: str, peer: str, precision: str, steps: Sequence[int]
) -> list[Levels]:
    """Build and train; return the levels of the steps of these numbers."""
    gc.collect()
    device.synchronize()
    torch.accelerator.empty_cache()
    model = build(peer, make_llama(model_name).to(device.NAME), precision)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # without temporaries
    tokens, targets = (each.to(device.NAME) for each in make_batch(model_name, rank))
    found = []
    for number in range(1, max(steps) + 1):
        levels = train_step(model, optimizer, (tokens, targets))
        if number in steps:
            found.append(levels)
    device.synchronize()
    return found


def measure(rank: int, model_name: str, peers: Sequence[str], precision: str) -> dict[str, Levels]:
    """Return the levels of a warm step of each peer, less what computing takes."""
    # The plain model's tensors: parameters and two states, and gradients in and after backwards.
    (bare,) = train(rank, model_name, "bare", precision, [4])
    size = sum(param.nbytes for param in make_llama(model_name).parameters())
    compute = {stage: bare[stage] - 3 * size for stage in STAGES}
    for stage in ("peak backward", "after backward", "peak optimizer"):
        compute[stage] -= size
    result = {}
    for peer in peers:
        (levels,) = train(rank, model_name, peer, precision, [4])
        result[peer] = {stage: levels[stage] - compute[stage] for stage in STAGES}
        result[peer]["reserved"] = levels["reserved"]
    return result


def deviations(found: Levels, peer: str, sizes: Sizes) -> dict[str, float]:
    """Return by which part the levels differ from the formulas'."""
    expected = DEVICE_FORMULAS[peer](sizes)
    return {stage: found[stage] / expected[stage] - 1 for stage in STAGES if stage in expected}


def report_peaks(model_name: str, peers: Sequence[str], world_size: int) -> str:
    """Measure all peers in all precisions; return a table."""
    rows = []
    for precision in PRECISIONS:
        sizes = sizes_of(model_name, precision, world_size)
        found = run_ranks(
            world_size, measure, model_name, peers, precision, on_device=True, deadline=500.0
        )
        for peer, levels in found.items():
            off = deviations(levels, peer, sizes) if peer in DEVICE_FORMULAS else {}
            cells = [
                f"{nbytes / sizes.total:.3f}" + (f" ({off[stage]:+.1%})" if stage in off else "")
                for stage, nbytes in levels.items()
            ]
            rows.append([precision, peer, *cells])
    markdown = report.header(
        f"Memory of a training step by an accelerator's allocator: {model_name}",
        f"{world_size} ranks, each with an accelerator of threads; fused AdamW",
        f"in P = {sizes.total / 1e6:.1f} MB, all parameters in fp32; a warm step, rank 0",
        "less what the plain model holds for computing; in brackets the deviation from the formula",
        "(benchmarks/memory/formulas.py); ours with prefetch_nbytes=0: one layer is gathered ahead",
        "reserved: by the caching allocator, which does not split blocks; computing is in it",
    )
    return markdown + "\n" + report.table(["precision", "peer", *STAGES, "reserved"], rows)


def report_steps(model_name: str, peers: Sequence[str], world_size: int, steps: int) -> str:
    """Train many steps; return a table of what is allocated and reserved at their ends."""
    numbers = sorted({4, steps // 4, steps // 2, steps})
    size = sum(param.nbytes for param in make_llama(model_name).parameters())
    rows = []
    for precision in PRECISIONS:
        for peer in peers:
            found = run_ranks(
                world_size,
                train,
                model_name,
                peer,
                precision,
                numbers,
                on_device=True,
                deadline=3000.0,
            )
            print(f"{precision}, {peer}: done", file=sys.stderr)
            for stage in ("at rest", "reserved"):
                cells = [f"{levels[stage] / size:.3f}" for levels in found]
                rows.append([precision, peer, stage, *cells])
    markdown = report.header(
        f"Memory over {steps} steps by an accelerator's allocator: {model_name}",
        f"{world_size} ranks, each with an accelerator of threads; fused AdamW",
        f"in P = {size / 1e6:.1f} MB, all parameters in fp32; rank 0",
    )
    columns = ["precision", "peer", "bytes", *(f"step {number}" for number in numbers)]
    return markdown + "\n" + report.table(columns, rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, measure, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", help="thin, or with --steps mini")
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated")
    parser.add_argument("--world-size", type=int, default=2, help="ranks")
    parser.add_argument("--steps", type=int, help="train so many, and look at what is reserved")
    args = parser.parse_args(argv)
    peers = args.peers.split(",")
    if args.steps:
        markdown = report_steps(args.model or "mini", peers, args.world_size, args.steps)
    else:
        markdown = report_peaks(args.model or "thin", peers, args.world_size)
    report.emit(markdown, args.output)
