"""Train a 10-million-parameter language model, sharded over all ranks.

    torchrun --standalone --nproc-per-node 2 tutorials/train_language_model.py
    python tutorials/train_language_model.py --ranks 2     # the same, and quiet about Ctrl-C
    python tutorials/train_language_model.py               # one rank

The text is the language reference that comes with every CPython (`pydoc_data.topics`), read byte
by byte; nothing is downloaded. Two CPU cores need about three minutes. With one GPU per rank the
GPUs and NCCL are used instead of the CPU and gloo. With `--save-every 50` a run that was stopped,
or killed, goes on with `--resume`, on any number of ranks.

What sharding needs is in `shard`, `train_step`, `write_sentence`, `save` and `resume`; the rest is
an ordinary training script. Before it trains, rank 0 takes the first steps alone with an unsharded
copy of the model and the whole global batch, and the sharded losses have to agree with those.
"""

import argparse
import csv
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from pydoc_data.topics import topics
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.run
import torch.nn.functional as F
from language_model import ModelConfig, Transformer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from composable_shard import (
    clip_grad_norm_,
    find_checkpoint,
    fully_shard,
    get_handles,
    load_checkpoint,
    no_sync,
    save_checkpoint,
    unshard_params,
)

GOAL = 0.8  # the held-out loss has to be at most this part of the unigram entropy
LOSS_LIMIT = 1e-4  # largest allowed difference between sharded and single-process losses
PADDING = -1  # a target that does not count
EXIT_FAILED, EXIT_STOPPED = 1, 130


def parse_args(options: list[str]) -> argparse.Namespace:
    """Read the options; `args.reduced` names those that make the run smaller than by default."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=int, default=1, help="start so many ranks, as torchrun would")
    add("--layers", type=int, default=6, help="number of blocks; each is one unit of sharding")
    add("--dim", type=int, default=384, help="width of the model, a multiple of 64 (the heads)")
    add("--length", type=int, default=128, help="bytes per training sequence")
    add("--batch", type=int, default=8, help="sequences per step, at least ranks x microbatches")
    add("--microbatches", type=int, default=2, help="pieces in which a rank works off its share")
    add("--steps", type=int, default=220, help="optimizer steps")
    add("--warmup", type=int, default=20, help="steps in which the learning rate rises")
    add("--learning-rate", type=float, default=6e-4, help="the peak; a cosine ends at its tenth")
    add("--weight-decay", type=float, default=0.1, help="for matrices; norms are never decayed")
    add("--max-norm", type=float, default=1.0, help="clip the norm of the whole gradient to this")
    add("--seed", type=int, default=0, help="for initial weights, batches and the sentence")
    add("--check-steps", type=int, default=20, help="losses that must equal one process; 0: none")
    add("--eval-every", type=int, default=50, help="steps between looks at the held-out tenth")
    add("--eval-part", type=int, default=6, help="a look reads one n-th of it, the last reads all")
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
    for name in ("layers", "length", "batch", "microbatches", "steps", "eval_every", "eval_part"):
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


# Data


def read_text(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the bytes to train on and the last tenth, which is held out."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    tokens = torch.tensor(list(text), device=device)
    start = len(tokens) * 9 // 10
    return tokens[:start], tokens[start:]


def unigram_entropy(tokens: Tensor) -> float:
    """Return the nats per byte that knowing nothing but the frequencies of the bytes costs."""
    frequency = torch.bincount(tokens).double() / len(tokens)
    return torch.special.entr(frequency).sum().item()


def global_batch(tokens: Tensor, step: int, args: argparse.Namespace) -> Tensor:
    """Draw the sequences of one step, (batch, length + 1): the same on every rank."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    starts = torch.randint(len(tokens) - args.length, (args.batch, 1), generator=generator)
    return tokens[(starts + torch.arange(args.length + 1)).to(tokens.device)]


