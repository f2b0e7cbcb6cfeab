"""Pickles are read without running code, and what is not right in a file is named."""

from __future__ import annotations

import argparse
import os
import pickle
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from composable_shard import load_checkpoint
from composable_shard.peers.pickles import Inert, read_pickle
from composable_shard.peers.zips import read_torch_file
from tests.peers.model import PeerModel, two_groups
from tests.peers.test_continue import fixture


class _ForgedCall:
    """What a forged file would have called."""

    def __init__(self, function: Any, *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


class _CountedClass:
    """A class of a program: to look it up and to build it would be seen."""

    built = 0

    def __new__(cls) -> _CountedClass:
        _CountedClass.built += 1
        return super().__new__(cls)


@pytest.mark.parametrize(
    "call",
    [
        _ForgedCall(os.mkdir, "made"),
        _ForgedCall(eval, "open('made', 'w')"),
        _ForgedCall(exec, "import os; os.mkdir('made')"),
        _ForgedCall(__import__, "shutil"),
    ],
)
def test_functions_of_python_are_refused_by_name(
    call: _ForgedCall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is called, and the message says which function was asked for."""
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"weight": torch.ones(2)}, "optimizer": call}, "forged.pt")
    with pytest.raises(ValueError, match=r"asks for '.*', which no checkpoint needs"):
        load_checkpoint("forged.pt", nn.Linear(2, 1))
    assert not Path("made").exists()


def test_other_classes_become_inert_objects() -> None:
    """Their names, arguments and attributes are kept; the classes are not looked up."""
    value = _CountedClass()
    value.rate = 0.5  # type: ignore[attr-defined] # as objects of users have attributes
    arguments = argparse.Namespace(lr=0.1)
    before = _CountedClass.built
    found = read_pickle(pickle.dumps([value, arguments]), "a pickle")
    assert _CountedClass.built == before
    assert all(isinstance(each, Inert) for each in found)
    assert [each.attributes for each in found] == [{"rate": 0.5}, {"lr": 0.1}]
    assert found[0].origin.endswith("test_pickles._CountedClass")


def test_attributes_can_not_move_a_tensor_to_another_file(tmp_path: Path) -> None:
    """A pickle that gives a tensor attributes could name any file of the machine."""
    path = tmp_path / "tensor.pt"
    torch.save(torch.ones(2), path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in entries if name.endswith("data.pkl"))
    state = pickle.dumps({"spans": ()}, 2)[2:-1]
    entries[name] = entries[name][:-1] + state + b"b."  # BUILD
    with zipfile.ZipFile(path, "w") as archive:
        for key, data in entries.items():
            archive.writestr(key, data)
    with pytest.raises(ValueError, match="attributes of a tensor"):
        read_torch_file(path)


def test_views_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    """Transposed, cut, expanded, empty and scalar tensors, and two of one storage."""
    base = torch.arange(60.0).view(5, 12)
    values = {
        "whole": base,
        "transposed": base.t(),
        "cut": base[1:4, 3:7],
        "steps": base[::2, ::3],
        "expanded": torch.ones(3, 1).expand(3, 4),
        "empty": base[:0],
        "scalar": torch.tensor(2.5),
        "narrow": base.bfloat16()[2],
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    path = tmp_path / "views.pt"
    torch.save({"model": values}, path)
    model = nn.Module()
    for name, value in values.items():
        model.register_buffer(name, torch.zeros(value.shape, dtype=value.dtype))
    load_checkpoint(path, model)
    for name, value in values.items():
        assert torch.equal(getattr(model, name), value), name


@pytest.mark.parametrize("cut", [1, 200, 3000])
def test_file_that_is_cut_off_is_named(cut: int, tmp_path: Path) -> None:
    """A file without its end is an error, and the model stays as it was."""
    data = (fixture("ddp-torch") / "checkpoint.pt").read_bytes()
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(data[:-cut])
    _assert_refused(path, "checkpoint.pt")


def _assert_refused(path: Path, match: str, model: nn.Module | None = None) -> None:
    model = model or PeerModel()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(two_groups(model), lr=1.0)
    with pytest.raises(ValueError, match=match):
        load_checkpoint(path, model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state


def _copy_of_fixture(name: str, target: Path) -> Path:
    shutil.copytree(fixture(name), target)
    return next(each for each in target.iterdir() if each.is_dir())


@pytest.mark.parametrize("stage", ["stage2", "stage3"])
def test_missing_rank_of_deepspeed_is_named(stage: str, tmp_path: Path) -> None:
    """All ranks' partitions are needed."""
    tag = _copy_of_fixture(f"{stage}-fp32-deepspeed", tmp_path / "run")
    (tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    _assert_refused(tmp_path / "run", r"files of 1 ranks, and they are of \[2\] ranks")


def test_files_of_two_tags_are_named(tmp_path: Path) -> None:
    """A rank's file of another save has another number of steps."""
    tag = _copy_of_fixture("stage2-fp32-deepspeed", tmp_path / "run")
    _change_step(tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    _assert_refused(tmp_path / "run", "files of several checkpoints: 'step' of")


def _change_step(path: Path) -> None:
    """Write 4 steps where 3 are, in place: both are one float of the same size."""
    content = read_torch_file(path)
    step = content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"]
    (span,) = step.spans
    with open(path, "r+b") as file:
        file.seek(span.offset)
        file.write(struct.pack("<f", 4.0))


def test_other_groups_are_named_on_both_sides() -> None:
    """An optimizer of one group can't take the state of two."""
    model = PeerModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    expected = "has 2 groups of 3 and 5 parameters, and the one here has 1 group of 10 parameters"
    with pytest.raises(ValueError, match=expected):
        load_checkpoint(fixture("ddp-torch") / "checkpoint.pt", model, optimizer)


def test_other_shapes_are_named_on_both_sides() -> None:
    """Nothing is loaded if a parameter has another shape."""
    model = PeerModel()
    model.up = nn.Linear(6, 14)
    expected = r"shape \(15, 6\), the model has \(14, 6\)"
    _assert_refused(fixture("stage3-fp32-deepspeed"), expected, model)


def test_rename_maps_the_names_of_the_files() -> None:
    """A function or a dict; without it the names that don't fit are named."""
    model = PeerModel()
    model.lower = model._modules.pop("down")
    path = fixture("ddp-torch") / "checkpoint.pt"
    with pytest.raises(ValueError, match=r"missing: lower.bias.*unexpected: down.bias"):
        load_checkpoint(path, model)
    loaded = load_checkpoint(
        path, model, rename=lambda name: name.removeprefix("module.").replace("down", "lower")
    )
    found = torch.load(path, weights_only=True)["model"]
    assert torch.equal(model.lower.weight, found["module.down.weight"])
    assert loaded.taken == ("model", "step")
    assert loaded.left == ("optimizer", "scheduler", "epoch")
    names = {name: name.removeprefix("module.").replace("down", "lower") for name in found}
    load_checkpoint(path, model, rename=names)
