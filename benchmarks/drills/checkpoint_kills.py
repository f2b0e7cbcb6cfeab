"""Kill ranks while they save: the last complete checkpoint is never lost, and the run goes on.

    python -m benchmarks.drills checkpoint_kills

Two ranks train a small model and save after each step. First, one rank, or both, get SIGKILL before
each of the file operations of a save. Then a run is killed at random moments, and goes on from what
it left, many times over. After each kill the checkpoint that is found must be the last one whose
save had returned, or one saved after it, and equal that of a run that nobody disturbed; so must all
losses. Every rank is forked from this process, which has imported torch and started no threads.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.report import emit, header, make_parser, table
from composable_shard import find_checkpoint, fully_shard, load_checkpoint, save_checkpoint
from composable_shard.checkpoint import files
from composable_shard.checkpoint.reader import CheckpointReader

WORLD_SIZE = 2
DEADLINE_S = 60.0
MAX_STEPS = 2000
EXIT_FAILED = 3
# In memory: kills don't lose what the system holds, and a busy disk makes `fsync` take minutes.
_FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else None
COMPLETED, START, NUM_OPERATIONS, IN_SAVE, LOSSES = 0, 1, 2, 4, 8  # places in the shared memory


class Shared:
    """Numbers that a killed process leaves behind."""

    def __init__(self) -> None:
        self.numbers = memoryview(mmap.mmap(-1, 8 * (LOSSES + MAX_STEPS))).cast("d")


@dataclass
class Kill:
    """Before which file operation of which save a rank is to be killed, alone or with all."""

    rank: int
    operation: int  # counted in the save
    takes_all: bool
    save: int = 2


@dataclass
class Run:
    """What the ranks are to do."""

    last_step: int
    kill: Kill | None = None
    keep_last: int | None = 2


def rank_main(rank: int, folder: Path, shared: Shared, run: Run) -> None:
    """Train and save, from the last checkpoint on."""
    numbers = shared.numbers
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), WORLD_SIZE),
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=DEADLINE_S / 3),
    )
    torch.manual_seed(rank)
    random.seed(rank)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.linspace(-1, 1, param.numel()).view(param.shape))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    path = folder / "checkpoints"
    start = 0
    if find_checkpoint(path) is not None:
        start = load_checkpoint(path, model, optimizer).step
    if rank == 0:
        numbers[COMPLETED] = numbers[START] = start
    count_operations(rank, shared, run.kill)
    for step in range(start, run.last_step):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        loss = model(torch.randn(4, 6, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().double()
        dist.all_reduce(total)
        if rank == 0:
            numbers[LOSSES + step] = total.item()
        numbers[NUM_OPERATIONS + rank] = 0
        numbers[IN_SAVE + rank] = step + 1 - start  # number of the save
        save_checkpoint(path, model, optimizer, step=step + 1, keep_last=run.keep_last)
        numbers[IN_SAVE + rank] = 0
        if rank == 0:
            numbers[COMPLETED] = step + 1


def count_operations(rank: int, shared: Shared, kill: Kill | None) -> None:
    """Count the file operations of this process, and let it die before the one that is named."""

    def counted(function: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            numbers = shared.numbers
            place = int(numbers[IN_SAVE + rank]), int(numbers[NUM_OPERATIONS + rank])
            if kill and kill.rank == rank and place == (kill.save, kill.operation):
                os.kill(0 if kill.takes_all else os.getpid(), signal.SIGKILL)
            numbers[NUM_OPERATIONS + rank] += 1
            return function(*args, **options)

        return run

    for name in files.__all__:
        setattr(files, name, counted(getattr(files, name)))


class Ranks:
    """One run of all ranks, forked from here, in a process group of their own."""

    def __init__(self, folder: Path, shared: Shared, run: Run) -> None:
        (folder / "store").unlink(missing_ok=True)
        shared.numbers[IN_SAVE] = shared.numbers[IN_SAVE + 1] = 0
        shared.numbers[COMPLETED] = shared.numbers[START] = -1
        self.pids: list[int] = []
        self.statuses: dict[int, int] = {}  # by rank
        for rank in range(WORLD_SIZE):
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, self.pids[0] if self.pids else 0)
                _run_child(rank, folder, shared, run)
            os.setpgid(pid, self.pids[0] if self.pids else pid)
            self.pids.append(pid)

    def poll(self) -> bool:
        """Return whether any rank runs."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.statuses:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self.statuses[rank] = os.waitstatus_to_exitcode(status)
        return len(self.statuses) < len(self.pids)

    def kill(self, ranks: list[int]) -> None:
        """Kill these ranks, at once."""
        for rank in ranks:
            if rank not in self.statuses:
                os.kill(self.pids[rank], signal.SIGKILL)

    def join(self, seconds: float = DEADLINE_S) -> list[int]:
        """Wait for all ranks, and return their exit codes.

        Raises:
            RuntimeError: If they have not ended by then; they are killed.
        """
        deadline = time.monotonic() + seconds
        while self.poll():
            if time.monotonic() > deadline:
                self.kill(list(range(WORLD_SIZE)))
                raise RuntimeError("the ranks did not end")
            time.sleep(0.005)
        return [self.statuses[rank] for rank in range(WORLD_SIZE)]


