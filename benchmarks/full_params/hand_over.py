"""What does it cost to hand all weights to an inference engine?

Wall time, all ways on one model each in the same processes, their order rotating from round to
round, a barrier before each; gloo ranks with one thread. Each value is dropped when the next one
comes, as by an engine that has copied it. Peak: bytes held from malloc beyond those before, each
way in processes of its own (gcc).

- ours: `iter_full_params(model)`; "bf16" with dtype=torch.bfloat16; "small" with max_nbytes=1
- fsdp2: `full_tensor()` of each value of `state_dict()`, as RL trainers call it
- fsdp2 dict: torch's `get_model_state_dict`, whole, on the first rank
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from benchmarks import malloc_counter, report
from benchmarks.full_params import ways
from benchmarks.ranks import run_ranks
from composable_shard import iter_full_params
from tests.common.models import make_llama, param_nbytes


def _full_tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    for name, value in model.state_dict().items():
        yield name, value.full_tensor()


def _whole_dict(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options).items()


_WAYS: dict[str, tuple[str, Callable[[nn.Module], Any]]] = {
    "ours": ("ours", iter_full_params),
    "ours bf16": ("ours", partial(iter_full_params, dtype=torch.bfloat16)),
    "ours small": ("ours", partial(iter_full_params, max_nbytes=1)),
    "fsdp2": ("fsdp2", _full_tensors),
    "fsdp2 dict": ("fsdp2", _whole_dict),
}


def hand_over(model: nn.Module, way: Callable[[nn.Module], Any]) -> float:
    """Return the milliseconds that reading all values took on this rank."""
    dist.barrier()
    start = time.perf_counter()
    for _name, value in way(model):
        del value
    return (time.perf_counter() - start) * 1e3


def measure_times(rank: int, model_name: str, rounds: int) -> dict[str, list[float]]:
    """Return the times of each way, by round."""
    return ways.measure_times(_WAYS, hand_over, model_name, rounds)


def measure_peak(rank: int, model_name: str, name: str) -> int:
    """Return the bytes that one way needs at its peak, beyond those held before it."""
    return ways.measure_peak(_WAYS, hand_over, model_name, name)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, measure, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", default="50m", help="out of 50m, std, tiny, micro")
    parser.add_argument("--world-size", type=int, default=2, help="gloo ranks")
    parser.add_argument("--rounds", type=int, default=20, help="rounds after two to warm up")
    args = parser.parse_args(argv)
    model = make_llama(args.model)
    size = param_nbytes(model)
    unit = max(param_nbytes(model.layers[0]), size - sum(map(param_nbytes, model.layers)))
    times = run_ranks(args.world_size, measure_times, args.model, args.rounds)
    with malloc_counter.preloaded():
        peaks = {name: run_ranks(args.world_size, measure_peak, args.model, name) for name in _WAYS}
    rows = []
    for name, taken in times.items():
        ratios = [own / other for own, other in zip(taken, times["fsdp2"], strict=True)]
        columns = [report.spread(taken, 1), report.spread(ratios)]
        rows.append([name, *columns, f"{peaks[name] / size:.3f}", f"{peaks[name] / unit:.2f}"])
    markdown = report.header(
        f"Handing all weights to an inference engine: {args.model}",
        f"fp32, {args.world_size} gloo ranks; P = {size / 1e6:.1f} MB, {size // 4 / 1e6:.1f} M; "
        f"the largest unit {unit / 1e6:.1f} MB",
        f"{args.rounds} rounds, median (lower-upper quartile), rank 0",
        "ratio: to fsdp2 in the same round",
    )
    columns = ["way", "ms", "ratio", "peak / P", "peak / largest unit"]
    report.emit(markdown + "\n" + report.table(columns, rows), args.output)
