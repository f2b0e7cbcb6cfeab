"""What a training job needs beside training: options, ranks that stop together, a journal.

Nothing here knows of sharding.
"""

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
import torch.distributed.run
from journal import EXIT_FAILED, Journal
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

EXIT_STOPPED = 130


def parse_args(options: list[str], description: str = "") -> argparse.Namespace:
    """Read the options; `args.reduced` names those that make the run smaller than by default."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=int, default=1, help="start this number of ranks, as torchrun would")
    add("--layers", type=int, default=6, help="number of blocks; each is one unit of sharding")
    add("--dim", type=int, default=384, help="width of the model, a multiple of 64 (the heads)")
    add("--length", type=int, default=128, help="bytes per training sequence")
    add("--batch", type=int, default=8, help="sequences per step, at least ranks x microbatches")
    add("--microbatches", type=int, default=2, help="forwards and backwards of a rank in one step")
    add("--steps", type=int, default=220, help="optimizer steps")
    add("--warmup", type=int, default=20, help="steps in which the learning rate rises")
    add("--learning-rate", type=float, default=6e-4, help="the peak; a cosine ends at its tenth")
    add("--weight-decay", type=float, default=0.1, help="for matrices; norms are never decayed")
    add("--max-norm", type=float, default=1.0, help="clip the norm of the whole gradient to this")
    add("--seed", type=int, default=0, help="for initial weights, batches and the sentence")
    add("--check-steps", type=int, default=20, help="losses that must equal one process; 0: none")
    add("--eval-every", type=int, default=50, help="steps between looks at the held-out tenth")
    add("--eval-part", type=int, default=6, help="a look reads one n-th of it, the last reads all")
    add("--loss-chunks", type=int, default=1, help="parts of a batch whose logits exist at once")
    add("--prompt", default="The ", help="how the sentence at the end begins")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if enough")
    add("--output", type=Path, default=Path("out"), help="directory for loss.csv and loss.png")
    add("--save-every", type=int, default=0, help="steps between checkpoints; 0: none")
    add("--keep", type=int, default=2, help="how many checkpoints to keep")
    add("--checkpoints", type=Path, help="directory for them; default: checkpoints in --output")
    add("--resume", action="store_true", help="go on from the last checkpoint, if there is one")
    add(
        "--no-sync",
        action="store_true",
        help="reduce gradients once per step, not once per microbatch: less communication, but "
        "until the last microbatch every rank holds the gradients of the whole model",
    )
    add(
        "--keep-unsharded",
        action="store_true",
        help="keep a block's full parameters from forward to backward: one all-gather less per "
        "microbatch, but the whole model is unsharded at the end of each forward",
    )
    args = parser.parse_args(options)
    for name in (
        "layers",
        "length",
        "batch",
        "microbatches",
        "steps",
        "eval_every",
        "eval_part",
        "loss_chunks",
    ):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} has to be at least 1")
    if args.dim < 64 or args.dim % 64:
        parser.error(f"--dim has to be a multiple of 64, got {args.dim}")
    if args.save_every < 0 or args.keep < 1:
        parser.error("--save-every has to be at least 0, --keep at least 1")
    args.checkpoints = args.checkpoints or args.output / "checkpoints"
    if not args.prompt:
        parser.error("--prompt has to have at least one character")
    args.check_steps = min(args.check_steps, args.steps)
    args.reduced = [
        f"--{name} {getattr(args, name)}"
        for name in ("layers", "dim", "length", "batch", "steps")
        if getattr(args, name) < parser.get_default(name)
    ]
    return args


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Rise linearly to the peak, then follow half a cosine down to its tenth."""
    if step < args.warmup:
        return args.learning_rate * (step + 1) / args.warmup
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


class Stopped(Exception):
    """Somebody asked a rank to stop, and all ranks have agreed to."""


@dataclass
class World:
    """The ranks that train together, and what they agree on."""

    rank: int
    size: int
    device: torch.device
    stop_requested: bool = False

    def sum(self, *values: float) -> list[float]:
        """Add up each value over the ranks.

        A wish to stop travels along, so that all ranks leave at the same place: one that left
        alone would let the others wait in their next collective.
        """
        total = torch.tensor([self.stop_requested, *values], dtype=torch.double)
        total = total.to(self.device)
        dist.all_reduce(total)
        stopping, *sums = total.tolist()
        if stopping:
            raise Stopped
        return sums

    def say(self, text: str) -> None:
        """Print on rank 0 only."""
        if self.rank == 0:
            print(text, flush=True)


@contextmanager
def join_world(device: str) -> Iterator[World]:
    """Join the process group that torchrun prepared, or make one of this process alone."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    enough_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    on_gpu = device == "cuda" or (device == "auto" and enough_gpus)
    world = World(rank, size, torch.device("cuda", local_rank) if on_gpu else torch.device("cpu"))
    if on_gpu:
        torch.cuda.set_device(world.device)

    def request_stop(signum: int, frame: FrameType | None) -> None:
        world.stop_requested = True

    signals = (signal.SIGINT, signal.SIGTERM)  # torchrun passes both on to its ranks
    previous = [signal.signal(signum, request_stop) for signum in signals]
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=None if "RANK" in os.environ else dist.HashStore(),
        rank=rank,
        world_size=size,
        timeout=timedelta(minutes=5),  # a rank that waits for a lost one gives up
    )
    try:
        yield world
    finally:
        dist.destroy_process_group()
        for signum, handler in zip(signals, previous, strict=True):
            signal.signal(signum, handler)


def launch(script: str, ranks: int, options: list[str]) -> int:
    """Run a script through torchrun; a stopped or failed run ends without torchrun's traceback."""
    arguments = ["--standalone", "--nproc-per-node", str(ranks), script, *options]
    try:
        torch.distributed.run.main(arguments)
    except SignalException:
        return EXIT_STOPPED
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else EXIT_FAILED
    return 0


def run(train: Callable[[World, Journal, argparse.Namespace], int], script: str, text: str) -> int:
    """Run the job and return its exit code: 0, 1 for a missed limit, 130 when stopped."""
    options = sys.argv[1:]
    args = parse_args(options, text.partition("\n")[0])
    if args.ranks > 1 and "RANK" not in os.environ:
        return launch(script, args.ranks, options)
    start = time.perf_counter()
    with join_world(args.device) as world:
        multiple = world.size * args.microbatches
        args.batch = multiple * math.ceil(args.batch / multiple)
        journal = Journal(world, args)
        try:
            code = train(world, journal, args)
            world.say(f"finished in {time.perf_counter() - start:.0f} s")
        except Stopped:
            world.say(f"\nstopped by a signal: {journal.csv_path} has {len(journal.rows)} steps")
            code = EXIT_STOPPED
    return code
