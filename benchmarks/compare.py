"""The same training by each library that runs on the CPU: losses first, then what it costs.

Gloo ranks of one thread, the same weights, the same new batch in each step, fused AdamW. Each
peer has processes of its own for all but the times of steps, for which all share two.

- exact: the largest deviation of rank 0's losses from DDP's over six steps, relative; the most that
  a step holds from malloc and what is held between steps, in P, beyond what was held before the
  model was built; the bytes that a rank's system calls write in a step, which are those it sends.
- files: wall seconds of wrapping the model and building the optimizer, and of saving and loading
  both in the library's own way, in a folder in memory: medians of three, of the slower rank. The
  step after a load must have the loss of the step after the save.
- steps: `benchmarks.step_time`, all peers in turns; the ratio to DDP is taken inside each round.
  Peers whose losses deviate by more than 1e-5 are not timed.

    python -m benchmarks.compare --model tiny
    python -m benchmarks.compare --model std --parts exact --peers ddp,deepspeed_3,ours
    python -m benchmarks.compare --world-size 4 --parts exact,steps --peers ddp,fsdp2_2d,ours_2d

`other_libraries.py` says how to install them; peers that are not installed are left out by name.
Needs gcc.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as torch_state_dict
from torch import nn

import composable_shard
from benchmarks import malloc_counter, peers, report
from benchmarks.memory import step as memory
from benchmarks.ranks import run_ranks
from benchmarks.step_time import gloo as step_time
from tests.common.models import make_batch, make_llama, param_nbytes

REFERENCE = "ddp"
TOLERANCE = 1e-5
STEPS = 6
REPEATS = 3
Trainer = tuple[nn.Module, torch.optim.Optimizer]
Results = dict[str, Any]  # by peer


def build(peer: str, model_name: str) -> Trainer:
    """Return a peer's model and optimizer."""
    model = peers.build(peer, make_llama(model_name))
    return model, peers.make_optimizer(peer, model)


def train(trainer: Trainer, model_name: str, rank: int, number: int) -> float:
    """Take the step of a number, which has data of its own, and return the loss."""
    model, optimizer = trainer
    loss = model(*make_batch(model_name, rank + dist.get_world_size() * number))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()  # type: ignore[no-any-return]


def written_nbytes() -> int:
    """Return the bytes of this process's `write` calls so far, to sockets as well."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["wchar"])


def measure_exact(rank: int, model_name: str, peer: str) -> dict[str, Any]:
    """Return losses of the first steps, bytes that are sent in one, and levels of memory."""
    levels = memory.measure(rank, model_name, peer, 2)
    trainer = build(peer, model_name)
    losses = [train(trainer, model_name, rank, number) for number in range(STEPS)]
    dist.barrier()
    before = written_nbytes()
    train(trainer, model_name, rank, STEPS)
    sent = written_nbytes() - before
    peak = max(nbytes for stage, nbytes in levels.items() if stage.startswith("peak"))
    return {"losses": losses, "sent": sent, "peak": peak, "at rest": levels["at rest"]}


# Checkpoints


class _TorchFile:
    """`torch.save` of both state dicts by rank 0; sharded optimizer states are gathered there."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self._model, self._optimizer = trainer
        self._path = folder / "checkpoint.pt"

    def save(self) -> None:
        if hasattr(self._optimizer, "consolidate_state_dict"):
            self._optimizer.consolidate_state_dict(0)
        if dist.get_rank() == 0:
            states = self._model.state_dict(), self._optimizer.state_dict()
            torch.save(states, self._path)
        dist.barrier()

    def load(self) -> None:
        model, optimizer = torch.load(self._path)
        self._model.load_state_dict(model)
        self._optimizer.load_state_dict(optimizer)


class _Distributed:
    """`torch.distributed.checkpoint`, each rank its own shards."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self._trainer, self._folder = trainer, folder

    def _states(self) -> dict[str, Any]:
        model, optimizer = torch_state_dict.get_state_dict(*self._trainer)
        return {"model": model, "optimizer": optimizer}

    def save(self) -> None:
        dcp.save(self._states(), checkpoint_id=self._folder / "dcp")

    def load(self) -> None:
        states = self._states()
        dcp.load(states, checkpoint_id=self._folder / "dcp")
        torch_state_dict.set_state_dict(
            *self._trainer,
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
        )


class _DeepSpeed:
    """The engine's own directory: each rank its part of the optimizer."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self._engine: Any = trainer[0]
        self._folder = str(folder)

    def save(self) -> None:
        self._engine.save_checkpoint(self._folder)

    def load(self) -> None:
        self._engine.load_checkpoint(self._folder)


class _Ours:
    """`save_checkpoint`: each rank its own shards, with checksums."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self._model, self._optimizer = trainer
        self._folder = folder

    def save(self) -> None:
        composable_shard.save_checkpoint(
            self._folder, self._model, self._optimizer, step=1, keep_last=1
        )

    def load(self) -> None:
        composable_shard.load_checkpoint(self._folder, self._model, self._optimizer)


def find_checkpoint(peer: str) -> Callable[[Trainer, Path], Any]:
    """Return what saves and loads a peer's model and optimizer."""
    if peer.startswith("ours"):
        return _Ours
    if peer.startswith("deepspeed"):
        return _DeepSpeed
    return _Distributed if "fsdp" in peer else _TorchFile


