"""How long does a save in the background stop training, and how long are the steps meanwhile?

A Llama-style model with AdamW's state, on gloo ranks with one thread; `save_checkpoint` with
`async_op=True` beside FSDP2's state dicts and `dcp.async_save`. Both live in the same processes and
take turns, a barrier before each. *stops*: until the call has returned on the slower rank.
*step*: a forward, a backward and a step of the optimizer, the first one after the call, to the same
step without a save; writing takes the processor's time, of which gloo ranks have as many cores as
they use. *staging*: bytes of host memory that a rank keeps for the next save.

    python -m benchmarks.checkpoints background
    python -m benchmarks.checkpoints background --model big --peers ours   # little memory
    python -m benchmarks.checkpoints background --world-size 1             # a core for the writer
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks import report
from benchmarks.checkpoints.own import Trainer
from benchmarks.ranks import run_ranks, timed_together
from composable_shard import save_checkpoint
from composable_shard.comm import get_host_group
from tests.common.models import make_batch, make_llama, param_nbytes

PEERS = ("ours", "fsdp2")


class _Saver(Trainer):
    """Saves in the background, and trains on."""

    def __init__(self, peer: str, model_name: str, folder: Path) -> None:
        super().__init__(peer, model_name, folder)
        self.batch = make_batch(model_name, dist.get_rank())
        self.is_ours = peer == "ours"
        self.group = dist.new_group()  # DCP's thread communicates beside training
        self.running: Any = None

    def save(self) -> None:
        """Begin a save."""
        if self.is_ours:
            self.running = save_checkpoint(
                self.folder, self.model, self.optimizer, step=1, keep_last=1, async_op=True
            )
        else:
            self.running = dcp.async_save(
                self._states(), checkpoint_id=self.folder, process_group=self.group
            )

    def wait(self) -> None:
        """Wait for the save on all ranks."""
        self.running.wait() if self.is_ours else self.running.result()
        dist.barrier()

    def step(self) -> None:
        """Take a step."""
        self.model(*self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(
    rank: int, model_name: str, folder: str, peers: list[str], rounds: int
) -> dict[str, Any]:
    """Return the milliseconds of each peer's saves and steps, and the staging's bytes."""
    savers = {peer: _Saver(peer, model_name, Path(folder)) for peer in peers}
    times: dict[str, list[float]] = {f"{p} {what}": [] for p in peers for what in ("save", "step")}
    for number in range(-2, rounds):
        for peer in peers if number % 2 else reversed(peers):
            saver = savers[peer]
            gc.collect()
            alone = timed_together(saver.step)
            stopped = timed_together(saver.save)
            beside = timed_together(saver.step)
            saver.wait()
            if number >= 0:
                times[f"{peer} save"].append(stopped)
                times[f"{peer} step"].append(beside / alone)
    group = get_host_group()
    staging = group.swap_staging({})
    return {"times": times, "staging": sum(each.nbytes for each in staging.values())}


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, measure, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", default="110m", help="out of big, 110m, 50m, std, tiny, micro")
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated")
    parser.add_argument("--world-size", type=int, default=2, help="gloo ranks")
    parser.add_argument("--rounds", type=int, default=10, help="rounds after two to warm up")
    parser.add_argument("--folder", default="/dev/shm", help="where files go")
    args = parser.parse_args(argv)
    peers = args.peers.split(",")
    if not peers or set(peers) - set(PEERS):
        parser.error(f"--peers must be some of {', '.join(PEERS)}, got {args.peers!r}")
    size = param_nbytes(make_llama(args.model))
    with TemporaryDirectory(dir=args.folder) as folder:
        found = run_ranks(args.world_size, measure, args.model, folder, peers, args.rounds)
        shutil.rmtree(folder)
        Path(folder).mkdir()
    times = found["times"]
    both = [times.get(f"{peer} save", []) for peer in PEERS]
    ratios = [a / b for a, b in zip(*both, strict=False)]  # none if one is alone
    rows = [
        [
            "`save_checkpoint`" if peer == "ours" else "`dcp.async_save`",
            report.spread(times[f"{peer} save"], 1),
            report.spread(ratios) if ratios and peer == "ours" else "1" if ratios else "",
            report.spread(times[f"{peer} step"]),
            f"{found['staging'] / 1e6:.0f} MB" if peer == "ours" else "",
        ]
        for peer in peers
    ]
    markdown = report.header(
        f"Saves in the background: {args.model}",
        f"{args.world_size} gloo ranks, AdamW; {3 * size / 1e6:.0f} MB in a checkpoint",
        f"{args.rounds} rounds, median (lower-upper quartile); files in {args.folder}",
    )
    columns = ["way", "stops ms", "to DCP", "step beside it / alone", "staging of a rank"]
    report.emit(markdown + "\n" + report.table(columns, rows), args.output)
