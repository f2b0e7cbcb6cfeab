"""Which optimizers of other packages train a sharded model as they train a plain one?

Each optimizer of `benchmarks/optimizers/lists.py` takes 6 steps (20 if it adapts its step size) of
one small model: an embedding, linear layers, a convolution and a norm. All ranks have the same
batch, so that the plain model in one process is the reference. The verdict is by value, of the
largest difference of any parameter beside how far that parameter has moved:

- right: less than 0.1 %, on all ranks
- rounding: more, but no more than twice of what the plain model differs from itself if each
  parameter begins 1e-7 larger: the run amplifies rounding, as one that diverges does
- close: less than 2 %
- different: more, without any error
- refused: every rank raised an error
- uneven: ranks ended differently, or one hung or died

Modes: `element` (the default granularity), `row`, `param`, `flat` (`use_orig_params=False`),
`no_shard`, `fsdp2` (torch's own). Results go line by line to a file; what stands there is not run
again, so that a second run goes on where the first was stopped, and several may share one file.

    python -m benchmarks.optimizers --modes element,param,fsdp2 --jobs 2 --results sweep.jsonl
    python -m benchmarks.optimizers --results sweep.jsonl --no-runs --output optimizers.md
    python -m benchmarks.optimizers --results sweep.jsonl --no-runs --page docs/optimizers.md
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import date, timedelta
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.optim import Optimizer

from benchmarks import report
from benchmarks.optimizers.lists import BOTH, CLOSURE, GRAPH, LOSS, Case, all_cases
from composable_shard import ShardingStrategy, fully_shard, register_orig_params
from composable_shard.tensor.gathering import gathered_in_step
from tests.common.models import MixedNet

NUM_RANKS, LIMIT_S, GROUP_TIMEOUT_S = 2, 240, 20
RIGHT, CLOSE = 1e-3, 2e-2
PLAIN = "plain"
NUDGED = "nudged"  # the plain model, from parameters that are larger by a rounding error
MODES: dict[str, dict[str, Any]] = {
    "element": {},
    "row": {"granularity": "row"},
    "param": {"granularity": "param"},
    "flat": {"use_orig_params": False},
    "no_shard": {"strategy": ShardingStrategy.NO_SHARD},
    "fsdp2": {},
}
UNSHARDED = (PLAIN, NUDGED)
VERDICTS = ("right", "rounding", "close", "refused", "different", "uneven")


def _shard(model: MixedNet, mode: str) -> None:
    if mode in UNSHARDED:
        if mode == NUDGED:
            nn.utils.vector_to_parameters(
                nn.utils.parameters_to_vector(model.parameters()) * (1 + 1e-7), model.parameters()
            )
        return
    shard: Any = torch_fully_shard if mode == "fsdp2" else fully_shard
    for module in (model.a, model.c, model.b, model):
        shard(module, **MODES[mode])


def _values(model: MixedNet, mode: str) -> dict[str, Tensor]:
    """Return the whole parameters."""
    if mode == "flat":
        register_orig_params(model)
    found: dict[str, Any] = dict(model.named_parameters())
    return {
        name: (param.detach() if mode in UNSHARDED else param.detach().full_tensor()).clone()
        for name, param in found.items()
    }


def _loss(model: MixedNet, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    words = torch.randint(0, 40, (6, 7), generator=generator)
    classes = torch.randint(0, 10, (6, 7), generator=generator)
    return nn.functional.cross_entropy(model(words).flatten(0, 1), classes.flatten())


def _train(case: Case, mode: str) -> tuple[dict[str, Tensor], int]:
    """Return the trained parameters, and the bytes that the last step has gathered at rest."""
    torch.manual_seed(0)
    model = MixedNet()
    _shard(model, mode)
    optimizer = case.build(model)
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    for step in range(case.num_steps):
        torch.manual_seed(1000 + step)
        _step(case.kind, model, optimizer, step)
    if callable(getattr(optimizer, "eval", None)):
        optimizer.eval()
    inner = [optimizer, getattr(optimizer, "optimizer", None)]
    nbytes = sum(gathered_in_step(each)[0] for each in inner if isinstance(each, Optimizer))
    return _values(model, mode), nbytes


def _step(kind: str, model: MixedNet, optimizer: Any, step: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = _loss(model, step)
        loss.backward()
        return loss

    if kind == CLOSURE:
        optimizer.step(closure)
        return
    if kind == BOTH:
        closure()
        optimizer.step(closure)
    else:
        loss = _loss(model, step)
        loss.backward(create_graph=kind == GRAPH)
        optimizer.step(*([loss.detach] if kind == LOSS else []))
    optimizer.zero_grad()


class _Ended(NamedTuple):
    """How one rank ended: its values, or the error."""

    values: dict[str, Any]
    error: str = ""
    has_raised: bool = False  # false also if it hung or died
    nbytes: int = 0  # gathered at rest in the last step


def _run_rank(rank: int, case: Case, mode: str, end: Connection, store: str) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        if mode not in UNSHARDED:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=NUM_RANKS,
                timeout=timedelta(seconds=GROUP_TIMEOUT_S),
            )
        values, nbytes = _train(case, mode)
        found = {name: value.float().numpy() for name, value in values.items()}
        ended = _Ended(found, nbytes=nbytes)
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error}"[:600]
        ended = _Ended({}, f"{text} ({Path(place.filename).name}:{place.lineno})", True)
    end.send(tuple(ended))
    end.close()
    os._exit(0)  # what packages leave behind may wait for ever


def _run(case: Case, mode: str) -> list[_Ended]:
    """Run the ranks as forks, which have all imports; none outlives the limit."""
    context = multiprocessing.get_context("fork")
    ranks: list[tuple[BaseProcess, Connection]] = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(1 if mode in UNSHARDED else NUM_RANKS):
            here, there = context.Pipe(duplex=False)
            arguments = (rank, case, mode, there, str(Path(folder) / "store"))
            process = context.Process(target=_run_rank, args=arguments)
            process.start()
            there.close()
            ranks.append((process, here))
        end = time.monotonic() + LIMIT_S
        found = [_receive(connection, end) for _, connection in ranks]
        for process, connection in ranks:
            process.kill()
            process.join()
            connection.close()
    return found


def _receive(connection: Connection, end: float) -> _Ended:
    try:
        if connection.poll(max(0.1, end - time.monotonic())):
            return _Ended(*connection.recv())
    except EOFError:
        return _Ended({}, "the process died")
    return _Ended({}, f"no answer after {LIMIT_S} s")


class _Row(NamedTuple):
    """What came of an optimizer in one mode; a line of the results' file."""

    verdict: str
    detail: str  # the error, or the largest difference and where it is
    nbytes: int = 0  # gathered at rest in the last step
    amplified: float = 0.0  # by how much the plain model differs from itself, where it was asked


