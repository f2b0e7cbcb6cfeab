"""How much memory does a training step hold at its peak, and at rest?

Bytes held from malloc, exact, in all threads: tensors, and whatever else the process allocates
beyond what it held before the model was built. Two gloo ranks, every peer in processes of its own
that have trained the plain model and a small one of the peer's before (so that nothing is counted
that only a first time costs), fused AdamW, rank 0's figures in units of P (all parameters). Needs
gcc.

    python -m benchmarks.memory                   # with activations
    python -m benchmarks.memory --model short     # without: every strategy, beside the formulas
    python -m benchmarks.memory --checkpoint      # every layer computes its activations again
    python -m benchmarks.memory --resident 500 --model mini

What `bare`, the plain model in a process of the same kind, holds beyond its parameters, gradients
and optimizer state (activations and what else computing takes) is subtracted from all others with
`--model short`, whose batch is so small that it hardly matters that peaks come at other moments.

With `--resident` the kernel's figure instead: the pages that the process has in memory after so
many steps, beyond those before the model was built. It includes what malloc keeps free, and what
fragmentation makes useless.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

from benchmarks import malloc_counter, peers, report
from benchmarks.memory.formulas import FORMULAS, Sizes
from benchmarks.ranks import run_ranks
from tests.common.models import LlamaLayer, make_batch, make_llama

Levels = dict[str, int]  # bytes, by column


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
) -> Levels:
    """Take one step and return the bytes held at its stages, in absolute figures."""
    malloc_counter.restart_peak()
    loss = model(*batch)
    levels = {"peak forward": malloc_counter.peak_nbytes()}
    malloc_counter.restart_peak()
    loss.backward()
    levels["peak backward"] = malloc_counter.peak_nbytes()
    dist.barrier()  # gloo's threads have let go of their buffers
    levels["after backward"] = malloc_counter.held_nbytes()
    malloc_counter.restart_peak()
    optimizer.step()
    levels["peak optimizer"] = malloc_counter.peak_nbytes()
    optimizer.zero_grad()
    del loss
    dist.barrier()
    levels["at rest"] = malloc_counter.held_nbytes()
    return levels


def build(model_name: str, peer: str, *, is_checkpointed: bool) -> nn.Module:
    """Return a peer's model."""
    model = make_llama(model_name)
    if is_checkpointed:
        apply_activation_checkpointing(model, check_fn=lambda each: isinstance(each, LlamaLayer))
    return peers.build(peer, model)


def train(
    model_name: str, peer: str, rank: int, steps: int, *, is_checkpointed: bool = False
) -> Levels:
    """Build, warm up, take some steps and return their highest levels, less the start's."""
    gc.collect()
    start = malloc_counter.held_nbytes()
    model = build(model_name, peer, is_checkpointed=is_checkpointed)
    optimizer = peers.make_optimizer(peer, model)
    batch = make_batch(model_name, rank)
    for _ in range(2):
        train_step(model, optimizer, batch)
    levels = [train_step(model, optimizer, batch) for _ in range(steps)]
    return {stage: max(level[stage] for level in levels) - start for stage in levels[0]}


def measure(
    rank: int, model_name: str, peer: str, steps: int, is_checkpointed: bool = False
) -> Levels:
    """Return the levels of one peer; with asynchronous collectives the peaks vary a little."""
    train(model_name, "bare", rank, 1)  # the buffers the matrix library keeps for this model
    # What the peer imports and builds the first time.
    train("micro", peer, rank, steps, is_checkpointed=is_checkpointed)
    return train(model_name, peer, rank, steps, is_checkpointed=is_checkpointed)


