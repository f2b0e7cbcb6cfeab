"""How long do checkpoints take, next to FSDP2's, and what is held and read meanwhile?

A Llama-style model of 110 M parameters with AdamW's state, on gloo ranks with one thread. All ways
live in the same processes and take turns in rotating order, a barrier before each; a way's time is
the slower rank's, and ratios are taken inside each round, so that the machine's load cancels out.
Files go to a directory of `--folder`, by default in memory, so that a disk's moods stay out.

- dcp save: state dicts of model and optimizer, and `torch.distributed.checkpoint.save`
- dcp load: state dicts, `torch.distributed.checkpoint.load`, and setting them
- full: `get_model_state_dict` with `full_state_dict` and `cpu_offload`, to rank 0
- checkpoint: `save_checkpoint` and `load_checkpoint`, ours alone; model and optimizer, with
  checksums; their ratio is to FSDP2 with DCP. "At once" holds all that it reads until it is
  verified, as small checkpoints are loaded, where a load otherwise reads twice
- safetensors: `save_safetensors` and `load_safetensors`, ours alone; the model

Read and written: bytes of one rank's `read` and `write` calls (/proc/self/io), the highest; what is
mapped, as safetensors files are, does not count there. CPU: seconds of the slower rank's process,
the least of all rounds, which other programs on the machine disturb less than the time. Peak: bytes
held from malloc on rank 0 beyond those before the call, each way in processes of its own that have
done the same before (gcc).
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as torch_state_dict

import composable_shard
from benchmarks import malloc_counter, peers, report
from benchmarks.ranks import run_ranks
from tests.common.models import make_batch, make_llama, param_nbytes

Way = Callable[[], Any]
LIBRARIES: dict[str, Any] = {"fsdp2": torch_state_dict, "ours": composable_shard}
PAIRS = ("dcp save", "dcp load", "full")
OWN = (
    "checkpoint save",
    "checkpoint load",
    "safetensors save",
    "safetensors load",
)


class Trainer:
    """A model and its optimizer after one step, and the ways to save and to load them."""

    def __init__(self, peer: str, model_name: str, folder: Path) -> None:
        self.library = LIBRARIES[peer]
        self.folder = folder / peer
        self.model = peers.build(peer, make_llama(model_name))
        self.optimizer = peers.make_optimizer(peer, self.model)
        self.model(*make_batch(model_name, dist.get_rank())).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _states(self) -> dict[str, Any]:
        return {
            "model": self.library.get_model_state_dict(self.model),
            "optim": self.library.get_optimizer_state_dict(self.model, self.optimizer),
        }

    def dcp_save(self) -> None:
        dcp.save(self._states(), checkpoint_id=self.folder / "dcp")

    def dcp_load(self) -> None:
        states = self._states()
        dcp.load(states, checkpoint_id=self.folder / "dcp")
        self.library.set_model_state_dict(self.model, states["model"])
        self.library.set_optimizer_state_dict(self.model, self.optimizer, states["optim"])

    def full(self) -> Any:
        options = self.library.StateDictOptions(full_state_dict=True, cpu_offload=True)
        return self.library.get_model_state_dict(self.model, options=options)

    def checkpoint_save(self) -> None:
        composable_shard.save_checkpoint(
            self.folder / "own", self.model, self.optimizer, step=1, keep_last=1
        )

    def checkpoint_load(self) -> None:
        composable_shard.load_checkpoint(self.folder / "own", self.model, self.optimizer)

    def safetensors_save(self) -> None:
        composable_shard.save_safetensors(self.model, self.folder / "safetensors")

    def safetensors_load(self) -> None:
        composable_shard.load_safetensors(self.model, self.folder / "safetensors")

    def way(self, name: str) -> Way:
        """Return what does it."""
        function: Way = getattr(self, name.replace(" ", "_"))
        return function


def counts() -> torch.Tensor:
    """Return seconds, seconds of CPU, bytes read and bytes written of this process so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    io = {name: int(number) for name, number in (line.split(": ") for line in lines)}
    times = [time.perf_counter(), time.process_time()]
    return torch.tensor([*times, io["rchar"], io["wchar"]], dtype=torch.float64)


def run_once(way: Way) -> list[float]:
    """Return what `counts` has counted meanwhile, of the rank with the most of each."""
    gc.collect()
    dist.barrier()
    start = counts()
    result = way()
    used = counts() - start
    del result
    dist.all_reduce(used, dist.ReduceOp.MAX)
    return used.tolist()