def held_out_sequences(tokens: Tensor, length: int) -> Tensor:
    """Cut the text into sequences, (n, length + 1), so that every byte but one is a target."""
    missing = -(len(tokens) - 1) % length
    return F.pad(tokens, (0, missing), value=PADDING).unfold(0, length + 1, length)


# Model


def make_model(args: argparse.Namespace, device: torch.device) -> Transformer:
    """Build the model: on every rank and device with the same initial weights."""
    torch.manual_seed(args.seed)
    config = ModelConfig(layers=args.layers, dim=args.dim, max_length=args.length)
    return Transformer(config).to(device)


def shard(model: Transformer, world: World, *, keep_unsharded: bool) -> Transformer:
    """Shard every block, then what is left: embedding, last norm and head."""
    mesh = init_device_mesh(world.device.type, (world.size,))
    for block in model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=not keep_unsharded)
    return fully_shard(model, mesh=mesh)


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.AdamW:
    """Make AdamW: nothing in here depends on whether the parameters are sharded."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95))


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Rise linearly to the peak, then follow half a cosine down to its tenth."""
    if step < args.warmup:
        return args.learning_rate * (step + 1) / args.warmup
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def held_nbytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of these tensors that this rank really holds."""
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    return sum(t.numel() * t.element_size() for t in local)


def training_nbytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Count this rank's bytes of parameters and optimizer state."""
    state = (t for per_param in optimizer.state.values() for t in per_param.values())
    return held_nbytes(model.parameters()) + held_nbytes(state)


# Training