def _run_child(rank: int, folder: Path, shared: Shared, run: Run) -> None:
    code = 1
    faulthandler.dump_traceback_later(0.9 * DEADLINE_S)  # says where a rank hangs
    try:
        rank_main(rank, folder, shared, run)
        (folder / f"modules {rank}").write_text("\n".join(sys.modules))
        code = 0
    except RuntimeError as error:  # another rank was killed
        with open(folder / "errors", "a") as file:
            file.write(f"{error}\n")
        code = EXIT_FAILED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


@dataclass
class Result:
    """What happened."""

    num_operations: list[int] = field(default_factory=list)  # of a save, by rank
    num_kills: Counter[str] = field(default_factory=Counter)
    num_resumed: int = 0
    found: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


class Scenario:
    """A folder, and the run that nobody disturbed to compare with."""

    def __init__(self, folder: Path, num_steps: int) -> None:
        self.folder = folder
        self.result = Result()
        self.shared = Shared()
        first = self._run_undisturbed("first", Run(4))
        counts = self.shared.numbers[NUM_OPERATIONS : NUM_OPERATIONS + WORLD_SIZE]
        self.result.num_operations = [int(count) for count in counts]
        # What torch imports when it is needed takes a second, which each rank would pay.
        for name in (first / "modules 0").read_text().split("\n"):
            with suppress(ImportError):
                importlib.import_module(name)
        gc.collect()
        gc.freeze()  # or each rank's collector would go through, and copy, all of torch
        started = time.monotonic()
        reference = self._run_undisturbed("reference", Run(num_steps, keep_last=None))
        self.step_seconds = (time.monotonic() - started) / num_steps
        path = reference / "checkpoints"
        self.values = {step: read_values(path, step)[1] for step in range(1, 5)}
        self.losses = list(self.shared.numbers[LOSSES : LOSSES + num_steps])

    def _run_undisturbed(self, name: str, run: Run) -> Path:
        folder = self.folder / name
        folder.mkdir()
        if any(Ranks(folder, self.shared, run).join(DEADLINE_S + run.last_step)):
            raise RuntimeError("the undisturbed run failed")
        return folder

    def check(self, path: Path, name: str, kill: str) -> int:
        """Check what a kill has left; return its step."""
        numbers = self.shared.numbers
        completed, start = int(numbers[COMPLETED]), int(numbers[START])
        try:
            step, values = read_values(path)
        except ValueError as error:
            if completed > 0:
                self.result.problems.append(f"{name}: {error}")
            return 0
        if step < completed:
            self.result.problems.append(f"{name}: found step {step} after {completed}")
        if values != self.values.get(step, values):
            self.result.problems.append(f"{name}: the values of step {step} are others")
        self.check_losses(max(start, 0), max(completed, 0), name)
        self.result.num_kills[kill] += 1
        self.result.found["before" if step == completed else "new"] += 1
        return step

    def check_losses(self, start: int, end: int, name: str) -> None:
        """Compare the losses of a run bit by bit."""
        losses = list(self.shared.numbers[LOSSES + start : LOSSES + end])
        if losses != self.losses[start:end]:
            self.result.problems.append(f"{name}: other losses from step {start} on")


def read_values(path: Path, step: int | None = None) -> tuple[int, dict[str, bytes]]:
    """Return the step of the checkpoint that is found, and all that was saved, verified."""
    folder = find_checkpoint(path, step)
    if folder is None:
        raise ValueError("there is no checkpoint")
    with CheckpointReader(folder) as reader:
        reader.check_files()
        tensors = reader.metadata.tensors
        values = {name: bytes(reader.read(name).view(torch.uint8).tolist()) for name in tensors}
        return reader.metadata.step, values


