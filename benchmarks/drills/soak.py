"""Does anything grow? Resident memory, tensors, objects, descriptors and threads over 2,000 steps.

    python -m benchmarks.drills soak

Two ranks train a small model under each strategy, and do now and then all that a long run does:
microbatches without reductions, evaluations, checkpoints (in the background too), full parameters
to read and edit, full state dicts, and errors in forward, in backward and between them that the
program catches. What a process holds is counted after step 500 and after step 2,500.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.ranks import run_ranks
from benchmarks.report import emit, header, make_parser, table
from composable_shard import (
    ShardingStrategy,
    StateDictOptions,
    clip_grad_norm_,
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    load_checkpoint,
    no_sync,
    save_checkpoint,
    unshard_params,
)

# Growth of resident memory that is put down to the allocator, which returns nothing early.
MAX_GROWTH_NBYTES = 4 << 20
# Of all objects, where caches of the interpreter come and go.
MAX_NEW_OBJECTS = 200
_NUM_TURNS = 8
COUNTED = ("tensors", "objects", "descriptors", "threads")


class Planned(Exception):
    """Raised in the middle of a step, and caught."""


class Block(nn.Module):
    """A layer that can raise in its forward, or in its backward."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.fails: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.fails == "forward":
            raise Planned
        y = self.down(torch.relu(self.up(x)))
        if self.fails == "backward":
            y.register_hook(_fail)
        return x + y


def _fail(_: Tensor) -> None:
    raise Planned


class Trainer:
    """A run, and how often it does what."""

    def __init__(self, strategy: ShardingStrategy, folder: Path, every: int) -> None:
        torch.manual_seed(0)
        self.folder, self.every = folder, every
        self.blocks = [Block(16) for _ in range(3)]
        self.model = nn.Sequential(nn.Linear(8, 16), *self.blocks, nn.Linear(16, 4))
        for block in self.blocks:
            fully_shard(block, strategy=strategy)
        fully_shard(self.model, strategy=strategy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.save: Any = None

    def run(self, first: int, last: int) -> None:
        """Train from one step to another."""
        for step in range(first, last):
            self._step(step)
            self._now_and_then(step)
        if self.save is not None:
            self.save.wait()
            self.save = None

    def _input(self, step: int) -> Tensor:
        return torch.full((4, 8), 0.01 * (step % 7) + dist.get_rank())

    def _step(self, step: int) -> None:
        if step % 3 == 0:
            with no_sync(self.model):
                self.model(self._input(step)).square().mean().backward()
        self.model(self._input(step)).square().mean().backward()
        clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _now_and_then(self, step: int) -> None:
        turn = step % (_NUM_TURNS * self.every)
        if turn == 0:
            with torch.no_grad():
                self.model.eval()
                self.model(self._input(step))
                self.model.train()
        elif turn == self.every:
            self._fail_once("forward")
        elif turn == 2 * self.every:
            self._fail_once("backward")
        elif turn == 3 * self.every:
            if self.save is not None:
                self.save.wait()
            self.save = save_checkpoint(
                self.folder, self.model, self.optimizer, step=step, keep_last=2, async_op=True
            )
        elif turn == 4 * self.every:
            with unshard_params(self.model), torch.no_grad():
                self.model[0].bias.add_(0.01)
            self.model[0].weight.full_tensor()
            get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))
        elif turn == 5 * self.every:
            loss = self.model(self._input(step)).sum()  # a forward without a backward
            del loss
            save_checkpoint(self.folder, self.model, self.optimizer, step=step, keep_last=2)
        elif turn == 6 * self.every:
            load_checkpoint(self.folder, self.model, self.optimizer)
        elif turn == 7 * self.every:
            with torch.inference_mode():
                self.model(self._input(step))
            get_optimizer_state_dict(self.model, self.optimizer)

    def _fail_once(self, where: str) -> None:
        self.blocks[1].fails = where
        try:
            self.model(self._input(0)).sum().backward()
        except Planned:
            pass
        finally:
            self.blocks[1].fails = None
        self.optimizer.zero_grad()


def count() -> dict[str, int]:
    """Return what this process holds."""
    for _ in range(3):
        gc.collect()
    objects = gc.get_objects()
    return {
        "resident": int(Path("/proc/self/statm").read_text().split()[1])
        * os.sysconf("SC_PAGE_SIZE"),
        "tensors": sum(issubclass(type(each), Tensor) for each in objects),
        "objects": len(objects),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def soak(rank: int, name: str, first: int, last: int, every: int) -> Any:
    """Count twice; return both counts of all ranks, and the seconds of the steps between."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    trainer = Trainer(ShardingStrategy[name], Path(str(folder[0])), every)
    trainer.run(0, first)
    before = count()
    started = time.perf_counter()
    trainer.run(first, last)
    seconds = time.perf_counter() - started
    found: list[Any] = [None] * dist.get_world_size()
    after = count()
    dist.all_gather_object(found, (before, after))
    return {"counts": found, "seconds": seconds}


def grown(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Return what has grown; resident memory and the number of objects may a little."""
    may = dict.fromkeys(COUNTED, 0) | {"objects": MAX_NEW_OBJECTS}
    names = [name for name in COUNTED if after[name] - before[name] > may[name]]
    if after["resident"] - before["resident"] > MAX_GROWTH_NBYTES:
        names.append("resident")
    return names


def render(results: dict[str, Any]) -> str:
    """Return a table: before and after, on rank 0 and rank 1."""
    rows = []
    for name, result in results.items():
        for rank, (before, after) in enumerate(result["counts"]):
            resident = f"{before['resident'] / 2**20:.1f} -> {after['resident'] / 2**20:.1f} MiB"
            counts = [f"{before[each]} -> {after[each]}" for each in COUNTED]
            more = ", ".join(grown(before, after)) or "nothing"
            seconds = f"{result['seconds']:.0f} s"
            rows.append([name, str(rank), resident, *counts, more, seconds])
    return table(["strategy", "rank", "resident", *COUNTED, "grown", "time"], rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--first", type=int, default=500, help="the step of the first count")
    parser.add_argument("--last", type=int, default=2500, help="the step of the second count")
    parser.add_argument("--every", type=int, default=5, help="steps between what is done at times")
    parser.add_argument("--strategy", choices=[each.name for each in ShardingStrategy])
    args: argparse.Namespace = parser.parse_args(argv)
    names = [args.strategy] if args.strategy else [each.name for each in ShardingStrategy]
    results = {name: run_ranks(2, soak, name, args.first, args.last, args.every) for name in names}
    notes = (
        f"2 gloo ranks; counts after step {args.first} and after step {args.last}",
        f"every {args.every} steps one of: evaluation, error in forward, error in backward, "
        "checkpoint in the background, full parameters and state dicts, checkpoint, load, "
        "optimizer state dict; a third of the steps has two microbatches",
    )
    emit(header("What grows in 2,000 steps", *notes) + "\n" + render(results), args.output)
    pairs = [pair for result in results.values() for pair in result["counts"]]
    if any(grown(*pair) for pair in pairs):
        sys.exit("something has grown")