def sequence_loss(model: nn.Module, sequences: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross entropy of predicting each byte, (b, T + 1), from those before it."""
    inputs, targets = sequences[:, :-1].clamp(min=0), sequences[:, 1:]
    logits = model(inputs).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=PADDING, reduction=reduction)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: Sequence[Tensor],
    step: int,
    args: argparse.Namespace,
    clip: Callable[[Iterable[Tensor], float], Tensor] = clip_grad_norm_,
) -> float:
    """Accumulate the gradient of all microbatches, update, and return their mean loss."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, args)
    optimizer.zero_grad()
    total = 0.0
    for number, sequences in enumerate(microbatches, start=1):
        more_follow = number < len(microbatches)
        with no_sync(model) if args.no_sync and more_follow else nullcontext():
            loss = sequence_loss(model, sequences) / len(microbatches)
            loss.backward()
        total += loss.item()
    clip(model.parameters(), args.max_norm)
    optimizer.step()
    return total


@dataclass
class Reference:
    """What one process measured with the whole model and the whole global batches."""

    losses: list[float] = field(default_factory=list)
    nbytes: int = 0  # parameters and optimizer state; known on rank 0


def train_reference(tokens: Tensor, world: World, args: argparse.Namespace) -> Reference:
    """Take the first steps on rank 0 alone, unsharded, and let all ranks know the losses."""
    reference = Reference()
    model = make_model(args, world.device)
    optimizer = make_optimizer(model, args)
    for step in range(args.check_steps):
        loss = 0.0
        if world.rank == 0:
            batch = global_batch(tokens, step, args)
            loss = train_step(model, optimizer, [batch], step, args, nn.utils.clip_grad_norm_)
            reference.nbytes = training_nbytes(model, optimizer)
        reference.losses += world.sum(loss)  # each step, so that no rank waits for long
    return reference


@torch.no_grad()
def evaluate(model: nn.Module, sequences: Tensor, world: World) -> float:
    """Return the mean loss over the sequences, which the ranks share among themselves."""
    # A forward is a collective, so every rank has to make as many: pad with empty sequences.
    missing = -len(sequences) % world.size
    share = F.pad(sequences, (0, 0, 0, missing), value=PADDING)[world.rank :: world.size]
    loss = sum(sequence_loss(model, part, "sum").item() for part in share.split(16))
    loss, count = world.sum(loss, (share[:, 1:] != PADDING).sum().item())
    return loss / count


@torch.no_grad()
def write_sentence(model: Transformer, world: World, args: argparse.Namespace) -> str:
    """Continue the prompt up to a full stop or for 160 bytes; only rank 0 writes.

    `unshard_params` is a collective; in its block rank 0 has the full parameters, so that its
    forwards need no other rank.
    """
    written = args.prompt.encode()
    generator = torch.Generator().manual_seed(args.seed)
    with unshard_params(model, writeback=False, rank0_only=True):
        while world.rank == 0 and len(written) < 160 and not written.endswith((b". ", b".\n")):
            context = torch.tensor([list(written[-args.length :])], device=world.device)
            logits = model(context)[0, -1].cpu()
            probability = torch.softmax(logits / 0.6, dim=0)  # 0.6: rather the likely bytes
            written += bytes([int(torch.multinomial(probability, 1, generator=generator))])
    text = written.decode(errors="replace")
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


# Checkpoints


def fixed_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that a run keeps when it goes on; `batch` may depend on the ranks."""
    names = ("layers", "dim", "length", "batch", "steps", "warmup", "check_steps", "learning_rate")
    return {name: getattr(args, name) for name in (*names, "weight_decay", "max_norm", "seed")}


def save(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    journal: "Journal",
    reference: Reference,
    step: int,
) -> None:
    """Save after so many steps; the step is the data position too, see `global_batch`."""
    start = time.perf_counter()
    extra = {
        "options": fixed_options(journal.args),
        "rows": [tuple(row) for row in journal.rows],
        "training_seconds": journal.training_seconds,
        "reference": (reference.losses, reference.nbytes),
    }
    args = journal.args
    folder = save_checkpoint(
        args.checkpoints, model, optimizer, step=step, extra=extra, keep_last=args.keep
    )
    journal.note(f"saved {folder} in {time.perf_counter() - start:.1f} s")


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, journal: "Journal") -> Reference:
    """Load the last checkpoint and the rows before it; return what one process had measured."""
    args = journal.args
    loaded = load_checkpoint(args.checkpoints, model, optimizer)
    options, saved = fixed_options(args), loaded.extra["options"]
    if options != saved:
        changed = {n: (saved[n], options[n]) for n in options if options[n] != saved[n]}
        raise ValueError(f"a run that goes on keeps its options; saved and given: {changed}")
    journal.restore(loaded.extra["rows"], loaded.extra["training_seconds"])
    journal.note(f"goes on after step {loaded.step} from {loaded.path}")
    return Reference(*loaded.extra["reference"])


# Reporting


def megabytes(nbytes: float) -> str:
    """Write a number of bytes for people."""
    return f"{nbytes / 1e6:.1f} MB"


class Row(NamedTuple):
    """A line of loss.csv."""

    step: int
    loss: float
    held_out_loss: float | None
    single_process_loss: float | None


class Journal:
    """Rank 0's progress line; loss.csv, complete after every step; loss.png at the end."""

    def __init__(self, world: World, args: argparse.Namespace) -> None:
        self.world, self.args = world, args
        self.rows: list[Row] = []
        self.training_seconds = 0.0
        self.csv_path = args.output / "loss.csv"
        if world.rank == 0:
            args.output.mkdir(parents=True, exist_ok=True)
            self.write_csv_row(Row._fields, mode="w")

    def write_csv_row(self, row: Sequence[object], mode: str = "a") -> None:
        """Write one line of loss.csv, so that whatever ends the run leaves the file complete."""
        with open(self.csv_path, mode, newline="") as file:
            csv.writer(file).writerow(row)

    def restore(self, rows: Iterable[Sequence[Any]], training_seconds: float) -> None:
        """Begin with the rows of the run that goes on."""
        self.rows = [Row(*row) for row in rows]
        self.training_seconds = training_seconds
        for row in self.rows:
            if self.world.rank == 0:
                self.write_csv_row(row)

    def note(self, text: str) -> None:
        """Print a line that stays, on rank 0."""
        self.world.say(f"\r\033[K{text}" if sys.stdout.isatty() else text)

    def record(self, row: Row, nbytes: int) -> None:
        """Note what a step brought, and show where the run stands."""
        self.rows.append(row)
        if self.world.rank == 0:
            self.write_csv_row(row)
            self.show(row, nbytes)

    def show(self, row: Row, nbytes: int) -> None:
        """Print a line for this step; on a terminal the next one takes its place."""
        step, loss, held_out, _ = row
        speed = step * self.args.batch * self.args.length / self.training_seconds
        line = f"step {step:3}/{self.args.steps}  loss {loss:.4f}  {speed:6,.0f} tokens/s  "
        line += f"{megabytes(nbytes)} per rank"
        if held_out is not None:
            line += f"  held-out {held_out:.4f}"
        stays = held_out is not None or step in (1, self.args.check_steps, self.args.steps)
        if sys.stdout.isatty():
            print(f"\r\033[K{line}", end="\n" if stays else "", flush=True)
        elif stays or step % 10 == 0:
            print(line, flush=True)

    def plot(self, entropy: float) -> Path | None:
        """Draw loss.png, or return None when matplotlib is missing."""
        try:
            from matplotlib.figure import Figure  # noqa: PLC0415 -- an optional extra
        except ImportError:
            return None
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel="nats per byte")
        steps, losses, held_out, single = zip(*self.rows, strict=True)
        looks = [(step, loss) for step, loss in zip(steps, held_out, strict=True) if loss]
        axes.plot(steps, losses, linewidth=1, label=f"training, {self.world.size} rank(s)")
        axes.plot(*zip(*looks, strict=True), "o-", label="held-out tenth")
        checked = slice(self.args.check_steps)
        axes.plot(steps[checked], single[checked], "k:", label="one process, unsharded")
        axes.axhline(entropy, color="gray", label="unigram entropy")
        axes.axhline(GOAL * entropy, color="gray", linestyle="--", label="goal")
        axes.set_ylim(bottom=0)
        axes.legend()
        figure.savefig(self.args.output / "loss.png", dpi=120)
        return self.args.output / "loss.png"