def resident_nbytes() -> int:
    """Return the bytes of this process's pages that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_resident(rank: int, model_name: str, peer: str, steps: int) -> dict[str, int]:
    """Return the pages of one peer after each of ten equal parts of the steps, at rest."""
    train_resident("micro", peer, rank, 10, parts=1)
    return train_resident(model_name, peer, rank, steps, parts=10)


def train_resident(
    model_name: str, peer: str, rank: int, steps: int, *, parts: int
) -> dict[str, int]:
    """Build, take steps and return the pages after each part of them, less the start's."""
    gc.collect()
    start, levels = resident_nbytes(), {}
    model = peers.build(peer, make_llama(model_name))
    optimizer = peers.make_optimizer(peer, model)
    batch = make_batch(model_name, rank)
    for number in range(1, steps + 1):
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number in (2, 10) or number % (steps // parts) == 0:
            dist.barrier()
            levels[f"{number}"] = resident_nbytes() - start
    return levels


def subtract_compute(results: dict[str, Levels], size: int) -> None:
    """Take off what the plain model holds beyond 3 P, and 4 P where there are gradients."""
    bare = results.pop("bare")
    for levels in results.values():
        for stage in levels:
            tensors = 3 if stage in ("peak forward", "at rest") else 4
            levels[stage] -= bare[stage] - tensors * size


def cells(peer: str, levels: Levels, sizes: Sizes, has_formula: bool) -> list[str]:
    """Return the levels in P, each with what the formula says and how far off that is."""
    formula = FORMULAS[peer](sizes) if has_formula and peer in FORMULAS else {}
    result = []
    for stage, nbytes in levels.items():
        text = f"{nbytes / sizes.total:.3f}"
        if stage in formula:
            expected = formula[stage]
            text += f" ({expected / sizes.total:.3f}, {nbytes / expected - 1:+.1%})"
        result.append(text)
    return result


PEERS = "bare,ddp,ddp_view,zero1,fsdp1,fsdp2,fsdp2_raf,fsdp2_keep,ours,ours_keep"
STRATEGIES = (
    "bare,ddp,ddp_view,zero1,fsdp1,fsdp1_gradop,fsdp1_noshard,fsdp2_raf,fsdp2_keep,"
    "ours,ours_raf,ours_keep,ours_gradop,ours_optim,ours_noshard"
)


def report_resident(args: argparse.Namespace) -> str:
    """Measure the pages of every peer; return a table in MB and in P."""
    size = sum(param.nbytes for param in make_llama(args.model).parameters())
    rows, columns = [], []
    for peer in peers.parse_peers(args.peers or "bare,fsdp2,ours"):
        levels = run_ranks(
            args.world_size, measure_resident, args.model, peer, args.resident, deadline=500.0
        )
        columns = [f"after {number}" for number in levels]
        rows.append([peer, *(f"{nbytes / 1e6:.1f}" for nbytes in levels.values())])
    markdown = report.header(
        f"Resident memory over {args.resident} steps: {args.model}",
        f"fp32, {args.world_size} gloo ranks, fused AdamW; P = {size / 1e6:.1f} MB",
        "MB of pages beyond those before building, at rest between steps, rank 0",
    )
    return markdown + "\n" + report.table(["peer", *columns], rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, measure, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", default="std", help="out of std, short, tiny, micro")
    parser.add_argument("--peers", help="comma-separated; the first must be bare")
    parser.add_argument("--world-size", type=int, default=2, help="gloo ranks")
    parser.add_argument("--steps", type=int, default=3, help="steps after two warm-up steps")
    parser.add_argument("--checkpoint", action="store_true", help="checkpoint every layer")
    parser.add_argument("--resident", type=int, metavar="STEPS", help="pages over so many steps")
    args = parser.parse_args(argv)
    if args.resident:
        report.emit(report_resident(args), args.output)
        return
    is_short = args.model == "short"
    names = peers.parse_peers(args.peers or (STRATEGIES if is_short else PEERS))
    if names[0] != "bare":
        parser.error("--peers must begin with bare")
    sizes = Sizes.of(make_llama(args.model), args.world_size)
    with malloc_counter.preloaded():
        results: dict[str, Levels] = {
            peer: run_ranks(args.world_size, measure, args.model, peer, args.steps, args.checkpoint)
            for peer in names
        }
    notes = ["fsdp2 and ours keep the root gathered from forward to backward, *_raf do not"]
    if is_short:
        subtract_compute(results, sizes.total)
        notes.append("less what the plain model holds for computing; in brackets the formula's")
        notes.append("figure and the deviation from it (benchmarks/memory/formulas.py)")
    rows = [[peer, *cells(peer, levels, sizes, is_short)] for peer, levels in results.items()]
    markdown = report.header(
        f"Memory of a training step: {args.model}{', checkpointed' * args.checkpoint}",
        f"fp32, {args.world_size} gloo ranks, fused AdamW; in P = {sizes.total / 1e6:.1f} MB",
        f"malloc bytes beyond those before building; highest of {args.steps} steps, rank 0",
        *notes,
    )
    columns = ["peer", *next(iter(results.values()))]
    report.emit(markdown + "\n" + report.table(columns, rows), args.output)
