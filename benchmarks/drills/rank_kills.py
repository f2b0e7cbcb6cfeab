"""Kill ranks in the middle of a step: the others say which one is gone, and the run goes on.

    python -m benchmarks.drills rank_kills              # each place of a step, each strategy
    python -m benchmarks.drills rank_kills --random 30  # torchrun --max-restarts, killed at random

Three ranks train a small model, and rank 1 gets SIGKILL in a forward, a backward, a gather, a
reduction, an optimizer step or a save. The two others must raise the same error, which says that
rank 1 is gone, within the timeout of the process group and 10 s.

With `--random`, torchrun runs two ranks that save after each step, and SIGKILL takes one or both of
them at random moments. It restarts them, and they go on from the last checkpoint: all losses must
be bitwise those of a run that nobody disturbed. `--in-process` uses the agent of torchrun without
the start of new interpreters.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from benchmarks.report import emit, header, make_parser, table
from composable_shard import (
    ShardingStrategy,
    find_checkpoint,
    fully_shard,
    load_checkpoint,
    save_checkpoint,
)
from composable_shard.checkpoint import files
from composable_shard.comm import trace
from composable_shard.torch_private import backend_of

TIMEOUT_S = 5
SPARE_S = 10.0  # beyond the timeout
VICTIM, NUM_RANKS = 1, 3
LAST_STEP, STEP_OF_KILL = 4, 2
AT_ONCE = 3  # runs side by side: they mostly wait
_FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else None
PLACES = ("forward", "backward", "gather", "reduce", "step", "save")


def make_model(strategy: ShardingStrategy) -> nn.Module:
    """Return a small model, sharded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
    for layer in (model[0], model[2]):
        fully_shard(layer, strategy=strategy)
    return fully_shard(model, strategy=strategy)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    """Return the loss of a step, which depends on nothing else."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return model(torch.randn(4, 6, generator=generator)).square().mean()


# ---------------------------------------------------------------------------------------------
# One rank dies at a place of a step
# ---------------------------------------------------------------------------------------------


class _Killer(list[trace.Event]):
    """A log of events that ends the process at the first one of some kinds."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.kinds = kinds

    def append(self, event: trace.Event) -> None:
        """Look at an event."""
        if event.kind in self.kinds:
            die()


_EVENTS = {
    "forward": ("compute",),
    "backward": ("compute_backward",),
    "gather": ("all_gather",),
    "reduce": ("issue_reduce",),
}