def report(journal: Journal, sentence: str, entropy: float, whole: int, held: int) -> None:
    """Print what the run leaves behind."""
    world = journal.world
    single = f"one process {megabytes(whole)}" if whole else "one process was not measured"
    world.say(
        f"the model writes: {sentence}\n"
        f"parameters + optimizer state: {single}, each of {world.size} rank(s) {megabytes(held)}"
    )
    if world.rank == 0:
        drawn = journal.plot(entropy) or "no loss.png: matplotlib is not installed"
        print(f"written: {journal.csv_path}, {drawn}", flush=True)


def losses_agree(journal: Journal, reference: Reference) -> bool:
    """Compare the first losses with those of one process, and print the result."""
    losses = torch.tensor([row.loss for row in journal.rows], dtype=torch.double)
    single = torch.tensor(reference.losses, dtype=torch.double)
    difference = (losses - single).abs().max().item()
    agree = difference <= LOSS_LIMIT
    journal.world.say(
        f"first {len(losses)} losses: largest difference to one process {difference:.1e} "
        f"(limit {LOSS_LIMIT:.0e}): {'passed' if agree else 'FAILED'}"
    )
    return agree


def goal_reached(held_out_loss: float, entropy: float, journal: Journal) -> bool:
    """Print how good the model became; a run that was made smaller is not judged."""
    ratio = held_out_loss / entropy
    reached = ratio <= GOAL
    verdict = "passed" if reached else "FAILED"
    if journal.args.reduced:
        verdict = f"not judged, since this run is small ({', '.join(journal.args.reduced)})"
    journal.world.say(
        f"held-out loss: {held_out_loss:.4f} nats per byte, {ratio:.3f} of the unigram entropy "
        f"{entropy:.4f} (limit {GOAL}): {verdict}"
    )
    return reached or bool(journal.args.reduced)