def kill_at_operations(scenario: Scenario, every: int, resume_every: int) -> None:
    """Kill each rank before file operations of the third save, alone and with all others."""
    result = scenario.result
    kills = [
        Kill(rank, operation, takes_all, save=3)
        for takes_all in (False, True)
        for rank, count in enumerate(result.num_operations)
        for operation in range(count)
    ]
    for number, kill in enumerate(kills[::every]):
        folder = scenario.folder / f"kill {number}"
        folder.mkdir()
        codes = Ranks(folder, scenario.shared, Run(4, kill)).join()
        name = f"rank {kill.rank} before operation {kill.operation}"
        survivor = -signal.SIGKILL if kill.takes_all else EXIT_FAILED
        expected = [-signal.SIGKILL if r == kill.rank else survivor for r in range(WORLD_SIZE)]
        if codes != expected:
            result.problems.append(f"{name}: exit codes {codes}, expected {expected}")
        kind = "all ranks" if kill.takes_all else "one rank"
        step = scenario.check(folder / "checkpoints", name, f"{kind}, between operations")
        if number % resume_every == 0:
            if any(Ranks(folder, scenario.shared, Run(6)).join()):
                result.problems.append(f"{name}: could not go on")
            scenario.check_losses(step, 6, name)
            result.num_resumed += 1
        shutil.rmtree(folder)


def kill_at_random(scenario: Scenario, num_kills: int, seed: int) -> None:
    """Kill one run again and again inside and between saves; it goes on from what is left."""
    result, numbers = scenario.result, scenario.shared.numbers
    generator = random.Random(seed)
    folder = scenario.folder / "random"
    folder.mkdir()
    for number in range(num_kills):
        ranks = Ranks(folder, scenario.shared, Run(len(scenario.losses)))
        num_saves = generator.randrange(3)
        while ranks.poll() and (
            numbers[START] < 0 or numbers[COMPLETED] < numbers[START] + num_saves
        ):
            time.sleep(0.0005)
        time.sleep(generator.random() * scenario.step_seconds)
        victims = [[0], [1], [0, 1]][generator.randrange(3)]
        ranks.kill(victims)
        is_in_save = any(numbers[IN_SAVE + rank] for rank in victims)
        codes = ranks.join()
        if not any(codes):  # the run had ended, and nobody was killed
            break
        if not all(codes[rank] == -signal.SIGKILL for rank in victims):
            result.problems.append(f"random kill {number}: exit codes {codes}")
        kind = "all ranks" if len(victims) > 1 else "one rank"
        where = "inside a save" if is_in_save else "between saves"
        scenario.check(folder / "checkpoints", f"random kill {number}", f"{kind}, {where}")
        result.num_resumed += number > 0
    if any(Ranks(folder, scenario.shared, Run(len(scenario.losses))).join()):
        result.problems.append("the run could not go on after the last kill")
    scenario.check_losses(int(numbers[START]), len(scenario.losses), "the last run")
    result.num_resumed += 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--random", type=int, default=50, help="kills at random moments")
    add("--steps", type=int, default=400, help="of the run that is killed at random moments")
    add("--every", type=int, default=1, help="kill at every n-th operation")
    add("--resume-every", type=int, default=1, help="go on after every n-th kill at an operation")
    add("--seed", type=int, default=0, help="of the random moments")
    add("--json", action="store_true", help="print the counts for a program")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=_FOLDER) as name:
        scenario = Scenario(Path(name), args.steps)
        kill_at_operations(scenario, args.every, args.resume_every)
        kill_at_random(scenario, args.random, args.seed)
    result = scenario.result
    if args.json:
        print(json.dumps(vars(result)))
    else:
        emit(_report(result, time.monotonic() - started), args.output)
    return 1 if result.problems else 0


def _report(result: Result, seconds: float) -> str:
    rows = [[kind, str(count)] for kind, count in sorted(result.num_kills.items())]
    top = header(
        "Kills while a checkpoint is saved",
        f"{WORLD_SIZE} gloo ranks, keep_last=2; file operations of a save by rank: "
        f"{result.num_operations}",
        f"runs that went on after a kill: {result.num_resumed}; all losses are compared bitwise "
        "with those of an undisturbed run",
        f"found after a kill: {result.found['before']} times the last checkpoint whose save had "
        f"returned, {result.found['new']} times the one that was being saved",
        f"problems: {result.problems or 'none'}",
        f"{seconds:.0f} s in all",
    )
    return top + "\n" + table(["kill", "number"], rows)
