"""Checkpoints: a run goes on as if nothing had happened, also while one is being written."""

from __future__ import annotations

import atexit
import ctypes
import os
import random
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard import (
    FlatShard,
    ShardedGradScaler,
    ShardingStrategy,
    clip_grad_norm_,
    find_checkpoint,
    fully_shard,
    load_checkpoint,
    save_checkpoint,
)
from composable_shard.checkpoint import CheckpointSave, LoadedCheckpoint, files
from composable_shard.comm import get_host_group
from composable_shard.comm.trace import count_collectives
from tests.harness.assertions import assert_equal
from tests.harness.memory import peak_bytes
from tests.harness.ranks import device, distributed, run_processes, run_ranks
from tests.programs.models import Net, every_granularity, rank_input, shard_blocks, shard_root


class _Run:
    """A model with all that belongs to its training, on 12 examples per step."""

    def __init__(self, dropout: float = 0.0, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(Net(), nn.Dropout(dropout))
        shard_blocks(self.model[0], **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4], gamma=0.3)
        self.scaler = ShardedGradScaler(device().type, init_scale=64.0, growth_interval=3)
        self.step = 0

    def train(self, num_steps: int) -> list[float]:
        """Return the mean losses over all ranks."""
        losses = []
        for _ in range(num_steps):
            generator = torch.Generator(device()).manual_seed(self.step)
            batch = torch.randn(12, 5, generator=generator)
            share = batch.chunk(dist.get_world_size())[dist.get_rank()]
            loss = self.model(share).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.model, 0.5)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.step += 1
            total = loss.detach().double() / dist.get_world_size()
            dist.all_reduce(total)
            losses.append(total.item())
        return losses

    def save(self, path: Path, **options: Any) -> Any:
        options = {"scheduler": self.scheduler, "scaler": self.scaler, **options}
        return save_checkpoint(path, self.model, self.optimizer, step=self.step, **options)

    def load(self, path: Path, **options: Any) -> LoadedCheckpoint:
        options = {"scheduler": self.scheduler, "scaler": self.scaler, **options}
        loaded = load_checkpoint(path, self.model, self.optimizer, **options)
        self.step = loaded.step
        return loaded

    def values(self) -> list[Tensor]:
        """Return copies of this rank's part of everything that training changes."""
        state = [v for each in self.optimizer.state.values() for v in each.values()]
        tensors = [*self.model.state_dict().values(), *state]
        locals_ = [t.to_local() if isinstance(t, FlatShard) else t for t in tensors]
        return [local.detach().clone() for local in locals_]


# --- resuming ---


def _train_through(path: Path, dropout: float = 0.0, **options: Any) -> list[float]:
    run = _Run(dropout, **options)
    run.train(3)
    extra = {"position": (3, "epoch"), "order": torch.arange(5), "seen": Counter({7: 2})}
    run.save(path, extra=extra)
    return [*run.train(4), torch.rand(()).item() + random.random()]