def slower_seconds(function: Callable[[], object]) -> float:
    """Return the wall time of a call, of the slower rank."""
    gc.collect()
    dist.barrier()
    start = time.perf_counter()
    function()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def measure_files(rank: int, model_name: str, peer: str, folder: str) -> dict[str, Any]:
    """Return median seconds of the set-up, of saving and of loading, and whether a load is right.

    What a library can't do here is in the place of its seconds as a text.
    """
    train(build(peer, "micro"), "micro", rank, 0)  # imports
    set_ups, trainer = [], None
    for _ in range(REPEATS):
        del trainer
        plain = make_llama(model_name)
        made: list[Any] = []

        def wrap(plain: nn.Module = plain, made: list[Any] = made) -> None:
            made.append(peers.build(peer, plain))
            made.append(peers.make_optimizer(peer, made[0]))

        set_ups.append(slower_seconds(wrap))
        trainer = made[0], made[1]
        del plain, made
    figures: dict[str, Any] = {"set-up": statistics.median(set_ups)}
    assert trainer is not None
    train(trainer, model_name, rank, 0)
    checkpoint = find_checkpoint(peer)(trainer, Path(folder))
    try:
        figures["save"] = _median_seconds(checkpoint.save)
        losses = [train(trainer, model_name, rank, number) for number in (1, 2)]
        figures["load"] = _median_seconds(checkpoint.load)
        again = [train(trainer, model_name, rank, number) for number in (1, 2)]
        figures["again"] = max(map(_deviation, again, losses))
    except Exception as error:  # whatever another library raises
        figures["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]:.120}"
    return figures


def _median_seconds(function: Callable[[], None]) -> float:
    return statistics.median(slower_seconds(function) for _ in range(REPEATS))


def _deviation(loss: float, expected: float) -> float:
    return abs(loss / expected - 1)


# Reports


def run_each(function: Callable[..., Any], names: list[str], args: Any, *rest: Any) -> Results:
    """Return each peer's figures from processes of its own, or the text of its failure."""
    results: Results = {}
    for name in names:
        try:
            results[name] = run_ranks(
                args.world_size, function, args.model, name, *rest, deadline=600.0
            )
        except RuntimeError as error:
            results[name] = {"failed": str(error)}
        print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
    return results


def exact_rows(results: Results, size: int) -> list[list[str]]:
    """Return one row for each peer."""
    rows = []
    expected = results[REFERENCE]["losses"]
    for name, found in results.items():
        if "failed" in found:
            rows.append([name, found["failed"], "", "", ""])
            continue
        deviation = max(map(_deviation, found["losses"], expected))
        levels = [f"{found[level] / size:.2f}" for level in ("peak", "at rest")]
        rows.append([name, f"{deviation:.1e}", *levels, f"{found['sent'] / size:.3f}"])
    return rows


def agreeing(rows: list[list[str]]) -> list[str]:
    """Return the peers whose losses are DDP's."""
    exact = [row for row in rows if row[2]]  # an error has no figures beside it
    return [row[0] for row in exact if float(row[1]) <= TOLERANCE]


def file_rows(results: Results) -> list[list[str]]:
    """Return one row for each peer."""
    rows = []
    for name, found in results.items():
        texts = [f"{found[key]:.2f}" if key in found else "-" for key in ("set-up", "save", "load")]
        last = f"{found['again']:.1e}" if "again" in found else found.get("error", "failed")
        rows.append([name, *texts, last])
    return rows


def step_rows(args: Any, names: list[str]) -> list[list[str]]:
    """Return one row for each peer; DDP is timed with each batch of others, and shown once."""
    others = [name for name in names if name != REFERENCE]
    found: dict[str, list[str]] = {}
    for start in range(0, len(others), args.at_once):
        batch = [REFERENCE, *others[start : start + args.at_once]]
        result = run_ranks(
            args.world_size, step_time.measure, args.model, batch, args.rounds, 2, deadline=600.0
        )
        for row in step_time.rows(result, [REFERENCE]):
            found.setdefault(row[0], row)
    return [found[name] for name in names]


def main() -> None:
    """Parse the options, measure, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", default="tiny", help="out of std, tiny, micro")
    parser.add_argument("--parts", default="exact,files,steps", help="what to measure")
    parser.add_argument(
        "--peers",
        default="ddp,zero1,fsdp1,fsdp2,deepspeed_1,deepspeed_2,deepspeed_3,fairscale_oss,"
        "fairscale_sddp,simple_fsdp,ours,ours_gradop,ours_optim,ours_noshard",
        help="comma-separated; ddp among them",
    )
    parser.add_argument("--world-size", type=int, default=2, help="gloo ranks")
    parser.add_argument("--rounds", type=int, default=8, help="interleaved rounds of steps")
    parser.add_argument("--at-once", type=int, default=6, help="peers beside ddp in memory")
    args = parser.parse_args()
    names, parts = peers.parse_peers(args.peers), args.parts.split(",")
    size = param_nbytes(make_llama(args.model))
    markdown = report.header(
        f"Libraries on the CPU: {args.model}",
        f"fp32, {args.world_size} gloo ranks of one thread, fused AdamW; P = {size / 1e6:.1f} MB",
    )
    if "exact" in parts:
        with malloc_counter.preloaded():
            exact = run_each(measure_exact, names, args)
        columns = ["peer", "deviation of losses", "peak P", "at rest P", "sent P"]
        markdown += "\n" + report.table(columns, rows := exact_rows(exact, size))
        names = agreeing(rows)
    if "files" in parts:
        files: Results = {}
        for name in names:
            with TemporaryDirectory(dir="/dev/shm") as folder:
                files |= run_each(measure_files, [name], args, folder)
        columns = ["peer", "set-up s", "save s", "load s", "deviation after the load"]
        markdown += "\n" + report.table(columns, file_rows(files))
    if "steps" in parts:
        columns = ["peer", "step ms", "time / ddp", "CPU / ddp", "last loss"]
        markdown += "\n" + report.table(columns, step_rows(args, names))
    report.emit(markdown, args.output)


if __name__ == "__main__":
    main()
