"""Is this working tree dearer than another commit? Ends with 1 where a figure is over 5 % worse.

Both packages run beside each other, on two gloo ranks of one thread each, with the benchmarks of
this tree: processes of the one compute while those of the other wait. Each round measures the one
twice and the other twice, in the order A B B A; a ratio is taken inside a round, so that the
machine's load cancels out. Processes differ too, by where their memory lies: half of the rounds run
in new ones. What is over the limit is measured again before it counts.

Run it on a machine on which nothing else runs, before a change of the core is done. It takes five
minutes on two cores, and some more where a figure is over the limit.

    make bench-guard                            # beside the last release
    make bench-guard ARGS="--base main~20"

*step*: wall time of forward, backward, fused AdamW. *host*: CPU time of forward and backward of 48
units with nine parameters of 16 x 16 each. *set-up*: wall time of sharding the large model. *peak*:
bytes from malloc in a step beyond those before the model was built, exact.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from benchmarks import malloc_counter, peers, report
from tests.common.models import MatrixChain, make_batch, make_llama

_ROOT = Path(__file__).resolve().parents[1]
_LIMIT = 1.05
_PEAK = "peak"
_TIMEOUT = timedelta(seconds=120)
_MODELS = {"12 x 512": "std", "48 x 128": "tiny"}
_STRATEGIES = {"FULL_SHARD": "ours", "SHARD_GRAD_OP": "ours_gradop", "SHARD_OPTIM": "ours_optim"}


class _Steps:
    """Training steps of one model, which is built for the first."""

    def __init__(self, model: str, peer: str) -> None:
        self._model_name, self._peer = model, peer
        self._step: Callable[[], None] | None = None

    def seconds(self) -> float:
        """Return the wall time of a step; of a short one, the median of three."""
        step = self._step = self._step or self._make()
        return statistics.median(_wall(step) for _ in range(3 if self._model_name == "tiny" else 1))

    def _make(self) -> Callable[[], None]:
        model = peers.build(self._peer, make_llama(self._model_name))
        optimizer = peers.make_optimizer(self._peer, model)
        batch = make_batch(self._model_name, dist.get_rank())

        def step() -> None:
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        return step

    def peak_nbytes(self) -> float:
        """Return the bytes that a step holds at most."""
        gc.collect()
        before = malloc_counter.held_nbytes()
        step = self._make()
        malloc_counter.restart_peak()
        step()
        return float(malloc_counter.peak_nbytes() - before)


class _Host:
    """Forwards and backwards in which little is computed."""

    def __init__(self) -> None:
        self._model: torch.nn.Module | None = None
        self._x = torch.ones(1, 16, requires_grad=True)

    def seconds(self) -> float:
        """Return the CPU time of this thread, the median of five."""
        if self._model is None:
            self._model = peers.build("ours", MatrixChain(48, 9))
            self._pass()
        return statistics.median(self._pass() for _ in range(5))

    def _pass(self) -> float:
        assert self._model is not None
        dist.barrier()
        start = time.thread_time()
        self._model(self._x).backward()
        elapsed = time.thread_time() - start
        self._model.zero_grad()
        return elapsed


def _set_up_seconds() -> float:
    gc.collect()
    model = make_llama("std")
    return _wall(lambda: peers.build("ours", model))


def _wall(run: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def figures() -> dict[str, Callable[[], float]]:
    """Return what takes time, by name: functions that all ranks call, and return the cost."""
    found: dict[str, Callable[[], float]] = {"host": _Host().seconds, "set-up": _set_up_seconds}
    for size, model in _MODELS.items():
        for strategy, peer in _STRATEGIES.items():
            found[f"step {size}, {strategy}"] = _Steps(model, peer).seconds
    return found


def serve(package: Path) -> None:
    """Measure what standard input names, line by line, with the package in a folder."""
    import composable_shard  # noqa: PLC0415 -- the one that the caller's path leads to

    assert Path(composable_shard.__file__).is_relative_to(package), composable_shard.__file__
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    measured = figures() | {_PEAK: _Steps("std", "ours").peak_nbytes}
    for line in sys.stdin:
        print(json.dumps(measured[line.strip()]()), flush=True)
    os._exit(0)  # gloo's threads may abort the process while the interpreter shuts down


@contextmanager
def _ranks(package: Path) -> Iterator[Callable[[str], float]]:
    """Start two ranks with the package in a folder; give a function that lets them measure."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "PYTHONPATH": f"{package}:{_ROOT}"}
    command = [sys.executable, "-m", "benchmarks.guard", "--serve", str(package)]
    processes = [
        subprocess.Popen(
            command,
            cwd=package,
            env=os.environ | common | {"RANK": rank},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]

    def measure(name: str) -> float:
        for each in processes:
            assert each.stdin is not None
            each.stdin.write(f"{name}\n")
            each.stdin.flush()
        lines = [each.stdout.readline() for each in processes if each.stdout is not None]
        if not all(lines):
            raise RuntimeError(f"a rank with the package in {package} failed at '{name}'")
        return max(float(json.loads(line)) for line in lines)

    try:
        yield measure
    finally:
        for each in processes:
            each.kill()
            each.wait()


def _export(base: str, folder: Path) -> None:
    archive = subprocess.run(
        ["git", "archive", base, "composable_shard"], cwd=_ROOT, capture_output=True, check=True
    )
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive.stdout, check=True)


