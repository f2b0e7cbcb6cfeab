"""Interrupts of a step at any line of the package, on all ranks at the same one.

`KeyboardInterrupt` is raised in place of the n-th line that a step runs in `composable_shard`. The
handler asks for a state dict and saves a checkpoint; or it does neither, and the program goes on.
Then a step must give the gradients and values of a plain model. For all lines, or for minutes:

    python -m tests.interrupts
    python -m tests.interrupts --program no_sync --every 1 --first 4000
    python -m tests.interrupts --distinct
    python -m tests.interrupts --seconds 300 --seed 7
"""

from __future__ import annotations

import argparse
import copy
import importlib
import itertools
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import composable_shard
from composable_shard import (
    MixedPrecisionPolicy,
    ShardingStrategy,
    clip_grad_norm_,
    fully_shard,
    load_checkpoint,
    no_sync,
    register_comm_hook,
    reshard,
    save_checkpoint,
    unshard,
)
from composable_shard.comm import then_call_hook
from tests.harness.poison import poisoned
from tests.harness.ranks import RankError, run_ranks, shut_down_workers
from tests.programs.claims import assert_close, unsharded_gradients, unsharded_values
from tests.programs.models import average_gradients, rank_input, square_mean

PACKAGE = str(Path(composable_shard.__file__).parent)
DIM = 6
SAME_PLACE_S = 2.0


@dataclass(frozen=True)
class Program:
    """A step that is interrupted, and how its model is sharded."""

    options: dict[str, Any] = field(default_factory=dict)
    microbatches: int = 1
    checkpoints: bool = False
    changes_data: bool = False  # all parameters get other data before each step
    holds: bool = False  # full parameters stay unsharded from before a step until after it
    reads_kept: bool = False  # what blocks have kept is read and written after a step
    is_new: bool = False  # the step is the first one of the model
    has_hooks: bool = False  # on gradients of one block
    has_comm_hook: bool = False
    world_size: int = 2
    is_alike: bool = True  # all ranks run the same lines


PROGRAMS = {
    "plain": Program(),
    "four_ranks": Program(world_size=4),
    "small_group": Program({"reshard_after_forward": 2}, world_size=4),
    "no_sync": Program(microbatches=2),
    "keeps_params": Program({"strategy": ShardingStrategy.SHARD_GRAD_OP}),
    "shards_optim": Program({"strategy": ShardingStrategy.SHARD_OPTIM}, microbatches=2),
    "no_shard": Program({"strategy": ShardingStrategy.NO_SHARD}),
    "flat": Program({"use_orig_params": False}),
    "checkpoint": Program(checkpoints=True),
    "bf16": Program({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float32)}),
    "owned": Program({"granularity": "param"}, is_alike=False),
    "one_rank": Program(microbatches=2, world_size=1),
    "new_data": Program(changes_data=True),
    "kept": Program(reads_kept=True),
    "held": Program(holds=True, reads_kept=True),
    "held_optim": Program({"strategy": ShardingStrategy.SHARD_OPTIM}, holds=True, reads_kept=True),
    "first_step": Program({"strategy": ShardingStrategy.SHARD_GRAD_OP}, is_new=True),
    # Under saved-tensor hooks of the library. The number of a line drifts as models come and go.
    "first_forward": Program(is_new=True, is_alike=False),
    "buckets": Program({"bucket_cap_mb": 1e-4}),
    "hooks": Program(microbatches=2, has_hooks=True),
    "comm_hook": Program(world_size=4, has_comm_hook=True),
}


class _ProgramBlock(nn.Module):
    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM + 1), nn.Linear(DIM + 1, DIM)
        self.checkpoints = checkpoints
        self.kept: list[Tensor] = []

    def _compute(self, x: Tensor) -> Tensor:
        self.kept = self.kept or [self.first.weight, self.second.bias]
        return x + self.second(torch.tanh(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoints:
            return checkpoint(self._compute, x, use_reentrant=False)
        return self._compute(x)


class _Model(nn.Module):
    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))
        self.blocks = nn.ModuleList(_ProgramBlock(checkpoints=checkpoints) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x * self.scale)
        return x


#: Which line of a step is the moment, on each rank.
Moment = tuple[int, ...]