def _resume_run(path: Path, dropout: float = 0.0, **options: Any) -> list[float]:
    run = _Run(dropout, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a scheduler before the optimizer's first step
        loaded = run.load(path)
    assert (loaded.step, loaded.path) == (3, find_checkpoint(path))
    assert loaded.is_rng_restored == (loaded.world_size == dist.get_world_size())
    assert loaded.extra["position"] == (3, "epoch")
    assert loaded.extra["seen"] == Counter({7: 2})
    assert_equal(loaded.extra["order"], torch.arange(5, device="cpu"))
    return [*run.train(4), torch.rand(()).item() + random.random()]


@pytest.mark.fast
@distributed(2, on_device=True)
def test_resuming_at_the_same_world_size_is_bitwise(tmp_path: Path) -> None:
    """Losses with dropout, learning rates, loss scales, and the numbers drawn afterwards."""
    expected = _train_through(tmp_path, dropout=0.2)
    torch.manual_seed(5)
    assert _resume_run(tmp_path, dropout=0.2) == expected


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_resuming_at_another_world_size(world_size: int, tmp_path: Path) -> None:
    """Only the order of additions differs, also where parameters are cut in other ways."""
    expected = run_ranks(2, _train_through, tmp_path, granularity=every_granularity)[0][:-1]
    options: dict[str, Any] = {
        1: {},
        3: {"strategy": ShardingStrategy.SHARD_OPTIM},
        4: {"granularity": every_granularity},
    }[world_size]
    for losses in run_ranks(world_size, _resume_run, tmp_path, **options):
        assert losses[:-1] == pytest.approx(expected, abs=1e-6)


def _save_without_scaler(path: Path) -> None:
    run = _Run()
    run.train(1)
    run.save(path, scaler=None)


def _load_without_scaler(path: Path) -> None:
    run = _Run()
    with pytest.warns(UserWarning, match="no state of a scaler"):
        run.load(path)
    run.train(1)


def test_a_missing_scaler_is_tolerated(tmp_path: Path) -> None:
    """S3.6: With a warning, and at another world size."""
    run_ranks(2, _save_without_scaler, tmp_path)
    run_ranks(3, _load_without_scaler, tmp_path)


@distributed(2)
def test_several_optimizers_and_schedulers(tmp_path: Path) -> None:
    """As a list or a dict; the same ones have to be passed on loading."""
    model = Net()
    shard_blocks(model)
    halves = list(model.parameters())[:3], list(model.parameters())[3:]
    kinds = torch.optim.SGD, torch.optim.Adagrad
    optimizers = {str(n): kinds[n](half, lr=0.1) for n, half in enumerate(halves)}
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers.values()]
    model(rank_input(3, 5)).sum().backward()
    for optimizer, scheduler in zip(optimizers.values(), schedulers, strict=True):
        optimizer.step()
        scheduler.step()
    save_checkpoint(tmp_path, model, optimizers, scheduler=schedulers, step=1)
    sums = [optimizers["1"].state[param]["sum"].to_local().clone() for param in halves[1]]
    for optimizer, scheduler in zip(optimizers.values(), schedulers, strict=True):
        optimizer.step()
        scheduler.step()
    load_checkpoint(tmp_path, model, list(optimizers.values()), scheduler=schedulers)
    assert [o.param_groups[0]["lr"] for o in optimizers.values()] == [0.05, 0.05]
    for param, expected in zip(halves[1], sums, strict=True):
        assert_equal(optimizers["1"].state[param]["sum"].to_local(), expected)
    with pytest.raises(
        ValueError, match=r"the same optimizers .* has 2 optimizers called '0', '1'; got "
    ):
        load_checkpoint(tmp_path, model, optimizers["0"])
    load_checkpoint(tmp_path, model)  # for an evaluation


# --- costs ---


def _save_large(path: Path) -> None:
    model = nn.Linear(512, 1024)
    shard_root(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    with count_collectives() as log:
        save_checkpoint(path, model, optimizer, step=1)
    assert sum(event.nbytes for event in log.events) < 4096  # names and shapes are compared


def _load_large(path: Path) -> int:
    model = nn.Linear(512, 1024)
    shard_root(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with count_collectives() as log, peak_bytes() as memory:
        nbytes = load_checkpoint(path, model, optimizer).nbytes_read
    assert sum(event.nbytes for event in log.events) < 4096  # names and shapes are compared
    # The shards on their way, the optimizer's new state, and a chunk or two.
    part = 4 * 512 * 1024 / dist.get_world_size()
    assert memory.peak < 3 * part + (1 << 19), memory
    assert memory.current < 2 * part + (1 << 16), memory
    return nbytes


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 2), (2, 1), (1, 4), (4, 3), (2, 3)])
def test_each_rank_reads_its_own_part(saved_by: int, loaded_by: int, tmp_path: Path) -> None:
    """Of the model twice, of an optimizer without state once; and at most a chunk at each end."""
    run_ranks(saved_by, _save_large, tmp_path)
    folder = find_checkpoint(tmp_path)
    assert folder is not None
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors")) * 4 // 3
    counts = run_ranks(loaded_by, _load_large, tmp_path)
    small = 70_000  # headers, states of random number generators
    num_cuts = 0 if saved_by % loaded_by == 0 else 4 * (loaded_by - 1)
    for nbytes in counts:
        assert abs(nbytes - total / loaded_by) < small + 2 * 4 * (1 << 18) * bool(num_cuts)
    assert sum(counts) < total + loaded_by * small + 2 * num_cuts * (1 << 18)


