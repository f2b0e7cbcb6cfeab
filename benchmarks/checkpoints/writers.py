"""Two jobs that save into one directory, links and odd files in it, disks that fail.

    python -m benchmarks.checkpoints writers

First, two jobs of one rank save ten times each into one directory, at the same time. All that a
save has returned must be there afterwards, with the job's own values, unless the job's own
`keep_last` has removed it. Then two ranks save and load in directories with links, leftovers and
files of other kinds, on a full disk, on one that is read-only, and on a mount that goes away
meanwhile. Whatever happens, both ranks must get the same outcome in time, the checkpoint that was
there before must be found, and nothing outside of the directory may change. Mounts need root.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.report import emit, header, make_parser, table
from composable_shard import fully_shard, load_checkpoint, save_checkpoint
from composable_shard.checkpoint import files, writer

NUM_SAVES = 10
DEADLINE_S = 60.0
SIZE = 40_000  # elements of the model: more than the full disk has room for


def make_model(value: float) -> nn.Module:
    """Return a model with this value in each element."""
    model = nn.Linear(SIZE // 4, 4, bias=False)
    with torch.no_grad():
        model.weight.fill_(value)
    return model


def value_of(path: Path) -> float:
    """Return the value that a checkpoint gives each element of a model; NaN if they differ.

    In a child: a process that has loaded hands the name of its run on to those forked from it.
    """

    def load() -> float:
        model = make_model(-1.0)
        load_checkpoint(path, model)
        low, high = (float(each) for each in model.weight.detach().aminmax())
        return low if low == high else float("nan")

    return float(join([fork(load)])[0])


def fork(function: Callable[[], Any]) -> tuple[int, Any]:
    """Run a function in a child process; return its id, and a file with what it returns."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with contextlib.redirect_stderr(None), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                text = str(function())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        with os.fdopen(writing, "w") as file:
            file.write(text)
        os._exit(0)
    os.close(writing)
    return pid, os.fdopen(reading)


def join(children: list[tuple[int, Any]]) -> list[str]:
    """Return what the children have returned, "no end" for one that has not by the deadline."""
    deadline, texts = time.monotonic() + DEADLINE_S, []
    for pid, file in children:
        while not (ended := os.waitpid(pid, os.WNOHANG)[0]) and time.monotonic() < deadline:
            time.sleep(0.005)
        if not ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        with file:
            texts.append(file.read() if ended else "no end")
    return texts


# Two savers


@dataclass
class Race:
    """Two jobs in one directory."""

    name: str
    steps: tuple[int, int] = (0, 0)  # the first of each job
    keep_last: int | None = None
    async_op: bool = False
    kills: bool = False  # the first job dies in each save
    stops: bool = False  # the first job stops for ever in a save


RACES = [
    Race("the same steps"),
    Race("other steps", steps=(0, 100)),
    Race("the same steps, keep_last=2", keep_last=2),
    Race("other steps, keep_last=2", steps=(0, 100), keep_last=2),
    Race("the same steps, in the background", async_op=True),
    Race("the first job dies in its third save", kills=True),
    Race("the first job stops in its third save", stops=True),
]


def end(sign: signal.Signals, *_: object) -> None:
    """Kill or stop this process."""
    os.kill(os.getpid(), sign)


def save_often(race: Race, path: Path, job: int) -> str:
    """Save; return the names and values, and the number of refused saves."""
    writer.LOCK_TIMEOUT_S = 1.0 if race.stops else DEADLINE_S
    saved, refused = {}, 0
    for number in range(NUM_SAVES):
        if job == 0 and number == 2 and (race.kills or race.stops):
            files.rename = partial(end, signal.SIGKILL if race.kills else signal.SIGSTOP)
        value = 1000.0 * (job + 1) + number
        try:
            result = save_checkpoint(
                path,
                make_model(value),
                step=race.steps[job] + number,
                keep_last=race.keep_last,
                async_op=race.async_op,
            )
        except RuntimeError as error:
            refused += "by the save of another job" in str(error)
            continue
        saved[result.wait().name if race.async_op else result.name] = value  # type: ignore[union-attr]
    return json.dumps([saved, refused])


def run_race(race: Race, folder: Path) -> list[str]:
    """Return a row of the table."""
    path = folder / "run"
    children = [fork(lambda job=job: save_often(race, path, job)) for job in (0, 1)]  # type: ignore[misc]
    if race.stops:
        second = join(children[1:])
        os.kill(children[0][0], signal.SIGKILL)
        texts = [*join(children[:1]), *second]
    else:
        texts = join(children)
    saves = kept = refused = lost = wrong = 0
    for text in filter(None, texts):
        saved, number = json.loads(text)
        saves, refused = saves + len(saved), refused + number
        names = list(saved)[-race.keep_last :] if race.keep_last else list(saved)
        for name in names:
            if (path / name / "metadata.json").is_file():
                kept += 1
                wrong += value_of(path / name) != saved[name]
            else:
                lost += 1
    found = "yes" if value_of(path) >= 1000 else "no"
    return [race.name, *map(str, (saves, kept, refused, lost, wrong)), found]


