"""A save in the background issues its copies from the device, and waits for none of them."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composable_shard import FlatShard, fully_shard, load_checkpoint, save_checkpoint
from composable_shard.checkpoint import CheckpointSave, staging
from composable_shard.comm import get_host_group
from tests.common import device
from tests.device.running import on_device
from tests.harness.assertions import assert_equal

_DTYPES = (torch.float64, torch.bfloat16, torch.bool)
_Stepping = tuple[nn.Module, torch.optim.Optimizer]


def _make_stepping() -> _Stepping:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(3))).to(device.NAME)
    model.register_buffer("seen", torch.full((3,), 2.0, device=device.NAME))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, capturable=True)  # steps there, too
    _step_once((model, optimizer))
    return model, optimizer


def _step_once(run: _Stepping) -> None:
    model, optimizer = run
    model(torch.ones(4, 24, device=device.NAME)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model.seen.add_(1)  # type: ignore[operator]  # the buffer


def _tensors_of(run: _Stepping) -> list[Tensor]:
    model, optimizer = run
    states = [each for param in model.parameters() for each in optimizer.state[param].values()]
    found = [*model.parameters(), *model.buffers(), *states]
    return [each._local if isinstance(each, FlatShard) else each for each in found]


@contextmanager
def _held_up() -> Iterator[threading.Event]:
    """Let the thread of a save begin when the event is set."""
    may_begin, make = threading.Event(), staging.LateCopies.make

    def wait(copies: Any) -> None:
        may_begin.wait(10)
        make(copies)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging.LateCopies, "make", wait)
        yield may_begin


@on_device(num_ranks=2)
def test_a_save_has_the_values_of_its_call() -> None:
    """The next step overwrites them; a save copies into the memory of the one before.

    The thread of the save comes before the copies, or, if it is held up, after the next step.
    """
    device.configure("slow_compute", delay_us=3000)
    run = _make_stepping()
    group = get_host_group()
    path = Path(group.broadcast(tempfile.mkdtemp() if group.is_first else None))
    kept: list[dict[str, int]] = []
    for step, is_held_up in ((1, True), (2, False), (3, True)):
        expected = [each.cpu().clone() for each in _tensors_of(run)]
        with _held_up() as may_begin:
            if not is_held_up:
                may_begin.set()
            device.take_host_waits()
            save = save_checkpoint(path, *run, step=step, async_op=True)
            waits = device.take_host_waits()
            _step_once(run)
            may_begin.set()
            assert isinstance(save, CheckpointSave)
            save.wait()
        if step == 3:  # the first makes a group; of the second the thread waits meanwhile
            # Two comparisons in training's group, and the steps, all at once
            assert waits == {"copy to the device": 2, "copy to the host": 3}
        staged = group.swap_staging({})
        group.swap_staging(staged)
        kept.append({name: each.data_ptr() for name, each in staged.items()})
        assert all(each.is_pinned() for name, each in staged.items() if "rng" not in name)
        loaded = _make_stepping()
        load_checkpoint(path, *loaded)
        for found, wanted in zip(_tensors_of(loaded), expected, strict=True):
            assert_equal(found.cpu(), wanted)
    assert kept[0] == kept[1] == kept[2]
    group.gather(None)
    if group.is_first:
        shutil.rmtree(path)


@on_device
def test_pinned_memory_is_shared_by_tensors() -> None:
    """In blocks that are full but for their ends, of no more than what is needed."""
    likes = [torch.ones(numel, dtype=dtype) for numel in (1, 33, 5, 64) for dtype in _DTYPES]
    total = sum(-(-each.nbytes // 64) * 64 for each in likes)
    for block in (1 << 28, 192):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(staging, "_BLOCK_NBYTES", block)
            memory = staging._PinnedMemory(total)
            found = [memory.take(each) for each in likes]
        for number, (each, like) in enumerate(zip(found, likes, strict=True)):
            assert (each.shape, each.dtype) == (like.shape, like.dtype)
            assert each.is_pinned()
            each.fill_(number % 2)
        assert [each.tolist() for each in found] == [
            torch.full_like(like, number % 2).tolist() for number, like in enumerate(likes)
        ]
        blocks = {each.untyped_storage().data_ptr(): each for each in found}
        sizes = [each.untyped_storage().nbytes() for each in blocks.values()]
        assert sizes == [total] if block > total else max(sizes) <= max(block, 512)


@on_device
def test_a_save_takes_pinned_memory_for_what_is_new_alone() -> None:
    """A buffer of another shape, one more, then a model that comes from the host."""
    run = _make_stepping()
    model, _ = run
    taken: list[int] = []
    alloc_host = staging.alloc_host

    def count(numel: int, *args: Any, **options: Any) -> Tensor:
        taken.append(numel)
        return alloc_host(numel, *args, **options)

    with tempfile.TemporaryDirectory() as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "alloc_host", count)

        def save() -> list[int]:
            taken.clear()
            made = save_checkpoint(path, *run, step=1, async_op=True)
            assert isinstance(made, CheckpointSave)
            made.wait()
            return [*taken]

        save()
        assert save() == []
        model.seen = torch.full((5,), 2.0, device=device.NAME)
        assert save() == [64]
        model.register_buffer("other", torch.ones(40, device=device.NAME))
        assert save() == [192]
        model.register_buffer("third", torch.ones(3))
        assert save() == []
        model.third = torch.full((3,), 4.0, device=device.NAME)
        assert save() == [64]
        loaded = _make_stepping()
        loaded[0].register_buffer("other", torch.zeros(40, device=device.NAME))
        loaded[0].register_buffer("third", torch.zeros(3, device=device.NAME))
        loaded[0].seen = torch.zeros(5, device=device.NAME)
        load_checkpoint(path, *loaded)
        for found, wanted in zip(_tensors_of(loaded), _tensors_of(run), strict=True):
            assert_equal(found.cpu(), wanted.cpu())
