"""The tutorials run, as a user would start them."""

from __future__ import annotations

import ast
import csv
import importlib.util
import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import run_processes, run_ranks

pytestmark = pytest.mark.long

TUTORIALS = Path(__file__).parent.parent / "tutorials"
SCRIPT = TUTORIALS / "train_language_model.py"
TINY = ["--layers", "1", "--dim", "64", "--length", "16", "--steps", "6", "--check-steps", "2"]


_kept: list[dict[str, object]] = []


def _run_here(script: Path, arguments: list[str], folder: Path) -> tuple[int, str]:
    """Run the script as this process' program; return its exit code, and what it printed."""
    os.chdir(folder)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    # The compiler asks each tensor for its gradient.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    code, output = 0, io.StringIO()
    with redirect_stdout(output):
        try:
            # Kept, as at the end of a process: torch's DDP may hang where it dies after its group.
            _kept.append(runpy.run_path(str(script), run_name="__main__"))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return code, output.getvalue()


def _run_forked(script: Path, num_ranks: int, folder: Path, *arguments: str) -> str:
    """Run the script as torchrun does, in processes that need no start; return what is printed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(num_ranks),
        "TORCHELASTIC_RUN_ID": "none",  # launched as by torchrun: fully_shard makes the group
    }
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), **common} for rank in range(num_ranks)]
    answers = run_processes(ranks, _run_here, script, list(arguments), folder, timeout=90)
    assert [code for code, _ in answers] == [0] * num_ranks, answers
    return "".join(output for _, output in answers)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_language_model_trains_and_equals_one_process(num_ranks: int, tmp_path: Path) -> None:
    """A small run writes its losses and finds those of one process on the same batches."""
    arguments = [*TINY, "--steps", "3", "--output", str(tmp_path)]
    if num_ranks == 1:
        [(code, output)] = run_processes([{}], _run_here, SCRIPT, arguments, tmp_path, timeout=90)
        assert code == 0, output
    else:
        output = _run_forked(SCRIPT, num_ranks, tmp_path, *arguments, "--loss-chunks", "3")
    assert "largest difference" in output
    with (tmp_path / "loss.csv").open() as file:
        assert len(list(csv.reader(file))) == 4  # a header and three steps
    assert (tmp_path / "loss.png").stat().st_size > 0


def test_the_loss_in_chunks_is_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so are its gradients, where some targets are padding."""
    monkeypatch.syspath_prepend(TUTORIALS)
    story = importlib.import_module("language_model")
    model = story.Transformer(story.ModelConfig(layers=1, dim=64))
    sequences = torch.randint(0, 256, (3, 17), generator=torch.Generator().manual_seed(0))
    sequences[2, 9:] = story.PADDING
    for reduction in ("mean", "sum"):
        results = []
        for model.loss_chunks in (1, 5):
            model.zero_grad()
            loss = story.sequence_loss(model, sequences, reduction)
            loss.backward()
            results.append([loss, *(param.grad.clone() for param in model.parameters())])
        for whole, chunked in zip(*results, strict=True):
            torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-6)


def _interrupt_here(options: list[str], folder: Path) -> tuple[int, str]:
    """Start the job in a fork of this process, and press Ctrl-C once it has taken a step."""
    printed = folder / "printed"
    if not (pid := os.fork()):
        os.setpgid(0, 0)
        with printed.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        code = 1
        try:
            code, output = _run_here(SCRIPT, options, folder)
            os.write(1, output.encode())
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + 80
    while not (folder / "loss.csv").exists() and time.monotonic() < deadline:
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), printed.read_text()
        time.sleep(0.05)
    os.killpg(pid, signal.SIGINT)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), printed.read_text()


@pytest.mark.long
def test_language_model_ends_cleanly_at_ctrl_c(tmp_path: Path) -> None:
    """All ranks stop, say so without a traceback, and leave the losses so far."""
    options = ["--ranks", "2", *TINY, "--steps", "100000", "--output", str(tmp_path)]
    [(code, output)] = run_processes([{}], _interrupt_here, options, tmp_path, timeout=110)
    assert code == 130, output
    assert "stopped by a signal" in output
    assert "Traceback" not in output


def _job(folder: Path, *options: str) -> list[list[str]]:
    """Run the job in this process, which is a rank already; return its losses as written."""
    sys.path.insert(0, str(TUTORIALS))
    story, job, journal = map(importlib.import_module, ["train_language_model", "job", "journal"])
    args = job.parse_args([*TINY, "--output", str(folder), *options])
    world = job.World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    tokens = torch.arange(3000) ** 2 % 251
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(story, "read_text", lambda device: (tokens, tokens[:200]))
        patch.setattr(journal.Journal, "plot", lambda *_: None)
        assert story.train(world, journal.Journal(world, args), args) == 0
    dist.barrier()
    with (folder / "loss.csv").open() as file:
        return list(csv.reader(file))[1:]