# Places


@dataclass
class Place:
    """A directory, and what a save of step 2 in it must do; step 1 is there.

    Attributes:
        name: Of the case.
        expected: In the save's error; "" if it succeeds.
        prepare: Makes the directory what it is; gets the run's, and one outside.
        meanwhile: Runs when the first file is written.
        mount: Options of a file system of its own.
        loads: In the error of loading step 1; "" if it is loaded.
    """

    name: str
    expected: str
    prepare: Callable[[Path, Path], object] = lambda run, outside: None
    meanwhile: Callable[[Path], None] | None = None
    mount: str = ""
    loads: str = ""


def link(name: str, target: str) -> Callable[[Path, Path], None]:
    """Return what puts a link to something outside in a place."""

    def prepare(run: Path, outside: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(outside / target)

    return prepare


def make(name: str, kind: str) -> Callable[[Path, Path], None]:
    """Return what puts a file, a folder or a pipe in a place in the run's directory."""

    def prepare(run: Path, outside: Path) -> None:
        (run / name).unlink(missing_ok=True)
        {"file": Path.touch, "folder": Path.mkdir, "pipe": os.mkfifo}[kind](run / name)

    return prepare


def replace_file(name: str, kind: str) -> Callable[[Path, Path], None]:
    """Return what puts something else in the place of a file of the earlier checkpoint."""

    def prepare(run: Path, outside: Path) -> None:
        path = run / "step_00000001" / name
        if kind == "link":
            (outside / name).write_bytes(path.read_bytes())
        path.unlink()
        path.symlink_to(outside / name) if kind == "link" else os.mkfifo(path)

    return prepare


def in_temporary(run: Path, outside: Path) -> None:
    folder = run / ".tmp_step_00000002"
    (folder / "folder").mkdir(parents=True)
    (folder / "folder" / "link").symlink_to(outside)
    (folder / "file").touch()


def move_run(run: Path, outside: Path) -> None:
    run.rename(run.parent / "elsewhere")
    run.symlink_to(run.parent / "elsewhere")


def make_read_only(run: Path, outside: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(run)], check=True)


def clocks_back(run: Path, outside: Path) -> None:
    for path in (run, *run.rglob("*")):
        os.utime(path, (time.time() + 3600,) * 2)


def unmount(run: Path) -> None:
    subprocess.run(["umount", "-l", str(run)], check=True)


DATA = "rank_0_of_1.safetensors"
PLACES = [
    Place("nothing special", ""),
    Place("the directory is a link to another", "", move_run),
    Place("`latest` is a link to a file", "", link("latest", "precious")),
    Place("`latest` is a link to a folder", "", link("latest", "folder")),
    Place("`latest` is a link to nothing", "", link("latest", "nothing")),
    Place("`latest` is a folder", "is a directory", make("latest", "folder")),
    Place("`latest` is a pipe", "", make("latest", "pipe")),
    Place("`.tmp_latest` is a link to a file", "", link(".tmp_latest", "precious")),
    Place("`.tmp_latest` is a folder", "", make(".tmp_latest", "folder")),
    Place("`.tmp_step_...` is a link to a folder", "", link(".tmp_step_00000002", "folder")),
    Place("`.tmp_step_...` has a folder, a file and a link", "", in_temporary),
    Place("`.tmp_step_...` is a file", "", make(".tmp_step_00000002", "file")),
    Place("the step's name is a link to a folder", "", link("step_00000002", "folder")),
    Place("the step's name is a file", "", make("step_00000002", "file")),
    Place("`.lock` is a link to a file", ".lock", link(".lock", "precious")),
    Place("`.lock` is a folder", ".lock", make(".lock", "folder")),
    Place("a data file of step 1 is a link", "", replace_file(DATA, "link"), loads="is a link"),
    Place("a data file of step 1 is a pipe", "", replace_file(DATA, "pipe"), loads="regular"),
    Place("metadata of step 1 is a link", "", replace_file("metadata.json", "link"), loads="link"),
    Place("a full disk", "No space left", mount="size=300k"),
    Place("a read-only disk", "Read-only", make_read_only, mount="size=4m"),
    Place("a mount that goes away in the save", "No such", mount="size=4m", meanwhile=unmount),
    Place("ranks in other working directories", "", lambda run, outside: os.chdir(run.parent)),
    Place("a clock an hour back", "", clocks_back),
]