def _judge(plain: _Ended, ranks: Sequence[_Ended], nudged: Callable[[], _Ended]) -> _Row:
    errors = [each.error for each in ranks]
    if all(each.has_raised for each in ranks):
        return _Row("refused", errors[0])
    if any(errors):
        return _Row("uneven", " / ".join(error or "no error" for error in errors))
    largest, where = max(_largest(plain, each) for each in ranks)
    detail, nbytes = f"{largest:.1e} of {where}", ranks[0].nbytes
    if largest < RIGHT:
        return _Row("right", detail, nbytes)
    amplified, _ = _largest(plain, nudged())
    is_rounding = largest <= 2 * amplified
    verdict = "rounding" if is_rounding else "close" if largest < CLOSE else "different"
    return _Row(verdict, detail, nbytes, amplified)


def _largest(plain: _Ended, found: _Ended) -> tuple[float, str]:
    """Return the largest difference of any parameter, and which it is."""
    return max((_difference(plain, name, found.values[name]), name) for name in plain.values)


def _difference(plain: _Ended, name: str, value: Any) -> float:
    expected, found = torch.from_numpy(plain.values[name]), torch.from_numpy(value)
    if found.shape != expected.shape:
        return float("inf")
    moved = (expected - _start()[name]).abs().nan_to_num(0.0).max().item() + 1e-12
    if not torch.equal(expected.isnan(), found.isnan()):
        return float("inf")
    return (found - expected).abs().nan_to_num(0.0).max().item() / moved


@cache
def _start() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return _values(MixedNet(), PLAIN)


class Results:
    """Lines of a file, one for each optimizer and mode; several processes may write it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._locks = Path(f"{path}.locks")
        self._locks.mkdir(parents=True, exist_ok=True)

    def read(self) -> dict[tuple[str, str], _Row]:
        """Return what is known, by optimizer and mode; later lines replace earlier ones."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        rows: Iterable[dict[str, Any]] = map(json.loads, lines)
        return {(row.pop("name"), row.pop("mode")): _Row(**row) for row in rows}

    def add(self, name: str, mode: str, row: _Row) -> None:
        line = json.dumps({"name": name, "mode": mode, **row._asdict()})
        with self._path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(line + "\n")

    def claim(self, name: str) -> Any:
        """Return an open file that keeps other processes from this optimizer, or None."""
        file = (self._locks / f"{zlib.crc32(name.encode()):08x}").open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return None
        return file


def _work(cases: Sequence[Case], modes: Sequence[str], results: Results, until: float) -> None:
    """Run what no process has run or runs."""
    for case in cases:
        if time.monotonic() > until:
            return
        claim = results.claim(case.name)
        if claim is None:
            continue
        with claim:
            known = results.read()
            missing = [mode for mode in modes if (case.name, mode) not in known]
            if missing and (case.name, PLAIN) not in known:  # it fails
                _run_case(case, missing, results)


def _run_case(case: Case, modes: Sequence[str], results: Results) -> None:
    (plain,) = _run(case, PLAIN)
    if plain.error:
        results.add(case.name, PLAIN, _Row("fails", plain.error))
        print(f"{case.name}: fails on the plain model", flush=True)
        return
    nudged = cache(lambda: _run(case, NUDGED)[0])
    for mode in modes:
        row = _judge(plain, _run(case, mode), nudged)
        results.add(case.name, mode, row)
        print(f"{case.name}, {mode}: {row.verdict}", flush=True)