def _wide() -> nn.Sequential:
    """Return equal units that dwarf everything else."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)], nn.BatchNorm1d(256))
    for each in model[:6]:
        fully_shard(each)
    fully_shard(model)
    return model


def _save_wide(path: Path) -> None:
    model = _wide()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 256)).sum().backward()
    optimizer.step()
    save_checkpoint(path / "whole", model, optimizer, step=1)
    save_checkpoint(path / "model", model, step=1)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_model_on_meta_takes_its_shards_and_one_unit(world_size: int, tmp_path: Path) -> None:
    """Of memory; and its bytes are read straight from the files, also into a fresh optimizer."""
    run_ranks(2, _save_wide, tmp_path)
    run_ranks(world_size, _load_wide, tmp_path)


def _load_wide(path: Path) -> None:
    expected = _wide()
    expected_optimizer = torch.optim.AdamW(expected.parameters())
    load_checkpoint(path / "whole", expected, expected_optimizer)
    unit = 4 * (256 * 256 + 256)
    part, slack = 6 * unit / dist.get_world_size(), 1 << 17
    for folder, num_states in (("model", 0), ("whole", 2)):
        with torch.device("meta"):
            model = _wide()
        params = list(model.parameters())
        optimizer = torch.optim.AdamW(params) if num_states else None
        with peak_bytes() as memory:
            loaded = load_checkpoint(path / folder, model, optimizer)
        assert memory.peak <= (1 + num_states) * part + unit + slack, memory
        assert memory.current <= (1 + num_states) * part + slack, memory
        cuts = 2 * (1 << 18) * 6 * (1 + num_states) * (dist.get_world_size() != 2)
        assert loaded.nbytes_read <= (1 + num_states) * part + cuts + slack
        assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
        for name, value in expected.state_dict().items():
            found = model.state_dict()[name]
            is_shard = isinstance(value, FlatShard)
            assert_equal(
                found.to_local() if is_shard else found, value.to_local() if is_shard else value
            )
    for each, used in ((model, optimizer), (expected, expected_optimizer)):
        each(torch.ones(2, 256)).sum().backward()
        used.step()
    for param, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert_equal(param.to_local(), other.to_local())


# --- in the background ---


@contextmanager
def _slow_writes() -> Iterator[threading.Event]:
    """Let saves write nothing until the event is set."""
    may_write = threading.Event()
    create = files.create

    def wait_and_create(path: Path) -> Any:
        assert may_write.wait(30)
        return create(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "create", wait_and_create)
        try:
            yield may_write
        finally:
            may_write.set()


@distributed(2, 3)
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """What is saved is what was there at the call, and training is as without."""
    run, undisturbed = _Run(), _Run()
    run.train(2)
    expected_values, expected_losses = run.values(), undisturbed.train(8)[2:]
    with _slow_writes() as may_write:
        save = run.save(tmp_path, async_op=True)
        assert isinstance(save, CheckpointSave)
        losses = run.train(3)
        assert not save.is_done
        assert find_checkpoint(tmp_path) is None
        may_write.set()
        losses += run.train(3)
        assert save.wait() == find_checkpoint(tmp_path)
    assert losses == expected_losses
    assert run.load(tmp_path).step == 2
    for value, expected in zip(run.values(), expected_values, strict=True):
        assert_equal(value, expected)


@distributed(2)
def test_only_the_thread_that_writes_leaves_cores_to_others(tmp_path: Path) -> None:
    """On Linux; a save that training waits for keeps its priority."""
    run, found = _Run(), []
    run.train(1)
    create = files.create

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def note_and_create(path: Path) -> Any:
        found.append(niceness())
        return create(path)

    usual = niceness()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "create", note_and_create)
        run.save(tmp_path)
        assert set(found) == {usual}
        found.clear()
        run.save(tmp_path, async_op=True).wait()
        assert set(found) == {19 if sys.platform == "linux" else usual}
    assert niceness() == usual


@distributed(2)
def test_one_save_waits_for_the_one_before(tmp_path: Path) -> None:
    """So that there is one copy at a time; loading waits too."""
    run = _Run()
    run.train(1)
    for _ in range(6):
        run.save(tmp_path, async_op=True, keep_last=2)
        run.train(1)
    assert run.load(tmp_path).step == 6
    names = sorted(each.name for each in tmp_path.iterdir())
    assert names == [".lock", "latest", "step_00000005", "step_00000006"]


@distributed(2)
def test_the_next_save_copies_into_the_memory_of_the_last(tmp_path: Path) -> None:
    """What has the same size; each checkpoint has the values at its call."""
    run = _Run()
    run.train(1)
    places, expected = [], []
    for _ in range(2):
        expected.append(run.values())
        run.save(tmp_path, async_op=True).wait()
        staging = get_host_group().swap_staging({})
        get_host_group().swap_staging(staging)
        places.append({name: copy.data_ptr() for name, copy in staging.items() if copy.numel()})
        run.train(1)
    same = [name for name, place in places[0].items() if places[1].get(name) == place]
    assert {name.partition("/")[0] for name in same} >= {"model", "optimizer"}
    assert set(places[0]) - set(same) <= {"rng/0", "rng/1"}  # texts, of other lengths
    for step, values in zip((2, 1), reversed(expected), strict=True):
        assert run.load(tmp_path / f"step_{step:08}").step == step
        for value, wanted in zip(run.values(), values, strict=True):
            assert_equal(value, wanted)


@distributed(2)
def test_the_memory_of_a_save_in_inference_mode_serves_one_outside(tmp_path: Path) -> None:
    """As an evaluation may save."""
    run = _Run()
    run.train(1)
    with torch.inference_mode():
        run.save(tmp_path, async_op=True).wait()
    run.train(1)
    expected = run.values()
    run.save(tmp_path, async_op=True).wait()
    assert run.load(tmp_path).step == 2
    for value, wanted in zip(run.values(), expected, strict=True):
        assert_equal(value, wanted)


@distributed(2)
def test_an_error_in_the_background_is_told_once(tmp_path: Path) -> None:
    """By `wait`, or else by the next save, on all ranks, and the one after that works."""
    run = _Run()
    run.train(1)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(files, "write", _disk_full)
        save = run.save(tmp_path, async_op=True)
        with pytest.raises(RuntimeError, match=r"on ranks \[1\]: .*rank_1_of_2.*No space left"):
            save.wait()
        second = run.save(tmp_path, async_op=True)
        dist.barrier()
        with pytest.raises(RuntimeError, match=r"the save before this call failed.*No space left"):
            run.save(tmp_path)
        assert second.is_done
    assert list(tmp_path.iterdir()) == [tmp_path / ".lock"]
    run.save(tmp_path)
    assert run.load(tmp_path).step == 1


class _Counted(nn.Linear):
    """Has extra state that takes a collective."""

    def get_extra_state(self) -> Any:
        count = torch.ones(1)
        dist.all_reduce(count)
        return count

    def set_extra_state(self, state: Any) -> None:
        assert_equal(state, torch.full((1,), float(dist.get_world_size())))


@distributed(2, timeout=30)
def test_an_error_that_one_rank_waited_for_is_raised_before_the_program_runs(
    tmp_path: Path,
) -> None:
    """On all ranks, none of which then is alone in the collective of a module's state."""
    model = _Counted(4, 4)
    fully_shard(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write", _disk_full)
        save = save_checkpoint(tmp_path, model, step=1, async_op=True)
        assert isinstance(save, CheckpointSave)
        while not save.is_done:
            time.sleep(0.01)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="No space left"):
            save.wait()
    with pytest.raises(RuntimeError, match=r"on ranks \[1\]: the save before this call failed"):
        save_checkpoint(tmp_path, model, step=1)
    save_checkpoint(tmp_path, model, step=1)
    assert load_checkpoint(tmp_path, model).step == 1


def _disk_full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def _end_during_a_save(folder: Path) -> int:
    """Let a fork of this process end while it saves; return its exit status."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status, rank = [1], int(os.environ["RANK"])
    atexit.register(lambda: os._exit(status[0]))  # before gloo's threads abort now and then
    try:
        store = dist.FileStore(str(folder / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        create = files.create
        files.create = lambda path: (time.sleep(0.2), create(path))[1]
        model = fully_shard(nn.Linear(3, 3))
        save = save_checkpoint(folder, model, step=7, async_op=True)
        dist.destroy_process_group()
        assert not save.is_done
        if rank:
            save.wait()
        status[0] = 0
    except BaseException:
        traceback.print_exc()
    ctypes.pythonapi.Py_Exit(1)  # the interpreter's own end, which waits for threads
    raise AssertionError


def test_a_process_that_ends_waits_for_its_save(tmp_path: Path) -> None:
    """Also if nobody does, and on a group of its own: the default group may be gone by then."""
    ranks = [{"RANK": str(rank)} for rank in range(2)]
    assert run_processes(ranks, _end_during_a_save, tmp_path) == [0, 0]
    assert find_checkpoint(tmp_path) == tmp_path / "step_00000007"