def save_and_load(place: Place, folder: Path, rank: int) -> str:
    """Save step 2 by one rank of two, and load both; return what came of it."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=DEADLINE_S / 3),
    )
    run = folder / "run"
    if place.name.startswith("ranks in other") and rank == 1:
        os.chdir("/")
    if place.meanwhile is not None and rank == 0:
        create = files.create

        def created(path: Path) -> Any:
            place.meanwhile(run)  # type: ignore[misc]
            return create(path)

        files.create = created
    texts = []
    model = make_model(2.0)
    fully_shard(model)
    acts: list[Callable[[], object]] = [
        lambda: save_checkpoint(run, model, step=2),
        lambda: load_checkpoint(run, model),
        lambda: load_checkpoint(run, model, step=1),
    ]
    for act in acts:
        try:
            act()
            texts.append("value " + str(float(model.weight.full_tensor().amax())))
        except (RuntimeError, ValueError) as error:
            texts.append(str(error).replace("\n", " "))
        dist.barrier()
    return "\n".join(texts)


def run_place(place: Place, folder: Path) -> list[str]:
    """Return a row of the table."""
    run, outside = folder / "run", folder / "outside"
    for path in (run, outside / "folder"):
        path.mkdir(parents=True)
    for name in ("precious", "folder/metadata.json"):
        (outside / name).write_text("precious")
    if place.mount:
        subprocess.run(["mount", "-t", "tmpfs", "-o", place.mount, "none", str(run)], check=True)
    join([fork(lambda: save_checkpoint(run, make_model(1.0), step=1))])
    place.prepare(run, outside)
    before = contents(outside)
    started = time.monotonic()
    children = [fork(lambda rank=rank: save_and_load(place, folder, rank)) for rank in (0, 1)]  # type: ignore[misc]
    texts = [text.replace(f"{folder}/", "").split("\n") for text in join(children)]
    seconds = time.monotonic() - started
    if place.mount:
        subprocess.run(["umount", "-l", str(run)], check=False, stderr=subprocess.DEVNULL)
    if len(texts[0]) < 3 or len(texts[1]) < 3:
        return [place.name, str(texts), "", "", "", f"{seconds:.1f}", "NO"]
    saved, newest, earlier = texts[0]
    newest_value = "value 1.0" if place.expected else "value 2.0"
    is_gone = place.meanwhile is not None
    good = [
        place.expected in saved if place.expected else saved == "value 2.0",
        is_gone or newest == newest_value,
        is_gone or (place.loads in earlier if place.loads else earlier == "value 1.0"),
        texts[0] == texts[1],
        contents(outside) == before,
    ]
    cells = ["refused: " + saved[-60:] if place.expected else "saved"]
    cells += [
        "gone with the mount" if is_gone else newest.replace("value ", "step ").removesuffix(".0")
    ]
    cells += ["refused: " + earlier[-40:] if place.loads else "loaded"]
    cells += ["unchanged" if good[4] else "CHANGED", f"{seconds:.1f}"]
    return [place.name, *cells, "yes" if all(good) else f"NO: {texts}"]


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of each file in a directory."""
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases, report."""
    parser = make_parser(__doc__)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--every", type=int, default=1, help="run every n-th case")
    args = parser.parse_args(argv)
    if not args.inside and os.geteuid() == 0 and shutil.which("unshare"):
        # Mounts of its own, which end with it.
        command = [sys.executable, "-m", "benchmarks.checkpoints", *sys.argv[1:], "--inside"]
        os.execvp("unshare", ["unshare", "-m", *command])
    if args.inside:
        sys.argv.remove("--inside")  # the report says what was typed
    torch.set_num_threads(1)
    places = [place for place in PLACES if args.inside or not place.mount]
    with tempfile.TemporaryDirectory() as name:
        folders = (Path(name) / str(number) for number in itertools.count())
        rows = [run_race(race, make_folder(next(folders))) for race in RACES[:: args.every]]
        more = [run_place(place, make_folder(next(folders))) for place in places[:: args.every]]
    text = header(
        "Who may write into a run's directory, and what lies there",
        f"two jobs of one rank, {NUM_SAVES} saves each at the same time; refused: by name, as the "
        "other job holds the lock (after 1 s instead of 300); lost: returned by a save and not "
        "there; wrong: with other values",
    )
    columns = ["two jobs", "saved", "kept", "refused", "lost", "wrong", "the newest is found"]
    text += "\n" + table(columns, rows)
    text += "\nTwo ranks save step 2 and load both, where step 1 is there already:\n\n"
    columns = ["place", "save", "newest", "step 1", "outside", "s", "as expected, on both ranks"]
    text += table(columns, more)
    emit(text, args.output)
    is_good = all(row[4:] == ["0", "0", "yes"] for row in rows)
    return 0 if is_good and all(row[-1] == "yes" for row in more) else 1


def make_folder(path: Path) -> Path:
    """Make a directory, and return it."""
    path.mkdir()
    return path
