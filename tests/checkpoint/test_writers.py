"""Who may write into the directory of a run, and what is never touched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_shard import fully_shard, load_checkpoint, save_checkpoint
from composable_shard.checkpoint import writer
from composable_shard.checkpoint.reader import read_history
from composable_shard.comm import get_host_group, watch
from tests.harness.ranks import distributed, run_processes


def _model(value: float = 0.0) -> nn.Module:
    model = nn.Linear(4, 4)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    return model


def _save_often(path: Path, number_of: str) -> list[str]:
    """Save ten checkpoints of a job of one rank; return the last names, after checking them."""
    job = float(os.environ[number_of])
    saved = []
    for step in range(10):
        saved.append(save_checkpoint(path, _model(job + step), step=step, keep_last=2).name)
    for step in (8, 9):
        model = _model()
        load_checkpoint(path / saved[step], model)
        assert float(model.weight[0, 0].detach()) == job + step
    return saved[-2:]


def test_two_jobs_that_save_into_one_directory_lose_nothing(tmp_path: Path) -> None:
    """They take turns, and keep_last removes the job's own checkpoints only."""
    kept = run_processes([{"JOB": "100"}, {"JOB": "200"}], _save_often, tmp_path, "JOB")
    names = {name for each in kept for name in each}
    assert len(names) == 4
    assert set(os.listdir(tmp_path)) == names | {"latest", ".lock"}


def test_the_name_of_a_removed_checkpoint_may_be_another_runs(tmp_path: Path) -> None:
    """`latest` still lists what was removed after it was written; so runs took one another's."""
    group = get_host_group()
    for run, steps in {"first": (0, 1, 2), "second": (0, 3)}.items():
        group.continue_run(run)
        for step in steps:
            save_checkpoint(tmp_path, _model(step), step=step, keep_last=2)
    runs = {folder.name: read_history(tmp_path)[folder.name] for folder in tmp_path.glob("step_*")}
    assert runs == {
        "step_00000000": "second",
        "step_00000001": "first",
        "step_00000002": "first",
        "step_00000003": "second",
    }


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_is_a_run_of_its_own() -> None:
    """It had its parent's name, so keep_last of both removed each other's checkpoints."""
    run = get_host_group().run
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, get_host_group().run.encode())
        os._exit(0)
    os.waitpid(child, 0)
    found = os.read(reading, 100).decode()
    os.close(reading)
    os.close(writing)
    assert len(found) == 12
    assert found != run == get_host_group().run


@distributed(2)
def test_a_save_after_one_whose_group_failed_gets_another(tmp_path: Path) -> None:
    """One rank's error closed the connections, and every later save of the process failed."""
    model = fully_shard(_model(1.0))
    save_checkpoint(tmp_path, model, step=1)
    group = get_host_group()._group
    assert group is not None
    if dist.get_rank() == 1:
        watch._close(group, "planned")
    dist.barrier()
    with pytest.raises(RuntimeError, match="a collective has failed"):
        save_checkpoint(tmp_path, model, step=2)
    dist.barrier()
    assert get_host_group()._group is not group
    path = save_checkpoint(tmp_path, model, step=3)
    assert load_checkpoint(path, model).step == 3


def _hold_lock(path: Path) -> str:
    """Refuse to wait for a job that holds the lock."""
    lock = writer._Lock(path)
    lock.acquire()
    writer.LOCK_TIMEOUT_S = 0.1
    with pytest.raises(RuntimeError) as caught:
        save_checkpoint(path, _model(), step=1)
    lock.release()
    save_checkpoint(path, _model(), step=1)
    return str(caught.value)


def test_a_job_that_never_ends_its_save_is_named(tmp_path: Path) -> None:
    """After a time limit; a job that has died holds nothing."""
    (text,) = run_processes([{}], _hold_lock, tmp_path)
    assert f"{tmp_path} has been locked for 0.1 s by the save of another job, process " in text
    assert "Give each run a directory of its own" in text


@distributed(2)
def test_nothing_is_written_or_removed_through_a_link(tmp_path: Path) -> None:
    """Leftovers, old checkpoints and the pointer may all be links to other places."""
    outside = tmp_path / "outside"
    run = tmp_path / "run"
    if dist.get_rank() == 0:
        (outside / "step_00000000").mkdir(parents=True)
        run.mkdir()
        for name in ("precious", "step_00000000/metadata.json", "step_00000000/data"):
            (outside / name).write_text("precious")
        (run / ".tmp_step_00000001").symlink_to(outside)
        (run / ".tmp_step_00000003").mkdir()
        (run / ".tmp_step_00000003" / "inner").symlink_to(outside)
        (run / ".tmp_step_00000003" / "folder").mkdir()
        (run / ".tmp_step_00000003" / "folder" / "file").touch()
        (run / ".tmp_latest").symlink_to(outside / "precious")
        (run / "latest").symlink_to(outside / "precious")
        (run / "step_00000000").symlink_to(outside / "step_00000000")
    dist.barrier()
    model = _model(3.0)
    fully_shard(model)
    for step in (1, 2):
        save_checkpoint(run, model, step=step, keep_last=1)
    if dist.get_rank() == 0:
        for name in ("precious", "step_00000000/metadata.json", "step_00000000/data"):
            assert (outside / name).read_text() == "precious"
        assert sorted(os.listdir(run)) == [".lock", "latest", "step_00000002"]
        assert not (run / "latest").is_symlink()


