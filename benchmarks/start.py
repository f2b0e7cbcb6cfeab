"""What does a program pay before its second step: importing, sharding, the first step, objects?

Beside FSDP2, without what either needs of torch itself.

- *import*: process CPU seconds of `import composable_shard`, or of FSDP2's `fully_shard`, in a new
  interpreter that has imported torch; compiled modules are cached, as an installed package's are.
  The first optimizer of torch imports the compiler, and that DTensor and FSDP2: what this library
  leaves out is saved by programs without one (data workers, command lines, evaluation)
- *sharding and first step*: milliseconds of `fully_shard` on each unit and of the first forward
  and backward, which compares the ranks and makes buffers; on gloo ranks of one thread, the slower
  rank's, a new model in each round, peers in turns. *third step*: the same model's, for comparison
- *objects*: kB of Python's objects for each unit after three steps (tracemalloc), without tensors'
  memory, which is not Python's

    python -m benchmarks.start --output start.md
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor, nn

from benchmarks import peers, report
from benchmarks.ranks import run_ranks, timed_together
from tests.common.models import make_batch, make_llama

PEERS = ("ours", "fsdp2")
_IMPORTS = {
    "ours": "import composable_shard",
    "fsdp2": "from torch.distributed.fsdp import fully_shard",
}
_TIMED = "import torch, time; t = time.process_time(); {}; print(time.process_time() - t)"


def import_seconds(rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each import by round, in interpreters of their own."""
    times: dict[str, list[float]] = {peer: [] for peer in PEERS}
    with TemporaryDirectory() as cache:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"PYTHONPYCACHEPREFIX": cache, "PYTHONPATH": str(Path.cwd())}
        for number in range(-1, rounds):
            for peer in PEERS:
                command = [sys.executable, "-c", _TIMED.format(_IMPORTS[peer])]
                found = subprocess.run(
                    command, env=environment, check=True, capture_output=True, text=True
                )
                if number >= 0:  # the first one fills the cache
                    times[peer].append(float(found.stdout))
    return times


def _pass(model: nn.Module, batch: tuple[Tensor, ...]) -> None:
    model(*batch).backward()


def measure_steps(rank: int, model_name: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the milliseconds to the end of each peer's first step, and of its third, by round."""
    times: dict[str, dict[str, list[float]]] = {
        kind: {peer: [] for peer in PEERS} for kind in ("first", "third")
    }
    for number in range(-1, rounds):
        for peer in PEERS if number % 2 else reversed(PEERS):
            gc.collect()
            plain = make_llama(model_name)
            built: list[nn.Module] = []
            set_up = timed_together(lambda: built.append(peers.build(peer, plain)))  # noqa: B023
            step = partial(_pass, built[0], make_batch(model_name, rank))
            first, _, third = (timed_together(step) for _ in range(3))
            if number >= 0:
                times["first"][peer].append(set_up + first)
                times["third"][peer].append(third)
    return times


def measure_objects(rank: int, model_name: str, peer: str) -> float:
    """Return the kB of Python's objects for each unit."""
    model, batch = make_llama(model_name), make_batch(model_name, rank)
    num_units = len(model.layers) + 1
    peers.build(peer, make_llama("micro"))  # what is made once
    gc.collect()
    tracemalloc.start()
    sharded = peers.build(peer, model)
    for _ in range(3):
        sharded(*batch).backward()
        sharded.zero_grad()
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / num_units / 1e3


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, measure, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", default="tiny", help="out of 50m, std, tiny, micro")
    parser.add_argument("--world-size", type=int, default=2, help="gloo ranks")
    parser.add_argument("--rounds", type=int, default=9, help="rounds after one to warm up")
    args = parser.parse_args(argv)
    imports = import_seconds(args.rounds)
    steps = run_ranks(args.world_size, measure_steps, args.model, args.rounds)
    objects = {p: run_ranks(args.world_size, measure_objects, args.model, p) for p in PEERS}

    def ratio(times: dict[str, list[float]]) -> str:
        pairs = zip(times["ours"], times["fsdp2"], strict=True)
        return report.spread([ours / theirs for ours, theirs in pairs])

    rows = [
        ["import, s", *(report.spread(imports[p]) for p in PEERS), ratio(imports)],
        *(
            [label, *(report.spread(steps[kind][p], 1) for p in PEERS), ratio(steps[kind])]
            for label, kind in (
                ("sharding and first step, ms", "first"),
                ("third step, ms", "third"),
            )
        ),
        [
            *("objects of a unit, kB", *(f"{objects[p]:.0f}" for p in PEERS)),
            f"{objects['ours'] / objects['fsdp2']:.2f}",
        ],
    ]
    markdown = report.header(
        f"Before the second step: {args.model}",
        f"{args.world_size} gloo ranks; {args.rounds} rounds, median (lower-upper quartile)",
    )
    report.emit(markdown + "\n" + report.table(["", "ours", "FSDP2", "ratio"], rows), args.output)


if __name__ == "__main__":
    main()
