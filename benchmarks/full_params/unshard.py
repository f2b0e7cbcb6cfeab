"""What does it cost to show all parameters in full, and to hide them again?

Wall time to open and to close, all ways on one model each in the same processes, their order
rotating from round to round, a barrier before each step; gloo ranks with one thread. Peak: bytes
held from malloc beyond those before the scope opened, each way in processes of its own (gcc).

- ours: `unshard_params(model, writeback=False)`, and the same with writeback=True
- fsdp1: `summon_full_params(model, writeback=False)`, and with writeback=True
- fsdp2: `unshard()` of every module, then `reshard()` of every module
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from benchmarks import malloc_counter, report
from benchmarks.full_params import ways
from benchmarks.ranks import run_ranks
from composable_shard import unshard_params
from tests.common.models import make_llama, param_nbytes


@contextmanager
def _fsdp2_scope(model: nn.Module) -> Iterator[None]:
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    handles = [module.unshard(async_op=True) for module in modules]
    for handle in handles:
        if handle is not None:
            handle.wait()
    yield
    for module in modules:
        module.reshard()


_summon = FullyShardedDataParallel.summon_full_params
_WAYS: dict[str, tuple[str, Callable[[nn.Module], Any]]] = {
    "ours": ("ours", partial(unshard_params, writeback=False)),
    "ours writeback": ("ours", partial(unshard_params, writeback=True)),
    "fsdp1": ("fsdp1", partial(_summon, writeback=False)),
    "fsdp1 writeback": ("fsdp1", partial(_summon, writeback=True)),
    "fsdp2": ("fsdp2", _fsdp2_scope),
}


def open_and_close(model: nn.Module, scope: Callable[[nn.Module], Any]) -> tuple[float, float]:
    """Return the milliseconds that opening and closing took on this rank."""
    dist.barrier()
    start = time.perf_counter()
    with scope(model):
        opened = time.perf_counter()
        dist.barrier()
        closing = time.perf_counter()
    return (opened - start) * 1e3, (time.perf_counter() - closing) * 1e3


def measure_times(rank: int, model_name: str, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return the times of each way, by round."""
    return ways.measure_times(_WAYS, open_and_close, model_name, rounds)


def measure_peak(rank: int, model_name: str, name: str) -> int:
    """Return the bytes that one way needs at its peak, beyond those held before it."""
    return ways.measure_peak(_WAYS, open_and_close, model_name, name)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, measure, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", default="50m", help="out of 50m, std, tiny, micro")
    parser.add_argument("--world-size", type=int, default=2, help="gloo ranks")
    parser.add_argument("--rounds", type=int, default=20, help="rounds after two to warm up")
    args = parser.parse_args(argv)
    size = param_nbytes(make_llama(args.model))
    times = run_ranks(args.world_size, measure_times, args.model, args.rounds)
    with malloc_counter.preloaded():
        peaks = {name: run_ranks(args.world_size, measure_peak, args.model, name) for name in _WAYS}
    fastest = [
        min(sum(times[name][number]) for name in ("fsdp1", "fsdp2"))
        for number in range(args.rounds)
    ]
    rows = []
    for name, taken in times.items():
        opened, closed = zip(*taken, strict=True)
        ratios = [sum(pair) / best for pair, best in zip(taken, fastest, strict=True)]
        columns = [report.spread(opened, 1), report.spread(closed, 1), report.spread(ratios)]
        rows.append([name, *columns, f"{peaks[name] / size:.3f}"])
    markdown = report.header(
        f"Opening and closing full parameters: {args.model}",
        f"fp32, {args.world_size} gloo ranks; P = {size / 1e6:.1f} MB, {size // 4 / 1e6:.1f} M",
        f"{args.rounds} rounds, median (lower-upper quartile), rank 0",
        "ratio: open and close together, to the faster of fsdp1 and fsdp2 in the same round",
    )
    columns = ["way", "open ms", "close ms", "ratio", "peak / P"]
    report.emit(markdown + "\n" + report.table(columns, rows), args.output)
