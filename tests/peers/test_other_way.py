"""Runs of ours, converted and continued by what reads neutral forms."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import state_dict as functions
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.nn.parallel import DistributedDataParallel

from composable_shard import load_checkpoint
from composable_shard.__main__ import main
from composable_shard.conversion import convert
from tests.harness.assertions import assert_equal
from tests.harness.ranks import run_ranks
from tests.peers import model as run
from tests.peers.resume_elsewhere import train_and_save
from tests.peers.test_continue import fixture


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint of two ranks after three steps, and the values after three more."""
    path = tmp_path_factory.mktemp("run")
    return path, run_ranks(2, train_and_save, path)[0]


def _unlike() -> tuple[run.PeerModel, torch.optim.AdamW, Any]:
    """Return a run whose values and options are others."""
    torch.manual_seed(1)
    model = run.PeerModel()
    optimizer = torch.optim.AdamW(run.two_groups(model), lr=1.0)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.25)


def _resume_with_ddp(path: Path) -> dict[str, Tensor]:
    model, optimizer, scheduler = _unlike()
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    assert state["step"] == run.NUM_STEPS
    wrapped = DistributedDataParallel(model)
    run.take_steps(wrapped, optimizer, scheduler, run.NUM_STEPS, dist.get_rank())
    return dict(model.state_dict())