@distributed(2)
def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    """Its target is not emptied."""
    run, precious = tmp_path / "run", tmp_path / "precious"
    if dist.get_rank() == 0:
        precious.write_text("precious")
        run.mkdir()
        (run / ".lock").symlink_to(precious)
    dist.barrier()
    model = _model()
    fully_shard(model)
    with pytest.raises((OSError, RuntimeError), match=r"\.lock"):
        save_checkpoint(run, model, step=1)
    assert precious.read_text() == "precious"


@distributed(2)
def test_a_directory_in_the_place_of_the_pointer_is_named(tmp_path: Path) -> None:
    """Before anything is written."""
    if dist.get_rank() == 0:
        (tmp_path / "latest").mkdir()
    dist.barrier()
    model = _model()
    fully_shard(model)
    with pytest.raises(RuntimeError, match=r"latest is a directory.*remove it"):
        save_checkpoint(tmp_path, model, step=1)
    assert sorted(os.listdir(tmp_path)) == [".lock", "latest"]


@distributed(2)
def test_a_lock_that_is_no_file_is_named(tmp_path: Path) -> None:
    """A pipe opens without an error, and can't be emptied."""
    if dist.get_rank() == 0:
        os.mkfifo(tmp_path / ".lock")
    dist.barrier()
    with pytest.raises(RuntimeError, match=r"\.lock is not a regular file: remove it"):
        save_checkpoint(tmp_path, fully_shard(_model()), step=1)


@distributed(2)
def test_a_step_without_a_name_left_is_refused(tmp_path: Path) -> None:
    """The next name would have had more digits than a load looks for."""
    model = fully_shard(_model())
    if dist.get_rank() == 0:
        (tmp_path / "step_00000002.999999").mkdir()
    dist.barrier()
    with pytest.raises(RuntimeError, match="no name left for step 2: remove some of step_00000002"):
        save_checkpoint(tmp_path, model, step=2)
    assert load_checkpoint(save_checkpoint(tmp_path, model, step=1), model).step == 1


@distributed(2)
def test_ranks_with_different_working_directories_save_one_checkpoint(tmp_path: Path) -> None:
    """A relative path is rank 0's."""
    before = os.getcwd()
    folder = tmp_path / str(dist.get_rank())
    folder.mkdir()
    os.chdir(folder)
    try:
        model = _model(2.0)
        fully_shard(model)
        path = save_checkpoint("run", model, step=1)
        assert path == tmp_path / "0" / "run" / "step_00000001"
        dist.barrier()
        assert os.listdir(tmp_path / "1") == []
    finally:
        os.chdir(before)
    other = _model()
    fully_shard(other)
    load_checkpoint(path, other)
    assert other.weight.detach().full_tensor()[0, 0] == 2.0


_DIFFERENT: dict[str, Any] = {"step": 3, "keep_last": 2, "async_op": True, "path": "other"}


@pytest.mark.parametrize("name", _DIFFERENT)
@distributed(2)
def test_arguments_that_differ_between_ranks_are_refused(name: str, tmp_path: Path) -> None:
    """By name, and nothing is written."""
    model = _model()
    fully_shard(model)
    arguments: dict[str, Any] = {"path": tmp_path / "run", "step": 1}
    if dist.get_rank() == 1:
        arguments[name] = _DIFFERENT[name]
    with pytest.raises(ValueError, match=f"different values of {name}: "):
        save_checkpoint(model=model, **arguments)
    assert not (tmp_path / "run").exists()


@distributed(2)
def test_clocks_that_go_backwards_remove_no_new_checkpoint(tmp_path: Path) -> None:
    """keep_last counts saves in their order, whatever the files' times say."""
    model = _model()
    fully_shard(model)
    for step in (1, 2, 3, 4):
        path = save_checkpoint(tmp_path, model, step=step, keep_last=2)
        if dist.get_rank() == 0:
            os.utime(path / "metadata.json", (10_000 - step, 10_000 - step))
        dist.barrier()
    assert {name for name in os.listdir(tmp_path) if name[0] != "."} == {
        "latest",
        "step_00000003",
        "step_00000004",
    }


@distributed(2)
def test_a_run_that_goes_on_removes_its_old_checkpoints(tmp_path: Path) -> None:
    """A resumed job takes the name of its run over; another leaves its checkpoints alone."""
    model = _model()
    fully_shard(model)
    save_checkpoint(tmp_path, model, step=8)
    if dist.get_rank() == 0:
        lines = (tmp_path / "latest").read_text().replace("8 ", "8 other#").splitlines()
        (tmp_path / "latest").write_text(lines[0].partition("#")[0] + "\n")
    dist.barrier()
    save_checkpoint(tmp_path, model, step=9, keep_last=1)
    assert (tmp_path / "step_00000008").is_dir()
    load_checkpoint(tmp_path, model, step=8)
    save_checkpoint(tmp_path, model, step=10, keep_last=1)
    dist.barrier()
    assert not (tmp_path / "step_00000008").exists()
    assert (tmp_path / "step_00000009").is_dir()