def last_release(root: Path) -> str:
    """Return the last tag; without tags the commit that wrote the last release into the changelog.

    Where there is neither, as in a clone of the last commits, HEAD~10, or the first commit.
    """

    def git(*args: str) -> str:
        found = subprocess.run(
            ["git", *args], cwd=root, capture_output=True, text=True, check=False
        )
        return found.stdout.strip()

    if tag := git("describe", "--tags", "--abbrev=0"):
        return tag
    released = re.search(r"^## \[\d.*\]", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    changed = (
        git("log", "--format=%h", f"-S{released[0]}", "--", "CHANGELOG.md") if released else ""
    )
    if changed:
        return changed.splitlines()[-1]
    ten_before = git("rev-parse", "--short", "--verify", "--quiet", "HEAD~10")
    return ten_before or git("rev-list", "--max-parents=0", "--abbrev-commit", "HEAD")


def _peak_of(package: Path) -> float:
    with malloc_counter.preloaded(), _ranks(package) as measure:  # the counter slows all else
        return measure(_PEAK)


def compare(base: str, rounds: int) -> dict[str, list[float]]:
    """Return by figure the ratios of this tree to the other commit.

    What seems dearer is measured again, in twice as many rounds, which count with the first.
    """
    ratios: dict[str, list[float]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        _export(base, folder)
        ratios[_PEAK] = [_peak_of(_ROOT) / _peak_of(folder)]
        names = list(figures())
        for factor in (1, 2):
            for packages in ([folder, _ROOT], [_ROOT, folder]):
                for name, found in _ratios_of(packages, names, factor * rounds):
                    ratios.setdefault(name, []).append(found if packages[1] is _ROOT else 1 / found)
            names = [name for name in names if is_dearer(ratios[name])]
    return ratios


def is_dearer(ratios: Sequence[float]) -> bool:
    """Return whether a figure's ratios are over the limit."""
    return statistics.median(ratios) > _LIMIT


def _ratios_of(
    packages: Sequence[Path], names: Sequence[str], rounds: int
) -> Iterator[tuple[str, float]]:
    """Yield by figure the ratios of the second package to the first, measured in new processes."""
    if not names:
        return
    with ExitStack() as stack:
        first, second = (stack.enter_context(_ranks(each)) for each in packages)
        for turn in range(rounds + 1):
            for name in names:
                found = [measure(name) for measure in (first, second, second, first)]
                if turn:  # the first turn builds the models
                    yield name, (found[1] + found[2]) / (found[0] + found[3])


def main() -> int:
    """Parse the options, measure, report; return 1 where something got dearer."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--base", help="the commit to compare with (default: the last release)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds in each of two pairs of processes"
    )
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve)
    base = args.base or last_release(_ROOT)
    ratios = compare(base, args.rounds)
    dearer = [name for name, each in ratios.items() if is_dearer(each)]
    rows = [[name, report.spread(each, 3), "*" * (name in dearer)] for name, each in ratios.items()]
    markdown = report.header(
        f"This tree beside {base}",
        f"2 gloo ranks of one thread; twice {args.rounds} rounds, each after one for warming up",
        f"ratios to {base}, below 1 is cheaper: median (quartiles); * over {_LIMIT}",
    )
    report.emit(markdown + "\n" + report.table(["figure", "ratio", ""], rows), args.output)
    return int(bool(dearer))


if __name__ == "__main__":
    sys.exit(main())
