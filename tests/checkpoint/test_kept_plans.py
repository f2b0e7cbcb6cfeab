"""A plan is kept from save to save, and made anew when a rank holds something else."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable_shard import FlatShard, fully_shard, load_checkpoint, save_checkpoint
from composable_shard.checkpoint import writer
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed


def _make_stepped(width: int = 6) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    model.register_buffer("count", torch.zeros(1))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    _train_on(model, optimizer)
    return model, optimizer


def _train_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    width = model[0].in_features  # type: ignore[index]
    model(torch.ones(2, width) * (dist.get_rank() + 1)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Yield a list that gets an entry for each plan that is made anew."""
    made: list[int] = []
    plan_anew = writer._plan_anew

    def note(*args: Any, **options: Any) -> Any:
        made.append(1)
        return plan_anew(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "_plan_anew", note)
        yield made


def _local_values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    params = list(model.parameters())
    moments = [each for p in params for each in optimizer.state[p].values()]
    found = [x._local if isinstance(x, FlatShard) else x for x in [*params, *moments]]
    return [each.detach().clone() for each in found]


@distributed(2)
@pytest.mark.parametrize("async_op", [False, True])
def test_a_second_save_has_the_bytes_of_one_that_is_planned(tmp_path: Path, async_op: bool) -> None:
    """Of another step's values, after which a load gives them back."""
    model, optimizer = _make_stepped()
    folders = []
    with _counted() as made:
        for step in (1, 2, 3):
            _train_on(model, optimizer)
            rng = torch.get_rng_state()
            saved = save_checkpoint(
                tmp_path / "kept", model, optimizer, step=step, async_op=async_op
            )
            folders.append(saved if isinstance(saved, Path) else saved.wait())
            assert_equal(torch.get_rng_state(), rng)
    assert len(made) == 1
    expected = _local_values(model, optimizer)
    planned = save_checkpoint(tmp_path / "planned", model, optimizer, step=3)
    assert isinstance(planned, Path)
    names = sorted(os.listdir(planned))
    assert sorted(os.listdir(folders[-1])) == names
    for name in names:
        assert (folders[-1] / name).read_bytes() == (planned / name).read_bytes(), name
    other = _make_stepped()
    load_checkpoint(tmp_path / "kept", *other)
    for found, wanted in zip(_local_values(*other), expected, strict=True):
        assert_equal(found, wanted)


@distributed(2)
def test_a_plan_is_kept_while_generators_draw(tmp_path: Path) -> None:
    """The text of Python's has numbers of more or fewer digits then; a load gives it back."""
    model, optimizer = _make_stepped()
    before, lengths = random.getstate(), set()
    try:
        with _counted() as made:
            for step in range(1, 6):
                for _ in range(90 * step + dist.get_rank()):
                    random.random()
                save_checkpoint(tmp_path, model, optimizer, step=step)
                lengths.add(len(str(random.getstate())))
        assert len(made) == 1 < len(lengths)
        expected = [random.random() for _ in range(3)]
        load_checkpoint(tmp_path, model, optimizer)
        assert [random.random() for _ in range(3)] == expected
    finally:
        random.setstate(before)


def _add_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    param = next(model.parameters())
    optimizer.state[param]["seen"] = torch.tensor(3.0)


def _add_buffer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.register_buffer("other", torch.ones(2))


def _grow_buffer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.count = torch.zeros(2)


def _widen_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    param = next(model.parameters())
    state = optimizer.state[param]
    state["exp_avg"] = state["exp_avg"].double()


@distributed(2)
@pytest.mark.parametrize("change", [_add_state, _add_buffer, _grow_buffer, _widen_state])
def test_a_plan_is_made_anew_when_tensors_change(
    tmp_path: Path, change: Callable[[nn.Module, torch.optim.Optimizer], None]
) -> None:
    """One more, one of another shape, one of another dtype: a load gets what is there."""
    model, optimizer = _make_stepped()
    save_checkpoint(tmp_path, model, optimizer, step=1)
    change(model, optimizer)
    with _counted() as made:
        save_checkpoint(tmp_path, model, optimizer, step=2)
        save_checkpoint(tmp_path, model, optimizer, step=3)
    assert len(made) == 1
    other = _make_stepped()
    change(*other)
    load_checkpoint(tmp_path, *other)
    for found, wanted in zip(_local_values(*other), _local_values(model, optimizer), strict=True):
        assert_equal(found, wanted.to(found.dtype))  # a load casts to the parameter's