def train(world: World, journal: Journal, args: argparse.Namespace) -> int:
    """Check, train, evaluate and report; return the exit code."""
    training_text, held_out_text = read_text(world.device)
    held_out = held_out_sequences(held_out_text, args.length)
    entropy = unigram_entropy(training_text)
    world.say(
        f"text: {len(training_text):,} bytes, unigram entropy {entropy:.4f} nats per byte; "
        f"{len(held_out_text):,} bytes held out\n"
        f"ranks: {world.size} on {world.device.type}; one step: {args.batch} sequences of "
        f"{args.length} bytes, {args.microbatches} microbatches per rank"
    )
    is_resumed = args.resume and find_checkpoint(args.checkpoints) is not None
    if args.check_steps and not is_resumed:
        world.say(f"one process takes the first {args.check_steps} steps with the whole model ...")
    reference = Reference() if is_resumed else train_reference(training_text, world, args)

    model = shard(make_model(args, world.device), world, keep_unsharded=args.keep_unsharded)
    optimizer = make_optimizer(model, args)
    world.say(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, sharded in "
        f"{len(get_handles(model))} pieces; MB per rank: parameters + optimizer state"
    )
    if is_resumed:
        reference = resume(model, optimizer, journal)
    for step in range(len(journal.rows), args.steps):
        start = time.perf_counter()
        share = global_batch(training_text, step, args).chunk(world.size)[world.rank]
        loss = train_step(model, optimizer, share.chunk(args.microbatches), step, args)
        (loss,) = world.sum(loss / world.size)
        journal.training_seconds += time.perf_counter() - start
        held_out_loss = None
        if step + 1 == args.steps:
            held_out_loss = evaluate(model, held_out, world)
        elif (step + 1) % args.eval_every == 0:
            held_out_loss = evaluate(model, held_out[:: args.eval_part], world)
        single = reference.losses[step] if step < args.check_steps else None
        row = Row(step + 1, loss, held_out_loss, single)
        journal.record(row, training_nbytes(model, optimizer))
        if step + 1 == args.check_steps and not losses_agree(journal, reference):
            return EXIT_FAILED
        if args.save_every and (step + 1) % args.save_every == 0:
            save(model, optimizer, journal, reference, step + 1)

    sentence = write_sentence(model, world, args)
    world.sum()  # the last chance to agree on stopping
    report(journal, sentence, entropy, reference.nbytes, training_nbytes(model, optimizer))
    return 0 if goal_reached(journal.rows[-1].held_out_loss, entropy, journal) else EXIT_FAILED


def launch(ranks: int, options: list[str]) -> int:
    """Run this file through torchrun; a stopped or failed run ends without torchrun's traceback."""
    arguments = ["--standalone", "--nproc-per-node", str(ranks), __file__, *options]
    try:
        torch.distributed.run.main(arguments)
    except SignalException:
        return EXIT_STOPPED
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else EXIT_FAILED
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the job and return its exit code: 0, 1 for a missed limit, 130 when stopped."""
    options = sys.argv[1:] if argv is None else argv
    args = parse_args(options)
    if args.ranks > 1 and "RANK" not in os.environ:
        return launch(args.ranks, options)
    start = time.perf_counter()
    with join_world(args.device) as world:
        pieces = world.size * args.microbatches
        args.batch = pieces * math.ceil(args.batch / pieces)
        journal = Journal(world, args)
        try:
            code = train(world, journal, args)
            world.say(f"finished in {time.perf_counter() - start:.0f} s")
        except Stopped:
            world.say(f"\nstopped by a signal: {journal.csv_path} has {len(journal.rows)} steps")
            code = EXIT_STOPPED
    return code


if __name__ == "__main__":
    sys.exit(main())
