"""How long does a step of an optimizer take, beside FSDP2's and the plain model's?

Gloo ranks with one thread, each with the same model three times: sharded here, by torch's FSDP2,
and plain, as one rank of DDP steps it. All step on equal gradients, interleaved in one process, a
barrier before each step and the time until the last rank is done; ratios are taken within a round.
LBFGS asks its closure for a loss four times in a step; the closure shrinks the gradients instead of
running the model. Muon and Shampoo get the layers' matrices. Shampoo computes no roots of its
preconditioners in these steps, and SOAP has none of more than 512 rows: the plain model would take
minutes for a step. A peer that raises is left out. Payload: full-size bytes that a step of ours
communicates, in multiples of the model's. Peak: MB that rank 0 holds from malloc in a step beyond
what it held before; needs gcc.

Needs the packages that `benchmarks/optimizers/lists.py` names; without one, its optimizers are left
out.

    python -m benchmarks.optimizers step --model tiny --output optimizer_step_time.md
"""

from __future__ import annotations

import gc
import importlib
import statistics
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import malloc_counter, peers, report
from benchmarks.ranks import run_ranks, timed_together
from benchmarks.rounds import interleave, ratios
from composable_shard import count_collectives
from tests.common.models import make_batch, make_llama

PEERS = ("ours", "fsdp2", "plain")


def _class(module: str, name: str, **options: Any) -> Callable[[nn.Module], Any]:
    def make(model: nn.Module) -> Any:
        return getattr(importlib.import_module(module), name)(model.parameters(), **options)

    return make


def _of_matrices(module: str, name: str, **options: Any) -> Callable[[nn.Module], Any]:
    def make(model: nn.Module) -> Any:
        layers: Any = model.layers
        matrices = [param for param in layers.parameters() if param.dim() == 2]
        return getattr(importlib.import_module(module), name)(matrices, **options)

    return make


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "AdamW": _class("torch.optim", "AdamW"),
    "Lion": _class("lion_pytorch", "Lion"),
    "AdamWScheduleFree": _class("schedulefree", "AdamWScheduleFree"),
    "Lamb": _class("pytorch_optimizer", "Lamb"),
    "Prodigy": _class("prodigyopt", "Prodigy"),
    "Adafactor": _class("torch.optim", "Adafactor"),
    "LBFGS": _class("torch.optim", "LBFGS", lr=0.1, max_iter=4),
    "Muon": _of_matrices("torch.optim", "Muon"),
    "SOAP": _class("pytorch_optimizer", "SOAP", max_precondition_dim=512),
    "Shampoo": _of_matrices("pytorch_optimizer", "Shampoo", preconditioning_compute_steps=1000),
}


def _stepper(model: nn.Module, make: Callable[[nn.Module], Any]) -> Callable[[], None]:
    """Return what steps once; raises if the peer can't."""
    optimizer = make(model)
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    if not isinstance(optimizer, torch.optim.LBFGS):
        return optimizer.step  # type: ignore[no-any-return]
    params = list(model.parameters())

    @torch.no_grad()
    def closure() -> Tensor:
        for param in params:
            assert param.grad is not None
            param.grad.mul_(0.9)
        return torch.tensor(1.0)

    return partial(optimizer.step, closure)


def measure(rank: int, model_name: str, optimizer: str, rounds: int) -> dict[str, Any]:
    """Return each peer's step times in ms and peaks in MB, and what a step of ours sends."""
    warnings.filterwarnings("ignore")
    timed: dict[str, Callable[[], float]] = {}
    failed: dict[str, str] = {}
    peaks: dict[str, float] = {}
    sent, count = 0, 0
    models = []  # a program keeps its model: what is left of one that is gone is not timed
    for peer in PEERS:
        model = make_llama(model_name)
        if peer != "plain":
            model = peers.build(peer, model)
        models.append(model)
        model(*make_batch(model_name, 0)).backward()
        try:
            step = _stepper(model, OPTIMIZERS[optimizer])
            step()  # makes the state
            with count_collectives() as log:
                step()
        except Exception as error:
            failed[peer] = type(error).__name__
        else:
            timed[peer] = partial(timed_together, step)
            peaks[peer] = _peak_of(step)
            if peer == "ours":
                sent, count = sum(event.nbytes for event in log.events), len(log.events)
    times = interleave(timed, rounds, 1)
    return {"times": times, "failed": failed, "peaks": peaks, "sent": sent, "count": count}


def _peak_of(step: Callable[[], None]) -> float:
    """Return the MB that a step holds beyond what was held before."""
    gc.collect()
    before = malloc_counter.held_nbytes()
    malloc_counter.restart_peak()
    step()
    return (malloc_counter.peak_nbytes() - before) / 1e6


def _row(optimizer: str, found: dict[str, Any], size: int) -> list[str]:
    times = found["times"]
    cells = [optimizer]
    for peer in PEERS:
        cells.append(report.spread(times[peer], 1) if peer in times else found["failed"][peer])
    for peer in PEERS[1:]:
        if peer in times and "ours" in times:
            cells.append(report.spread(ratios(times, "ours", peer)))
        else:
            cells.append("")
    peaks = [f"{found['peaks'][p]:.0f}" if p in found["peaks"] else "-" for p in PEERS]
    return [*cells, str(found["count"]), f"{found['sent'] / size:.2f}", ", ".join(peaks)]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, measure, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", default="tiny", help="out of 50m, std, tiny, micro")
    parser.add_argument("--world-size", type=int, default=2, help="gloo ranks")
    parser.add_argument("--rounds", type=int, default=9, help="rounds after five steps to warm up")
    parser.add_argument("--names", default=",".join(OPTIMIZERS), help="comma separated")
    args = parser.parse_args(argv)
    size = 4 * sum(param.numel() for param in make_llama(args.model).parameters())
    rows = []
    for name in args.names.split(","):
        with malloc_counter.preloaded():
            found = run_ranks(args.world_size, measure, args.model, name, args.rounds)
        if "ours" in found["times"]:
            print(name, statistics.median(found["times"]["ours"]), flush=True)
        rows.append(_row(name, found, size))
    markdown = report.header(
        f"Steps of optimizers beside FSDP2's and the plain model's: {args.model}",
        f"fp32, {args.world_size} gloo ranks; M = {size / 1e6:.1f} MB, the bytes of the model",
        f"{args.rounds} rounds, median (lower-upper quartile), until the last rank is done",
    )
    columns = ["optimizer", "ours ms", "FSDP2 ms", "plain ms", "to FSDP2", "to plain"]
    columns += ["collectives", "payload / M", "peak MB: ours, FSDP2, plain"]
    table = report.table(columns, rows)
    report.emit(markdown + "\n" + table, args.output)