def _versions(cases: Iterable[Case]) -> str:
    found = []
    names = packages_distributions()
    for module in sorted({case.module for case in cases}):
        for package in names.get(module, [module])[:1]:
            with suppress(PackageNotFoundError):
                found.append(f"{package} {version(package)}")
    return ", ".join(found)


def _render(cases: Sequence[Case], results: Results) -> str:
    rows = results.read()
    modes = [mode for mode in MODES if any(key[1] == mode for key in rows)]
    ran = [case for case in cases if any((case.name, mode) in rows for mode in modes)]
    failed = [case.name for case in cases if (case.name, PLAIN) in rows]
    text = report.header(
        "Optimizers of other packages on a sharded model, beside the plain model",
        f"{NUM_RANKS} gloo ranks; {len(ran)} optimizers of {_versions(ran)}",
        *([f"fail on the plain model too: {', '.join(failed)}"] if failed else []),
    )
    counts = [
        Counter(rows[n.name, mode].verdict for n in ran if (n.name, mode) in rows) for mode in modes
    ]
    text += "\n" + report.table(
        ["", *VERDICTS],
        [
            [mode, *(str(count[each]) for each in VERDICTS)]
            for mode, count in zip(modes, counts, strict=True)
        ],
    )
    table, notes = [], []
    for case in ran:
        found = {mode: rows[case.name, mode] for mode in modes if (case.name, mode) in rows}
        table.append([case.name, *(found[m].verdict if m in found else "" for m in modes)])
        for mode, row in found.items():
            if row.verdict != "right":
                draws = (
                    "draws random numbers for each parameter that it sees; " if case.draws else ""
                )
                detail = " ".join(row.detail.split())[:200] + _of_itself(row)
                notes.append(f"- {case.name}, {mode}: {row.verdict}. {draws}{detail}\n")
    return f"{text}\n{report.table(['', *modes], table)}\n{''.join(notes)}"


_MARK = "<!-- printed by benchmarks.optimizers -->"


def _of_itself(row: _Row) -> str:
    text = f"; the plain model differs from itself by {row.amplified:.1e}"
    return text if row.amplified else ""


def _write_page(page: Path, cases: Sequence[Case], results: Results) -> None:
    """Write the table of the default granularity anew, between the two marks of the page."""
    rows = results.read()
    ran = [case for case in cases if (case.name, "element") in rows]
    groups: dict[str, list[list[str]]] = {}
    reasons = []
    size = sum(param.nbytes for param in MixedNet().parameters())
    for case in ran:
        row, (module, _, name) = rows[case.name, "element"], case.name.partition(".")
        columns = groups.setdefault(module, [[], [], []])
        if row.verdict not in ("right", "rounding"):
            columns[2].append(name)
        elif row.nbytes:
            columns[1].append(f"{name} ({row.nbytes / size:.2g})")
        else:
            columns[0].append(name)
        if row.verdict == "rounding":
            reasons.append(f"- {case.name} amplifies rounding{_of_itself(row).replace(';', ':')}\n")
        elif row.verdict != "right":
            reason = row.detail.split(". ")[0] + _of_itself(row)
            reasons.append(f"- {case.name}: {row.verdict}. {reason}\n")
    head = ["package", "right, gathers nothing", "right, gathers", "not right"]
    table = report.table(
        head, [[name, *map(", ".join, found)] for name, found in sorted(groups.items())]
    )
    failed = [case.name for case in cases if (case.name, PLAIN) in rows]
    text = (
        f"{len(ran)} optimizers of {_versions(ran)}; {NUM_RANKS} ranks, the default granularity, "
        f"{date.today()}. {', '.join(failed)} fail on the plain model, as they are called here.\n\n"
    )
    before, _, after = page.read_text().split(_MARK)
    parts = (before, f"\n{text}{table}\n{''.join(reasons)}", after)
    page.write_text(_MARK.join(parts))


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, run, report."""
    parser = report.make_parser(__doc__)
    parser.add_argument("--results", type=Path, required=True, metavar="FILE")
    parser.add_argument("--modes", default="element,param,fsdp2")
    parser.add_argument("--names", default="", help="parts of names, comma separated")
    parser.add_argument("--jobs", type=int, default=1, help="optimizers at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none later")
    parser.add_argument("--no-runs", action="store_true", help="print what stands in the file")
    parser.add_argument("--page", type=Path, help="a page of docs whose table is written anew")
    arguments = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    parts, modes = arguments.names.split(","), arguments.modes.split(",")
    cases = [case for case in all_cases() if any(part in case.name for part in parts)]
    results = Results(arguments.results)
    if not arguments.no_runs:
        context = multiprocessing.get_context("fork")
        until = time.monotonic() + arguments.seconds
        workers = [
            context.Process(target=_work, args=(cases, modes, results, until))
            for _ in range(arguments.jobs)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    if arguments.page:
        _write_page(arguments.page, cases, results)
    else:
        report.emit(_render(cases, results), arguments.output)