def _resume_with_fsdp2(path: Path) -> dict[str, Tensor]:
    model, *_ = _unlike()
    for each in (model.up, model.down, model):
        fsdp2(each)
    optimizer = torch.optim.AdamW(run.two_groups(model), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.25)
    states = functions.get_state_dict(model, optimizer)
    state = {
        "model": states[0],
        "optimizer": states[1],
        "scheduler": scheduler.state_dict(),
        "step": 0,
    }
    dcp.load(state, checkpoint_id=path)
    functions.set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    scheduler.load_state_dict(state["scheduler"])
    assert state["step"] == run.NUM_STEPS
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
        run.take_steps(model, optimizer, scheduler, run.NUM_STEPS, dist.get_rank())
    options = functions.StateDictOptions(full_state_dict=True)
    return functions.get_model_state_dict(model, options=options)


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_a_converted_run_goes_on(
    to: str, saved: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    """DDP from a file, FSDP2 from DCP, each by torch's functions alone; every bit is ours."""
    path, expected = saved
    convert(path, tmp_path / to, to)
    resume = {"torch": _resume_with_ddp, "dcp": _resume_with_fsdp2}[to]
    for found in run_ranks(2, resume, tmp_path / to):
        assert found.keys() >= expected.keys()
        for name, value in expected.items():
            assert_equal(found[name], value, name)


def test_deepspeeds_form_has_the_layout_that_deepspeed_writes(
    saved: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    """Files, keys, shapes and dtypes of what DeepSpeed itself has written of the same run.

    `python -m tests.peers.resume_elsewhere` lets DeepSpeed load it.
    """
    convert(saved[0], tmp_path, "deepspeed")
    theirs = fixture("universal2-deepspeed") / "universal"
    ours = tmp_path / (tmp_path / "latest_universal").read_text()
    assert ours.name == "global_step3_universal"
    expected, found = _described(theirs), _described(ours)
    # DeepSpeed's converter writes all others, too, which its engine does not read.
    trained = {name: each for name, each in expected.items() if set(each) > {"fp32.pt"}}
    assert expected.keys() - trained.keys() == {
        *("frozen.weight", "frozen.bias", "offset", "head.weight")
    }
    assert found == trained
    main_file = torch.load(ours / "mp_rank_00_model_states.pt", weights_only=True)
    their_main = torch.load(theirs / "mp_rank_00_model_states.pt", weights_only=True)
    for key in ("param_shapes", "shared_params", "lr_scheduler", "global_steps", "dp_world_size"):
        assert main_file[key] == their_main[key], key
    assert main_file["module"].keys() == {"frozen.weight", "frozen.bias", "offset"}


def _described(path: Path) -> dict[str, dict[str, Any]]:
    """Return keys, shapes and dtypes in each parameter's files."""
    found: dict[str, dict[str, Any]] = {}
    for file in path.glob("zero/*/*.pt"):
        value = torch.load(file, weights_only=True)
        tensor = value["param"] if isinstance(value, dict) else value
        keys = sorted(value) if isinstance(value, dict) else None
        described = (keys, tuple(tensor.shape), tensor.dtype)
        found.setdefault(file.parent.name, {})[file.name] = described
    return found


@pytest.mark.parametrize("to", ["checkpoint", "dcp", "deepspeed", "torch"])
def test_each_form_is_read_back(
    to: str,
    saved: tuple[Path, dict[str, Tensor]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By our own reader, with all that it had: every bit, now and after three steps."""
    words = ["convert", str(saved[0]), str(tmp_path / "there"), "--to", to]
    assert main(words) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'there'}; not written: rng\n"
    runs = [_unlike() for _ in range(2)]
    for path, (model, optimizer, scheduler) in zip(
        (saved[0], tmp_path / "there"), runs, strict=True
    ):
        loaded = load_checkpoint(path, model, optimizer, scheduler=scheduler)
        assert loaded.step == 3
        assert {"model", "optimizer", "scheduler", "step"} <= set(loaded.taken)
        assert loaded.left == ()
    for first in (3, 6):
        for name, value in runs[0][0].state_dict().items():
            assert_equal(runs[1][0].state_dict()[name], value, name)
        for each in runs:
            run.take_steps(*each, first, 0)


class TestWhatDeepSpeedHasNoPlaceFor:
    """It is refused by name, and nothing is written."""

    def _refused(self, path: Path, state: dict[str, Any], text: str) -> None:
        torch.save(state, path / "run.pt")
        with pytest.raises(ValueError, match=text):
            convert(path / "run.pt", path / "there", "deepspeed")
        assert not (path / "there").exists()

    def _state(self) -> dict[str, Any]:
        weight = torch.ones(2, 3)
        values = {"exp_avg": weight, "exp_avg_sq": weight, "step": torch.tensor(3.0)}
        return {
            "model": {"a": weight, "b": weight.clone()},
            "optimizer": {
                "state": {"a": dict(values), "b": dict(values)},
                "param_groups": [{"lr": 1.0, "params": ["a", "b"]}],
            },
        }

    def test_numbers_of_steps_that_differ(self, tmp_path: Path) -> None:
        """DeepSpeed counts once for all."""
        state = self._state()
        state["optimizer"]["state"]["b"]["step"] = torch.tensor(2.0)
        self._refused(tmp_path, state, r"'b' has taken .*2.* steps and 'a' .*3")

    def test_state_of_another_shape(self, tmp_path: Path) -> None:
        """As Adafactor has."""
        state = self._state()
        state["optimizer"]["state"]["a"]["row"] = torch.ones(2)
        self._refused(tmp_path, state, r"the state \['row'\] of 'a' is no tensor")

    def test_weights_of_other_dtypes(self, tmp_path: Path) -> None:
        """Master weights are fp32."""
        state = self._state()
        state["model"]["a"] = torch.ones(2, 3, dtype=torch.float64)
        self._refused(tmp_path, state, r"'a' is torch.float64.*trains fp32 weights")

    def test_names_that_lead_elsewhere(self, tmp_path: Path) -> None:
        """A name becomes a directory."""
        state = self._state()
        state["model"]["../a"] = state["model"].pop("a")
        state["optimizer"]["state"]["../a"] = state["optimizer"]["state"].pop("a")
        state["optimizer"]["param_groups"][0]["params"] = ["../a", "b"]
        self._refused(tmp_path, state, r"'\.\./a' can't be the name of a directory")

    def test_an_optimizer_without_state(self, tmp_path: Path) -> None:
        """Nor no optimizer, nor several."""
        state = self._state()
        state["optimizer"]["state"] = {}
        self._refused(tmp_path, state, "the optimizer has no state")
        several = self._state()
        several["optimizer"] = {"x": several["optimizer"], "y": several["optimizer"]}
        self._refused(tmp_path, several, "has 2 optimizers")
        del several["optimizer"]
        self._refused(tmp_path, several, "has 0 optimizers")

    def test_a_directory_that_is_there(self, tmp_path: Path) -> None:
        """It stays as it is."""
        torch.save(self._state(), tmp_path / "run.pt")
        convert(tmp_path / "run.pt", tmp_path / "there", "deepspeed")
        with pytest.raises(ValueError, match="global_step0_universal exists"):
            convert(tmp_path / "run.pt", tmp_path / "there", "deepspeed")


def test_parameters_without_state_get_zeros(tmp_path: Path) -> None:
    """Those of a group that no gradient has reached, as DeepSpeed has them."""
    weight = torch.full((2, 3), 2.0).bfloat16()
    values = {"exp_avg": weight, "exp_avg_sq": weight, "step": torch.tensor(3.0)}
    state = {
        "model": {"a": weight, "b": weight.clone()},
        "optimizer": {"state": {"a": values}, "param_groups": [{"params": ["a", "b"]}]},
        "epoch": 1,
    }
    torch.save(state, tmp_path / "run.pt")
    assert convert(tmp_path / "run.pt", tmp_path, "deepspeed") == ["epoch"]
    folder = tmp_path / "global_step0_universal" / "zero"
    for name, expected in (("a", 2.0), ("b", 0.0)):
        found = torch.load(folder / name / "exp_avg.pt", weights_only=True)["param"]
        assert_equal(found, torch.full((2, 3), expected), name)
        assert torch.load(folder / name / "step.pt", weights_only=True).item() == 3