@distributed(2)
def test_a_plan_is_made_anew_when_one_rank_holds_something_else(tmp_path: Path) -> None:
    """All ranks plan, though only rank 0's `extra`, which alone is saved, has another tensor."""
    model, optimizer = _make_stepped()
    save_checkpoint(tmp_path, model, optimizer, step=1, extra={"seen": torch.zeros(1)})
    with _counted() as made:
        numel = 1 if dist.get_rank() else 3
        save_checkpoint(tmp_path, model, optimizer, step=2, extra={"seen": torch.ones(numel)})
    assert len(made) == 1
    assert_equal(load_checkpoint(tmp_path, model, optimizer).extra["seen"], torch.ones(3))


@distributed(2)
def test_a_save_of_another_model_or_path_is_planned(tmp_path: Path) -> None:
    """Two models that take turns, then one of them into another directory."""
    pairs = [_make_stepped(), _make_stepped(8)]
    with _counted() as made:
        for step in (1, 2):
            for number, pair in enumerate(pairs):
                save_checkpoint(tmp_path / str(number), *pair, step=step)
        save_checkpoint(tmp_path / "other", *pairs[1], step=2)
    assert len(made) == 5
    for number, (model, optimizer) in enumerate(pairs):
        expected = _local_values(model, optimizer)
        _train_on(model, optimizer)
        load_checkpoint(tmp_path / str(number), model, optimizer)
        for found, wanted in zip(_local_values(model, optimizer), expected, strict=True):
            assert_equal(found, wanted)


@distributed(2)
def test_a_relative_path_follows_the_working_directory(tmp_path: Path) -> None:
    """Of rank 0: a kept plan has the directory that it had before.

    Other ranks may work anywhere, as where there is nothing any more.
    """
    model, optimizer = _make_stepped()
    before = Path.cwd()
    try:
        for name in ("one", "two"):
            (tmp_path / name).mkdir(exist_ok=True)
            os.chdir(tmp_path / name)
            if dist.get_rank():
                gone = tmp_path / f"gone {name}"
                gone.mkdir()
                os.chdir(gone)
                gone.rmdir()
            saved = save_checkpoint("runs", model, optimizer, step=1)
            assert isinstance(saved, Path)
            assert saved.parent == tmp_path / name / "runs"
    finally:
        os.chdir(before)


@distributed(2)
def test_values_that_differ_are_found_though_a_plan_is_kept(tmp_path: Path) -> None:
    """The step, a number of the optimizer, the copies of a parameter that no unit manages."""
    model, optimizer = _make_stepped()
    save_checkpoint(tmp_path, model, optimizer, step=1)
    rank = dist.get_rank()
    with pytest.raises(ValueError, match=r"different values of step: \[2, 3\]"):
        save_checkpoint(tmp_path, model, optimizer, step=2 + rank)
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)
    with pytest.raises(ValueError, match="must give their optimizers and schedulers the same"):
        save_checkpoint(tmp_path, model, optimizer, step=2)
    optimizer.param_groups[0]["lr"] = 0.1
    save_checkpoint(tmp_path, model, optimizer, step=2)

    model.plain = nn.Parameter(torch.zeros(2), requires_grad=False)
    save_checkpoint(tmp_path, model, optimizer, step=3)
    with torch.no_grad():
        model.plain.fill_(rank)
    with pytest.raises(ValueError, match="different tensors have one name: 'plain'"):
        save_checkpoint(tmp_path, model, optimizer, step=4)


@distributed(2)
def test_an_error_of_one_rank_is_raised_on_all_and_the_next_save_is_right(tmp_path: Path) -> None:
    """What a rank can't describe is raised in the exchange that compares the plans."""
    model, optimizer = _make_stepped()
    save_checkpoint(tmp_path, model, optimizer, step=1)
    if dist.get_rank():
        optimizer.param_groups[0]["odd"] = object()
    with pytest.raises(ValueError, match=r"on ranks \[1\].*'optimizer/param_groups/0/odd'"):
        save_checkpoint(tmp_path, model, optimizer, step=2)
    optimizer.param_groups[0].pop("odd", None)
    save_checkpoint(tmp_path, model, optimizer, step=2)
    expected = _local_values(model, optimizer)
    _train_on(model, optimizer)
    assert load_checkpoint(tmp_path, model, optimizer).step == 2
    for found, wanted in zip(_local_values(model, optimizer), expected, strict=True):
        assert_equal(found, wanted)