def die(*_: Any) -> None:
    """End this process as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(place: str, optimizer: torch.optim.Optimizer) -> None:
    """Let this process die when it next comes to a place."""
    if place in _EVENTS:
        trace.logs.append(_Killer(_EVENTS[place]))
    elif place == "step":
        optimizer.register_step_pre_hook(die)
    else:
        for name in files.__all__:
            setattr(files, name, die)


def rank_main(rank: int, folder: Path, place: str, strategy: ShardingStrategy) -> None:
    """Train until this rank dies, or raises since another one has."""
    dist.init_process_group(
        "gloo",
        store=_store_of(rank, folder / "port"),
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=12 * TIMEOUT_S),  # the other ranks may begin late
    )
    group = dist.group.WORLD
    backend_of(group, torch.device("cpu"))._set_default_timeout(timedelta(seconds=TIMEOUT_S))
    model = make_model(strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(LAST_STEP):
        if step == STEP_OF_KILL:
            dist.barrier()
            if rank == VICTIM:
                (folder / "began").write_text(str(time.time()))
                arm(place, optimizer)
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if place == "save" and step in (0, STEP_OF_KILL):
            save_checkpoint(folder / "checkpoints", model, optimizer, step=step)


def _store_of(rank: int, port: Path) -> dist.TCPStore:
    """Return the store of a run, which rank 0 hosts at any free port."""
    if rank == 0:
        store = dist.TCPStore("localhost", 0, NUM_RANKS, True, wait_for_workers=False)
        _note(port, str(store.port))
        return store
    while not port.exists():
        time.sleep(0.01)
    return dist.TCPStore("localhost", int(port.read_text()), NUM_RANKS, False)


def _fork(rank: int, folder: Path, place: str, strategy: ShardingStrategy) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 0
    try:
        rank_main(rank, folder, place, strategy)
    except BaseException as error:
        if not isinstance(error, RuntimeError):
            traceback.print_exc()
        (folder / f"error {rank}").write_text(json.dumps([time.time(), str(error)]))
        time.sleep(SPARE_S / 2)  # the others may ask what this rank does
        code = 3
    finally:
        os._exit(code)


@dataclass
class Cell:
    """What the other ranks said after one kill."""

    place: str
    strategy: str
    seconds: float
    texts: list[str]
    problem: str | None


class Kill:
    """One run in which rank 1 dies."""

    def __init__(self, place: str, strategy: ShardingStrategy) -> None:
        self.place, self.strategy = place, strategy
        self.folder = Path(tempfile.mkdtemp(dir=_FOLDER))
        self.pids = [_fork(rank, self.folder, place, strategy) for rank in range(NUM_RANKS)]

    def finish(self) -> Cell:
        """Wait for all ranks, and judge."""
        deadline = time.monotonic() + 60
        statuses: dict[int, int] = {}
        while len(statuses) < NUM_RANKS:
            for rank, pid in enumerate(self.pids):
                if rank not in statuses:
                    found, status = os.waitpid(pid, os.WNOHANG)
                    if found:
                        statuses[rank] = os.waitstatus_to_exitcode(status)
                    elif time.monotonic() > deadline:
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        try:
            return self._judge(statuses)
        finally:
            shutil.rmtree(self.folder)

    def _judge(self, statuses: dict[int, int]) -> Cell:
        found = [
            json.loads((self.folder / f"error {rank}").read_text())
            for rank in range(NUM_RANKS)
            if (self.folder / f"error {rank}").exists()
        ]
        texts = [text for _, text in found]
        path = self.folder / "began"
        if not path.exists():
            problem = f"rank {VICTIM} has not come to its kill: exit codes {statuses}"
            return Cell(self.place, self.strategy.name, 0.0, texts, problem)
        began = float(path.read_text())
        seconds = max((at - began for at, _ in found), default=0.0)
        return Cell(
            self.place, self.strategy.name, seconds, texts, _problem(statuses, texts, seconds)
        )


def _problem(statuses: dict[int, int], texts: list[str], seconds: float) -> str | None:
    if statuses[VICTIM] != -signal.SIGKILL:
        return f"rank {VICTIM} has not died: exit codes {statuses}"
    if any(code != 3 for rank, code in statuses.items() if rank != VICTIM):
        return f"exit codes {statuses}"
    if len(set(texts)) != 1:
        return "the errors differ"
    if f"rank {VICTIM} is gone" not in texts[0]:
        return "the error does not say who is gone"
    return None if seconds < TIMEOUT_S + SPARE_S else "too late"


def kill_at_places(strategies: list[ShardingStrategy], places: Sequence[str]) -> list[Cell]:
    """Kill a rank at each place of a step that a strategy has."""
    cases = [
        (place, strategy)
        for strategy in strategies
        for place in places
        if not (place == "gather" and strategy.facts.is_replicated)
    ]
    cells = []
    for index in range(0, len(cases), AT_ONCE):
        kills = [Kill(*case) for case in cases[index : index + AT_ONCE]]
        cells += [kill.finish() for kill in kills]
    return cells


# ---------------------------------------------------------------------------------------------
# Random kills, and restarts by torchrun
# ---------------------------------------------------------------------------------------------


def elastic_main(folder_name: str, num_steps: int) -> None:
    """Train one of two ranks, from the last checkpoint on; torchrun starts it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the agent's, where it has forked
    torch.set_num_threads(1)
    folder = Path(folder_name)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, restart = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    model = make_model(ShardingStrategy.FULL_SHARD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    path, start = folder / "checkpoints", 0
    if find_checkpoint(path) is not None:
        start = load_checkpoint(path, model, optimizer).step
    for step in range(start, num_steps):
        _note(folder / f"progress {rank}", f"{restart} {os.getpid()} {start} {step}")
        loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().double()
        dist.all_reduce(total)
        if rank == 0:
            with open(folder / "losses", "a") as file:
                file.write(f"{step} {total.item().hex()}\n")
        save_checkpoint(path, model, optimizer, step=step + 1, keep_last=2)
    dist.destroy_process_group()


def _note(path: Path, text: str) -> None:
    other = path.with_suffix(".new")
    other.write_text(text)
    other.rename(path)


def _read_progress(folder: Path) -> list[list[int]]:
    """Return for each rank: restarts, process, first step, step; empty where one has not begun."""
    try:
        return [
            list(map(int, (folder / f"progress {rank}").read_text().split())) for rank in range(2)
        ]
    except FileNotFoundError:
        return []


class RandomKills(threading.Thread):
    """Kills ranks of a run at random moments, each time after it has begun anew."""

    def __init__(self, folder: Path, num_kills: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.folder, self.num_kills = folder, num_kills
        self.generator = random.Random(seed)
        self.steps: list[int] = []  # in which a rank was killed
        self.is_over = threading.Event()

    def run(self) -> None:
        """Kill."""
        last = -1  # the number of restarts before the last kill; torchrun may need several
        for _ in range(self.num_kills):
            wanted = self.generator.randrange(4)
            while not self.is_over.is_set():
                found = _read_progress(self.folder)
                is_new = bool(found) and all(last < f[0] == found[0][0] for f in found)
                if is_new and all(f[3] >= f[2] + wanted for f in found):
                    break
                time.sleep(0.001)
            else:
                return
            time.sleep(self.generator.random() * 0.05)
            victims = [[0], [1], [0, 1]][self.generator.randrange(3)]
            for rank in victims:
                with suppress(ProcessLookupError):
                    os.kill(found[rank][1], signal.SIGKILL)
            last = found[0][0]
            self.steps.append(found[0][3])


def launch(folder: Path, num_steps: int, num_restarts: int, *, in_process: bool) -> None:
    """Run two ranks under torchrun, or under its agent in this process."""
    # Torch's groups read the addresses of ranks that are gone where the store outlives a restart.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if in_process:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=2,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=num_restarts,
            monitor_interval=0.05,
            start_method="fork",
        )
        elastic_launch(config, elastic_main)(str(folder), num_steps)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", str(num_restarts)]
    command += ["--monitor-interval", "0.1", "-m", "benchmarks.drills", "rank_kills"]
    subprocess.run([*command, "--worker", str(folder), str(num_steps)], check=True, timeout=3600)


def kill_at_random(num_kills: int, num_steps: int, seed: int, *, in_process: bool) -> Any:
    """Run twice, undisturbed and killed; return what happened."""
    with tempfile.TemporaryDirectory(dir=_FOLDER) as name:
        losses: list[dict[int, set[str]]] = []
        for kills in (0, num_kills):
            folder = Path(name, str(kills))
            folder.mkdir()
            killer = RandomKills(folder, kills, seed)
            killer.start()
            launch(folder, num_steps, 5 * num_kills + 2, in_process=in_process)
            killer.is_over.set()
            killer.join()
            found: dict[int, set[str]] = {step: set() for step in range(num_steps)}
            for line in (folder / "losses").read_text().splitlines():
                step, loss = line.split()
                found[int(step)].add(loss)
            losses.append(found)
    different = [step for step in range(num_steps) if losses[1][step] != losses[0][step]]
    return {
        "num_kills": len(killer.steps),
        "killed_in_steps": killer.steps,
        "num_steps": num_steps,
        "steps_with_other_losses": different,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--worker", nargs=2, help=argparse.SUPPRESS)
    add("--random", type=int, default=0, help="kills at random moments")
    add("--steps", type=int, help="of the run that is killed; default: enough")
    add("--in-process", action="store_true", help="the agent of torchrun, which forks")
    add("--strategy", action="append", choices=[each.name for each in ShardingStrategy])
    add("--place", action="append", choices=PLACES)
    add("--seed", type=int, default=0, help="of the random moments")
    add("--json", action="store_true", help="print what happened for a program")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.worker:
        elastic_main(args.worker[0], int(args.worker[1]))
        return 0
    is_right, results, texts = True, {}, []
    if args.place or not args.random:
        started = time.monotonic()
        names = args.strategy or [each.name for each in ShardingStrategy]
        cells = kill_at_places([ShardingStrategy[name] for name in names], args.place or PLACES)
        is_right = not any(cell.problem for cell in cells)
        results["places"] = [vars(cell) for cell in cells]
        texts.append(_report_places(cells, time.monotonic() - started))
    if args.random:
        started = time.monotonic()
        steps = args.steps or 20 * args.random
        found = kill_at_random(args.random, steps, args.seed, in_process=args.in_process)
        all_killed = found["num_kills"] == args.random
        is_right = is_right and all_killed and not found["steps_with_other_losses"]
        results["random"] = found
        texts.append(_report_random(found, time.monotonic() - started))
    if args.json:
        print(json.dumps(results))
    else:
        emit("\n".join(texts), args.output)
    return 0 if is_right else 1


def _report_places(cells: list[Cell], seconds: float) -> str:
    rows = [
        [cell.place, cell.strategy, f"{cell.seconds:.1f}", cell.problem or "none"] for cell in cells
    ]
    texts = [f"{cell.place}, {cell.strategy}: {cell.texts[0]}" for cell in cells if cell.texts]
    top = header(
        "A rank is killed in the middle of a step",
        f"{NUM_RANKS} gloo ranks, timeout {TIMEOUT_S} s; seconds until both others had raised",
        f"{seconds:.0f} s in all",
    )
    return "\n".join([top, table(["place", "strategy", "seconds", "problem"], rows), *texts, ""])


def _report_random(result: Any, seconds: float) -> str:
    return header(
        "Ranks are killed at random, and torchrun restarts them",
        f"2 gloo ranks, {result['num_steps']} steps, a checkpoint after each; "
        f"{result['num_kills']} kills of one or both ranks, in steps {result['killed_in_steps']}",
        "steps with other losses than an undisturbed run, compared bitwise: "
        f"{result['steps_with_other_losses'] or 'none'}",
        f"{seconds:.0f} s in all",
    )