class Interrupter:
    """Raises at the n-th line event in the package; counts them all with n = 0."""

    def __init__(self, moment: int) -> None:
        self.moment, self.num_lines, self.place = moment, 0, ""
        self.moments: dict[str, list[int]] = {}  # when the lines of each place ran, if n = 0

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        return self._count if name.startswith(PACKAGE) else None

    def _count(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.num_lines += 1
            if self.moment in (0, self.num_lines):
                name = frame.f_code.co_filename.removeprefix(PACKAGE + "/")
                place = f"{name}:{frame.f_lineno} {frame.f_code.co_qualname}"
                self.moments.setdefault(place, []).append(self.num_lines)
            if self.num_lines == self.moment:
                self.place = place
                raise KeyboardInterrupt
        return self._count

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Be in force inside the block."""
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)


class _InterruptedRun:
    """A sharded model and a plain one, of which the sharded one's steps are interrupted."""

    def __init__(self, program: Program) -> None:
        torch.manual_seed(0)
        self.program = program
        self.dtype = torch.float32 if "mp_policy" in program.options else torch.float64
        self.plain = _Model(checkpoints=program.checkpoints).to(self.dtype)
        self.sharded, self.loaded = (copy.deepcopy(self.plain) for _ in range(2))
        for model in (self.sharded, self.loaded):
            for block in model.blocks:
                fully_shard(block, **program.options)
            fully_shard(model, **program.options)
        if program.has_comm_hook:
            register_comm_hook(self.sharded, then_call_hook, (Tensor.neg_, "all_reduce"))
        for param in self.sharded.blocks[1].parameters() if program.has_hooks else ():
            param.register_post_accumulate_grad_hook(_note_gradient)
        self.optimizers: dict[nn.Module, torch.optim.Optimizer] = {
            model: torch.optim.SGD(model.parameters(), lr=0.05)
            for model in (self.plain, self.sharded, self.loaded)
        }
        self.saves = program.options.get("use_orig_params", True)
        self.has_begun_to_step = False  # the sharded model's optimizer, so that values may differ
        self.optimizers[self.sharded].register_step_pre_hook(self._note_step)
        for number in range(3):
            self.step(number)

    def _note_step(self, *_: Any) -> None:
        self.has_begun_to_step = True

    def step(self, number: int) -> None:
        """Take a step of the sharded model."""
        self.has_begun_to_step = False
        self.optimizers[self.sharded].zero_grad()
        for param in self.sharded.parameters() if self.program.changes_data else ():
            param.data = param.data.clone()
        if self.program.holds:
            unshard(self.sharded, recurse=True)
        self.accumulate(self.sharded, number)
        clip_grad_norm_(self.optimizers[self.sharded].param_groups[0]["params"], 1e9)
        self.optimizers[self.sharded].step()
        if self.program.reads_kept:
            self._read_kept()
        if self.program.holds:
            reshard(self.sharded, recurse=True)

    def _read_kept(self) -> None:
        with torch.no_grad():
            for block in self.sharded.blocks:
                for kept in block.kept:
                    assert (kept * 2).isfinite().all()
                    if not self.program.holds:
                        kept.add_(0.0)

    def accumulate(self, model: nn.Module, number: int) -> None:
        """Run the forwards and backwards of a step."""
        for micro in range(self.program.microbatches):
            waits = model is not self.plain and micro < self.program.microbatches - 1
            with no_sync(model) if waits else nullcontext():
                batch = rank_input(3, DIM, step=10 * number + micro).to(self.dtype)
                square_mean(model(batch)).backward()

    def interrupt(self, when: Moment, path: Path) -> str:
        """Interrupt a step at a moment, and compare what comes after it; return the place."""
        if self.program.is_new:
            self.renew()
        moment, folder, before = when[0], None, self._shards(self.sharded)
        interrupter = Interrupter(when[dist.get_rank()])
        try:
            with interrupter.watching():
                self.step(moment)
        except KeyboardInterrupt:
            # Python leaves no `with` for an interrupt between its body and `__exit__`, torch's own
            # `no_grad` among them: the next backward would raise, in a plain model too.
            torch.set_grad_enabled(True)
            sys.stdout.write(f"at {interrupter.place}\n")
            sys.stdout.flush()
            if moment % 3 != 0:
                self._check_shards(before)
            if moment % 3 == 1 and self.saves and self.program.is_alike:
                optimizer = self.optimizers[self.sharded]
                folder = save_checkpoint(path, self.sharded, optimizer, step=1)
        if not are_all_at(interrupter.place):
            raise OutOfStepError(interrupter.place or "no line")
        if folder is not None:
            load_checkpoint(str(folder), self.loaded, self.optimizers[self.loaded])
            mine, theirs = self._shards(self.sharded), self._shards(self.loaded)
            assert mine.keys() == theirs.keys()
            for name, value in mine.items():
                assert torch.equal(value, theirs[name]), f"checkpoint: {name}"
        self._zero(moment)
        if moment % 3 == 2:
            with torch.no_grad():
                self.sharded(rank_input(3, DIM).to(self.dtype))
        self._compare(moment + 1, copies_before=moment % 2 == 1)
        return interrupter.place

    def renew(self) -> None:
        """Put a copy, which has had no forward, in the place of the sharded model."""
        del self.optimizers[self.sharded]
        self.sharded = copy.deepcopy(self.sharded)
        self.optimizers[self.sharded] = torch.optim.SGD(self.sharded.parameters(), lr=0.05)
        self.optimizers[self.sharded].register_step_pre_hook(self._note_step)

    def _shards(self, model: nn.Module) -> dict[str, Tensor]:
        if not self.saves:
            return {}
        return {name: value.to_local().clone() for name, value in model.state_dict().items()}

    def _check_shards(self, before: dict[str, Tensor]) -> None:
        """Check that a state dict in the handler has the values from before the step.

        Once the optimizer has begun, some may have been written, and some not.
        """
        now = self._shards(self.sharded)
        for name, value in before.items():
            assert now[name].isfinite().all(), name
            is_same = self.has_begun_to_step or torch.equal(now[name], value)
            assert is_same, f"state dict: {name}"

    def _zero(self, moment: int) -> None:
        optimizer = self.optimizers[self.sharded]
        match moment % 5:
            case 0 | 1 | 2:
                optimizer.zero_grad()
            case 3:
                self.sharded.zero_grad()
            case _:
                for group in optimizer.param_groups:
                    for param in group["params"]:
                        param.grad = None

    def _copy_values(self) -> None:
        values = unsharded_values(self.sharded)
        with torch.no_grad():
            for name, param in self.plain.named_parameters():
                param.copy_(values[name])

    def _compare(self, number: int, *, copies_before: bool) -> None:
        """Compare a step; the plain model gets the values before or after the sharded one's."""
        if copies_before:
            self._copy_values()
        self.accumulate(self.sharded, number)
        if not copies_before:
            self._copy_values()
        self.optimizers[self.plain].zero_grad()
        self.accumulate(self.plain, number)
        average_gradients(self.plain.parameters())
        found = unsharded_gradients(self.sharded)
        for name, param in self.plain.named_parameters():
            assert_close(found.get(name), param.grad, f"gradient of {name}")
        for model in (self.sharded, self.plain):
            self.optimizers[model].step()
        values = unsharded_values(self.sharded)
        for name, param in self.plain.named_parameters():
            assert_close(values[name], param.detach(), f"parameter {name}")
        self.optimizers[self.sharded].zero_grad()


def _note_gradient(param: Tensor) -> None:
    assert param.grad is not None


class OutOfStepError(Exception):
    """Ranks were interrupted at different places, so what comes after it may not be in step."""


def are_all_at(place: str) -> bool:
    """Return whether all ranks were interrupted at the same place; local to the store.

    False if one does not say so within `SAME_PLACE_S`: it waits for a rank that was interrupted.
    """
    store, key = dist.distributed_c10d._get_default_store(), f"interrupt/{next(_numbers)}"
    store.set(f"{key}/{dist.get_rank()}", place or "-")
    keys = [f"{key}/{rank}" for rank in range(dist.get_world_size())]
    try:
        store.wait(keys, timedelta(seconds=SAME_PLACE_S))
    except dist.DistStoreError:
        return False
    return len({store.get(each) for each in keys}) == 1


_numbers = itertools.count()


def moments_of(name: str) -> dict[str, list[int]]:
    """Return when a step of a program runs each line, by its place."""
    return _watched(name).moments


def on_all_ranks(name: str, *, is_distinct: bool = False) -> list[Moment]:
    """Return the moments at which all ranks run one line, each rank's own, in order.

    Ranks may count other lines before it. With `is_distinct` a line's first and last moment alone.
    """
    finder = importlib.import_module("tests.interrupts").moments_of
    found = run_ranks(PROGRAMS[name].world_size, finder, name)
    moments = set()
    for lists in ([each.get(place, []) for each in found] for place in found[0]):
        if is_distinct and all(lists):
            moments |= {tuple(each[i] for each in lists) for i in (0, -1)}
        elif len(set(map(len, lists))) == 1:
            moments.update(zip(*lists, strict=True))
    return sorted(moments)


def _watched(name: str) -> Interrupter:
    run = _InterruptedRun(PROGRAMS[name])
    if PROGRAMS[name].is_new:
        run.renew()
    interrupter = Interrupter(0)
    with interrupter.watching():
        run.step(5)
    return interrupter


@contextmanager
def without_lost_interrupts() -> Iterator[None]:
    """Let pass what Python itself drops: an interrupt in a `__del__` or a weak reference's call."""
    before = sys.unraisablehook

    def report(unraisable: Any) -> None:
        if unraisable.exc_type is not KeyboardInterrupt:
            before(unraisable)

    sys.unraisablehook = report
    try:
        yield
    finally:
        sys.unraisablehook = before


def run_moments(
    name: str, moments: Iterable[Moment], folder: str, *, is_poisoned: bool
) -> dict[Moment, str]:
    """Interrupt steps of a program at moments, on every rank; return their places."""
    places = {}
    poison = poisoned() if is_poisoned else nullcontext()
    with poison, warnings.catch_warnings(), without_lost_interrupts():
        warnings.filterwarnings("ignore", "a backward has run since the last forward")
        warnings.filterwarnings("ignore", "a backward failed, and the last forwards")
        run = _InterruptedRun(PROGRAMS[name])
        for moment in moments:
            sys.stdout.write(f"moment {moment[0]}\n")
            sys.stdout.flush()
            try:
                places[moment] = run.interrupt(moment, Path(folder))
            except OutOfStepError:
                break  # whoever called goes on with new ranks
    return places


def run_chunk(name: str, moments: list[Moment], folder: str) -> tuple[int, list[str]]:
    """Run moments on workers; return how many were run, and what was wrong, a text for each."""
    failures: list[str] = []
    program, num_run = PROGRAMS[name], 0
    worker = importlib.import_module("tests.interrupts").run_moments  # not that of `__main__`
    while moments:
        options = {"is_poisoned": len(moments) % 2 == 0}
        try:
            places = run_ranks(
                program.world_size, worker, name, moments, folder, timeout=120, **options
            )
            num_done = min(len(each) for each in places)
            if num_done < len(moments):  # the next one was at different places
                shut_down_workers()
                num_done += 1
        except RankError as error:
            text = str(error)
            firsts = [moment[0] for moment in moments]
            reached = max(map(int, re.findall(r"^moment (\d+)$", text, re.M)), default=firsts[0])
            failures.append(f"{name} {reached}: {text}")
            num_done = firsts.index(reached) + 1
        num_run, moments = num_run + num_done, moments[num_done:]
    return num_run, failures


def _jobs(
    args: argparse.Namespace, known: dict[str, list[Moment]]
) -> Iterator[tuple[str, list[Moment]]]:
    """Yield moments of programs: the one that is asked for, all, or random ones without end.

    A moment's number is that of the first rank.
    """
    random = Random(args.seed)
    if args.only is not None:
        for name, moments in known.items():
            yield name, [moment for moment in moments if moment[0] == args.only]
    elif args.seed is None:
        for name, moments in known.items():
            chosen = [moment for moment in moments if moment[0] >= args.first][:: args.every]
            for start in range(0, len(chosen), 200):
                yield name, chosen[start : start + 200]
    while args.seed is not None and args.only is None:
        name = random.choice(list(known))
        yield name, sorted(random.sample(known[name], 40))


def run_interrupts() -> int:
    """Interrupt programs as the arguments say; print what was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", choices=PROGRAMS, action="append")
    parser.add_argument("--only", type=int)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--distinct", action="store_true", help="where a line runs first and last")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--seed", type=int)
    args = parser.parse_args()
    end, num_run, num_failed = time.monotonic() + args.seconds, 0, 0
    names = args.program or list(PROGRAMS)
    known = {name: on_all_ranks(name, is_distinct=args.distinct) for name in names}
    for name, moments in _jobs(args, known):
        with tempfile.TemporaryDirectory(prefix="interrupts-") as folder:
            num, failures = run_chunk(name, moments, folder)
        num_run, num_failed = num_run + num, num_failed + len(failures)
        sys.stdout.write("".join(f"\n{failure}\n" for failure in failures))
        sys.stdout.flush()
        if time.monotonic() > end:
            break
    shut_down_workers()
    counts = {name: len(moments) for name, moments in known.items()}
    sys.stdout.write(f"{num_run} interrupts of {counts} moments, {num_failed} failed\n")
    return bool(num_failed)


if __name__ == "__main__":
    sys.exit(run_interrupts())
