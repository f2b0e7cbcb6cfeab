"""What a run writes down: its losses on the terminal and on disk, and what it leaves behind."""

import argparse
import csv
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

GOAL = 0.8  # the held-out loss has to be at most this part of the unigram entropy
LOSS_LIMIT = 1e-4  # largest allowed difference between sharded and single-process losses
EXIT_FAILED = 1


class World(Protocol):
    """The ranks, as `job` has them."""

    rank: int
    size: int
    device: torch.device

    def say(self, text: str) -> None:
        """Print on rank 0 only."""


def fixed_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that a run keeps when it goes on; `batch` may depend on the ranks."""
    names = ("layers", "dim", "length", "batch", "steps", "warmup", "check_steps", "learning_rate")
    return {name: getattr(args, name) for name in (*names, "weight_decay", "max_norm", "seed")}


def megabytes(nbytes: float) -> str:
    """Write a number of bytes for people."""
    return f"{nbytes / 1e6:.1f} MB"


def held_nbytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of these tensors that this rank really holds."""
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    return sum(t.numel() * t.element_size() for t in local)


def training_nbytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Count this rank's bytes of parameters and optimizer state."""
    state = (t for per_param in optimizer.state.values() for t in per_param.values())
    return held_nbytes(model.parameters()) + held_nbytes(state)


class Row(NamedTuple):
    """A line of loss.csv."""

    step: int
    loss: float
    held_out_loss: float | None
    single_process_loss: float | None


@dataclass
class Reference:
    """What one process measured with the whole model and the whole global batches."""

    losses: list[float] = field(default_factory=list)
    nbytes: int = 0  # parameters and optimizer state; known on rank 0


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

    def state(self, reference: Reference) -> dict[str, Any]:
        """Return what a checkpoint has to keep of it, and of what one process measured."""
        return {
            "options": fixed_options(self.args),
            "rows": [tuple(row) for row in self.rows],
            "training_seconds": self.training_seconds,
            "reference": (reference.losses, reference.nbytes),
        }

    def restore(self, state: dict[str, Any]) -> Reference:
        """Begin with the rows of the run that goes on; return what one process had measured."""
        options, saved = fixed_options(self.args), state["options"]
        if options != saved:
            changed = {n: (saved[n], options[n]) for n in options if options[n] != saved[n]}
            raise ValueError(f"a run that goes on keeps its options; saved and given: {changed}")
        self.rows = [Row(*row) for row in state["rows"]]
        self.training_seconds = state["training_seconds"]
        for row in self.rows:
            if self.world.rank == 0:
                self.write_csv_row(row)
        return Reference(*state["reference"])

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


def introduce(journal: Journal, num_bytes: int, entropy: float, num_held_out: int) -> None:
    """Say what is read, by which ranks, and in which batches."""
    world, args = journal.world, journal.args
    world.say(
        f"text: {num_bytes:,} bytes, unigram entropy {entropy:.4f} nats per byte; "
        f"{num_held_out:,} bytes held out\n"
        f"ranks: {world.size} on {world.device.type}; one step: {args.batch} sequences of "
        f"{args.length} bytes, {args.microbatches} microbatches per rank"
    )


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