def test_language_model_resumes(tmp_path: Path) -> None:
    """Bitwise on as many ranks as before, closely on others; a finished run only reports."""
    whole = run_ranks(2, _job, tmp_path / "whole", "--save-every", "3")[0]
    checkpoints = tmp_path / "whole" / "checkpoints"
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == [".lock", "latest", "step_00000003", "step_00000006"]
    resumed = ["--resume", "--checkpoints", str(checkpoints)]
    assert run_ranks(1, _job, tmp_path / "finished", *resumed)[0] == whole
    shutil.rmtree(checkpoints / "step_00000006")
    assert run_ranks(2, _job, tmp_path / "two", *resumed)[0] == whole
    for num_ranks in (1, 4):
        rows = run_ranks(num_ranks, _job, tmp_path / str(num_ranks), *resumed)[0]
        assert rows[:3] == whole[:3]
        for row, expected in zip(rows, whole, strict=True):
            assert float(row[1]) == pytest.approx(float(expected[1]), abs=1e-6)


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        ("01_quick_start", 2),
        ("02_mix_policies", 2),
        ("03_edit_weights", 1),
        ("03_edit_weights", 2),
        ("04_average_weights", 2),
        ("05_compare_strategies", 2),
        ("06_three_dimensions", 8),
        ("07_resume", 1),
        ("08_train_with_muon", 2),
        ("09_finetune_with_lora", 2),
        ("10_plan_a_large_model", 1),
        ("11_read_a_trace", 2),
        ("12_chunked_loss", 2),
        ("13_generate_and_train", 2),
        pytest.param(
            *("14_llama_in_two_dimensions", 4),
            marks=[
                pytest.mark.ecosystem,
                pytest.mark.skipif(
                    importlib.util.find_spec("transformers") is None, reason="needs transformers"
                ),
            ],
        ),
    ],
)
def test_tutorial_prints_what_its_text_says(name: str, num_ranks: int, tmp_path: Path) -> None:
    """All lines of the expected output come, with their numbers."""
    script = TUTORIALS / f"{name}.py"
    _assert_says(script, _run_forked(script, num_ranks, tmp_path))


@pytest.mark.ecosystem
@pytest.mark.deadline(300)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")
def test_workers_of_ray_resume(tmp_path: Path) -> None:
    """One of two is killed; Ray starts both again. In a process of its own: Ray starts servers."""
    script = TUTORIALS / "16_ray_train.py"
    command = [sys.executable, str(script)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr[-3000:]
    _assert_says(script, ended.stdout)


def _assert_says(script: Path, output: str) -> None:
    """Compare what a script printed with what its text says."""
    expected = (ast.get_docstring(ast.parse(script.read_text())) or "").partition("output")[2]
    lines = [line.strip() for line in expected.splitlines() if line.startswith("    ")]
    assert lines
    printed = [line.strip() for line in output.splitlines()]
    wanted = {_without_digits(line) for line in lines}
    assert_prints([line for line in printed if _without_digits(line) in wanted], lines)


NOTEBOOK = TUTORIALS / "15_in_a_notebook.ipynb"


def _run_cells(codes: list[str]) -> list[str]:
    """Run the code of cells one after another; return what each prints."""
    names: dict[str, object] = {}
    printed = []
    for code in codes:
        output = io.StringIO()
        with redirect_stdout(output):
            exec(code, names)
        printed.append(output.getvalue())
    return printed


def test_the_notebook_prints_what_it_shows() -> None:
    """On one process that nobody told of ranks."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if "outputs" in cell]
    [printed] = run_processes([{}], _run_cells, ["".join(cell["source"]) for cell in cells])
    for cell, output in zip(cells, printed, strict=True):
        shown = ["".join(each.get("text", "")) for each in cell["outputs"]]
        assert_prints(output.splitlines(), "".join(shown).splitlines())


def test_tutorials_are_numbered_and_short() -> None:
    """In the order to read them, none of more than 120 lines; the main job's story has 200."""
    numbered = sorted(TUTORIALS.glob("[0-9]*"))
    assert [path.name[:3] for path in numbered] == [f"{n:02}_" for n in range(1, len(numbered) + 1)]
    scripts = [path for path in (*numbered, SCRIPT) if path.suffix == ".py"]
    lengths = {path.name: len(path.read_text().splitlines()) for path in scripts}
    assert lengths.pop(SCRIPT.name) <= 200
    assert {name: length for name, length in lengths.items() if length > 120} == {}


NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")


def _without_digits(line: str) -> str:
    line = line.replace("affine=True, bias=True", "affine=True")  # older torch shows no bias
    return NUMBER.sub("#", line)


def assert_prints(printed: list[str], shown: list[str]) -> None:
    """Compare words, and numbers to one unit of the last decimal that is shown."""
    assert [*map(_without_digits, printed)] == [*map(_without_digits, shown)]
    pairs = zip(NUMBER.findall("\n".join(printed)), NUMBER.findall("\n".join(shown)), strict=True)
    for found, expected in pairs:
        unit = 10.0 ** -len(expected.partition(".")[2]) if "." in expected else 0
        difference = float(found.replace(",", "")) - float(expected.replace(",", ""))
        assert abs(difference) <= 1.01 * unit, f"{found} instead of {expected} in {printed}"