def measure_times(rank: int, model_name: str, folder: str, rounds: int, only: str) -> Any:
    """Return the seconds of each way by round, the least CPU time, and bytes of the last round."""
    trainers = {peer: Trainer(peer, model_name, Path(folder)) for peer in LIBRARIES}
    ways = {(name, peer): trainers[peer].way(name) for name in PAIRS for peer in LIBRARIES}
    ways |= {(name, "ours"): trainers["ours"].way(name) for name in OWN}
    if only:  # saves come first, for what loads
        for name, peer in [key for key in ways if " save" in key[0]]:
            ways[name, peer]()
        ways = {key: way for key, way in ways.items() if only in key[0]}
    times: dict[str, list[float]] = {" / ".join(key): [] for key in ways}
    rest: dict[str, list[float]] = {}
    for number in range(-1, rounds):
        for name in (*PAIRS, *OWN):
            # Saves come before loads; the two peers' order changes.
            rivals = [key for key in ways if key[0] == name]
            for key in rivals if number % 2 else reversed(rivals):
                label = " / ".join(key)
                seconds, cpu, *nbytes = run_once(ways[key])
                if number >= 0:
                    times[label].append(seconds)
                    rest[label] = [min(cpu, rest.get(label, [cpu])[0]), *nbytes]
    return {"seconds": times, "rest": rest}


def measure_peak(rank: int, model_name: str, folder: str, peer: str, name: str) -> int:
    """Return the bytes that one way holds at its peak, beyond those held before it."""
    trainer = Trainer(peer, model_name, Path(folder))
    way = trainer.way(name)
    if " load" in name:
        trainer.way(name.split()[0] + " save")()
    way()
    gc.collect()
    dist.barrier()
    start = malloc_counter.held_nbytes()
    malloc_counter.restart_peak()
    way()
    return malloc_counter.peak_nbytes() - start


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, measure, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", default="110m", help="out of 110m, 50m, std, tiny, micro")
    parser.add_argument("--world-size", type=int, default=2, help="gloo ranks")
    parser.add_argument("--rounds", type=int, default=10, help="rounds after one to warm up")
    parser.add_argument("--only", default="", help="ways whose names contain this, and saves")
    parser.add_argument("--no-peaks", action="store_true", help="leave the last column out")
    parser.add_argument("--folder", default="/dev/shm", help="where files go")
    args = parser.parse_args(argv)
    size = param_nbytes(make_llama(args.model))
    run = partial(run_ranks, args.world_size, deadline=3600.0)
    with TemporaryDirectory(dir=args.folder) as folder:
        result = run(measure_times, args.model, folder, args.rounds, args.only)
        shutil.rmtree(folder)
        peaks: dict[str, int] = {}
        with malloc_counter.preloaded():
            for key in () if args.no_peaks else result["seconds"]:
                name, peer = key.split(" / ")
                peaks[key] = run(measure_peak, args.model, folder, peer, name)
                shutil.rmtree(folder, ignore_errors=True)
        Path(folder).mkdir(exist_ok=True)
    rows = []
    for key, seconds in result["seconds"].items():
        name, peer = key.split(" / ")
        rival = name.replace("checkpoint", "dcp")
        theirs = result["seconds"].get(f"{rival} / fsdp2")
        cpu, read, written = result["rest"][key]
        ratios = [a / b for a, b in zip(seconds, theirs, strict=True)] if theirs else None
        rows.append(
            [
                name,
                peer,
                report.spread([each * 1e3 for each in seconds], 0),
                report.spread(ratios) if ratios else "",
                f"{cpu * 1e3:.0f}",
                f"{read / 1e6:.1f}",
                f"{written / 1e6:.1f}",
                f"{peaks[key] / size:.2f}" if key in peaks else "",
            ]
        )
    markdown = report.header(
        f"Checkpoints: {args.model}",
        f"fp32, {args.world_size} gloo ranks, AdamW; P = {size / 1e6:.1f} MB, "
        f"{size // 4 / 1e6:.1f} M parameters; files in {args.folder}",
        f"{args.rounds} rounds, the slower rank, median (lower-upper quartile)",
    )
    columns = ["what", "peer", "ms", "ratio to fsdp2", "CPU ms", "read, MB", "written, MB"]
    columns += ["peak on rank 0 / P"]
    report.emit(markdown + "\n" + report.table(columns, rows), args.output)
