"""What do the guards of lockstep cost a step, and all-reduces that are messages?

Two ranks train the same layers by turns, each way in a process group of its own: by messages, by
the backend's collectives after the first steps, and with `check_order="always"`; then `NO_SHARD`
with all-reduces by messages and by the backend, beside DistributedDataParallel. The guards' share
is the CPU time of the functions that collect, send and compare facts, in the same steps; beyond it
an identity is appended to a list for each collective. CPU time is that of rank 0's main thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from benchmarks import report
from benchmarks.ranks import run_ranks
from benchmarks.rounds import Samples, interleave, ratios
from composable_shard import fully_shard
from composable_shard.comm import devices, step_digest
from composable_shard.runtime import backward_pass

WAYS: dict[str, tuple[bool, dict[str, Any] | None]] = {  # the backend's collectives, options
    "FULL_SHARD, messages": (False, {}),
    "FULL_SHARD, backend": (True, {}),
    "FULL_SHARD, backend, always": (True, {"check_order": "always"}),
    "NO_SHARD, messages": (False, {"strategy": "no_shard"}),
    "NO_SHARD, backend": (True, {"strategy": "no_shard"}),
    "DDP": (True, None),
}
_COMPARED = {
    "FULL_SHARD, backend, always": "FULL_SHARD, backend",
    "NO_SHARD, messages": "DDP",
    "NO_SHARD, backend": "DDP",
}
_in_guards_s = [0.0]


class Layers(nn.Module):
    """Equal layers, each a unit."""

    def __init__(self, num_layers: int, dim: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """Run all layers."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def _timed(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            _in_guards_s[0] += time.thread_time() - start

    return call


def _time_guards() -> None:
    backward_pass.step_facts = _timed(backward_pass.step_facts)
    step_digest._MeshReduction.check_step = _timed(  # type: ignore[method-assign]
        step_digest._MeshReduction.check_step
    )
    step_digest._StepRecord.__init__ = _timed(step_digest._StepRecord.__init__)  # type: ignore[method-assign]


def _trainer(
    way: tuple[bool, dict[str, Any] | None], num_layers: int, dim: int
) -> Callable[[Callable[[], float]], float]:
    is_backend, options = way
    model: nn.Module = Layers(num_layers, dim)
    group = dist.new_group()
    devices._has_gloo[group] = not is_backend
    if options is None:
        model = DistributedDataParallel(model, process_group=group)
    else:
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(64, dim)

    def step(clock: Callable[[], float]) -> float:
        dist.barrier()
        start = clock()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return clock() - start

    for _ in range(8):  # the first steps are over then
        step(time.perf_counter)
    return step


def measure(rank: int, num_layers: int, dim: int, rounds: int) -> dict[str, Any]:
    """Return samples of CPU time, time and the guards' share of a step, and that of the watch."""
    _time_guards()
    steps = {name: _trainer(way, num_layers, dim) for name, way in WAYS.items()}
    start = time.perf_counter()

    def share(step: Callable[[Callable[[], float]], float]) -> float:
        _in_guards_s[0] = 0.0
        seconds = step(time.thread_time)
        return _in_guards_s[0] / seconds

    found = {
        what: interleave({name: partial(do, step) for name, step in steps.items()}, rounds, 5)
        for what, do in (
            ("CPU", lambda step: step(time.thread_time)),
            ("time", lambda step: step(time.perf_counter)),
            ("share", share),
        )
    }
    (watch,) = [each for each in threading.enumerate() if each.name == "composable_shard watch"]
    assert watch.ident is not None
    used = time.clock_gettime(time.pthread_getcpuclockid(watch.ident))
    return {**found, "watch": used / (time.perf_counter() - start)}


def _rows(found: dict[str, Samples]) -> list[list[str]]:
    rows = []
    for name in WAYS:
        other = _COMPARED.get(name)
        ratio = report.spread(ratios(found["time"], name, other)) if other else ""
        cells = [report.spread([1000 * each for each in found[w][name]]) for w in ("CPU", "time")]
        share = report.spread([100 * each for each in found["share"][name]])
        rows.append([name, *cells, f"{ratio} {other or ''}", "" if name == "DDP" else share])
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args(argv)
    found = run_ranks(2, measure, args.layers, args.dim, args.rounds)
    markdown = report.header(
        "What the guards of lockstep cost",
        f"2 gloo ranks, one thread each, {args.layers} x {args.dim}, {args.rounds} rounds by turns "
        "of 5 steps, median (quartiles); ratios inside each round",
        f"bytes of the guards in the flags of a backward: 9, and 2 for each of {2 * args.layers} "
        "parameters; an exchange of identities: 16 for each collective",
        f"the watch takes {100 * found['watch']:.2f} % of a core",
    )
    columns = ["way", "CPU, ms a step", "ms a step", "time, ratio to", "guards, % of CPU"]
    report.emit(markdown + "\n" + report.table(columns, _rows(found)), args.output)
