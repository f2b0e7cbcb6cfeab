"""`python -m composable_shard`: estimate, inspect, convert, in one process."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

from composable_shard import (
    ShardingStrategy,
    StateDictOptions,
    __version__,
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    load_checkpoint,
    save_checkpoint,
)
from composable_shard.__main__ import main
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed, run_ranks

pytestmark = pytest.mark.fast


def make_model() -> nn.Module:
    """Return a model with a tied weight, a buffer and a bf16 parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 5))
    model[2].weight = model[0].weight
    return model


def make_model_and_batch() -> tuple[nn.Module, Tensor]:
    """Return a model and what one rank computes with."""
    return make_model(), torch.zeros(4, 6)


@contextmanager
def alone() -> Iterator[None]:
    """Let DCP run in one process, of which it warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")
        yield


def make_nothing() -> int:
    """Return what is no model."""
    return 3


def train_once(model: nn.Module) -> torch.optim.Optimizer:
    """Take a step with options that no default has."""
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters()}, {"params": model[3].parameters(), "lr": 0.5}],
        betas=(0.5, 0.75),
    )
    model(torch.arange(24.0).view(4, 6)).square().sum().backward()
    optimizer.step()
    return optimizer


@distributed(2)
def test_save(tmp_path: Path) -> None:
    """Save what the other tests read, sharded in two."""
    model = make_model()
    fully_shard(model)
    save_checkpoint(tmp_path / "run", model, train_once(model), step=7, extra={"seen": 3})


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that two ranks saved."""
    path: Path = tmp_path_factory.mktemp("saved")
    test_save(world_size=2, tmp_path=path)
    return path / "run"


def loaded(path: Path, **options: Any) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Return the state of model and optimizer in a checkpoint, and its step."""
    model = make_model()
    groups = [{"params": model[0].parameters()}, {"params": model[3].parameters()}]
    optimizer = torch.optim.AdamW(groups)
    step = load_checkpoint(path, model, optimizer, **options).step
    return dict(model.state_dict()), get_optimizer_state_dict(model, optimizer), step


def assert_same_tree(found: Any, expected: Any, what: str) -> None:
    """Compare nested values, tensors bit by bit."""
    assert type(found) is type(expected), what
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), what
        for key in expected:
            assert_same_tree(found[key], expected[key], f"{what}.{key}")
    elif isinstance(expected, Tensor):
        assert_equal(found, expected, what)
    else:
        assert found == expected, what


def test_inspect_tells_what_is_there(saved_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Step, ranks, tensors by dtype, optimizers."""
    run_command("inspect", saved_run)
    text = capsys.readouterr().out
    assert "step 7, saved by 2 ranks" in text
    assert "2 files" in text
    assert "all checksums match" in text
    assert "model: 10 tensors, 108 elements (9 float32, 1 int64)" in text
    assert "optimizer '': AdamW" in text
    run_command("inspect", saved_run, "--tensors", "--step", "7")
    assert "\n  model/3.weight: 5x6 float32, " in capsys.readouterr().out


def test_inspect_finds_damage(
    saved_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One bit, in one line that names the file."""
    folder = tmp_path / "step_00000007"
    folder.mkdir()
    for file in next(saved_run.glob("step_*")).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    data = bytearray((folder / "rank_1_of_2.safetensors").read_bytes())
    data[8 + int.from_bytes(data[:8], "little") + 40] ^= 1  # of the model
    (folder / "rank_1_of_2.safetensors").write_bytes(data)
    assert _fails(["inspect", tmp_path], capsys).count("rank_1_of_2.safetensors is damaged") == 1
    assert "is damaged" in _fails(["convert", tmp_path, tmp_path / "x", "--to", "dcp"], capsys)
    assert not (tmp_path / "x").exists()


def test_to_safetensors_and_back(saved_run: Path, tmp_path: Path) -> None:
    """The model's tensors, a tied one once, in files of a size; then a checkpoint of them."""
    path = tmp_path / "files"
    run_command("convert", saved_run, path, "--to", "safetensors", "--max-shard-size", "200")
    assert (path / "model.safetensors.index.json").exists()
    found = {
        name: value
        for file in path.glob("*.safetensors")
        for name, value in load_file(file).items()
    }
    model, _, _ = loaded(saved_run)
    assert found.keys() == model.keys() - {"2.weight"}
    for name, value in found.items():
        assert_equal(value, model[name], name)
    run_command("convert", path, tmp_path / "again", "--to", "checkpoint", "--step", "9")
    again = make_model()
    assert load_checkpoint(tmp_path / "again", again, strict=False).step == 9
    assert_same_tree(dict(again.state_dict()), model, "model")


def test_to_dcp_and_back(saved_run: Path, tmp_path: Path) -> None:
    """Model and optimizer: `dcp.load` reads them, and a checkpoint of them is the first one."""
    path = tmp_path / "dcp"
    run_command("convert", saved_run, path, "--to", "dcp")
    expected = loaded(saved_run)
    model = make_model()
    optimizer = train_once(model)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    with alone():
        dcp.load(state, checkpoint_id=path, no_dist=True)
    assert_same_tree(dict(state["model"]), expected[0], "model")
    assert_same_tree(state["optimizer"], expected[1], "optimizer")
    run_command("convert", path, tmp_path / "back", "--to", "checkpoint")
    found = loaded(tmp_path / "back")
    assert_same_tree(found[0], expected[0], "model")
    assert_same_tree(found[1], expected[1], "optimizer")
    run_command("convert", path, tmp_path / "files", "--to", "safetensors")
    assert_equal(
        load_file(tmp_path / "files" / "model.safetensors")["3.weight"], expected[0]["3.weight"]
    )


def _load_converted(path: Path, expected: list[dict[str, Any]]) -> None:
    """Load on a rank, and compare with the whole state."""
    model = make_model()
    fully_shard(model)
    groups = [{"params": model[0].parameters()}, {"params": model[3].parameters()}]
    optimizer = torch.optim.AdamW(groups)
    load_checkpoint(path, model, optimizer)
    options = StateDictOptions(full_state_dict=True, rank0_only=False)
    states = (
        get_model_state_dict(model, options=options),
        get_optimizer_state_dict(model, optimizer, options=options),
    )
    for found, own in zip(states, expected, strict=True):
        assert_same_tree(dict(found), own, "state")


def test_ranks_load_what_was_converted(tmp_path: Path) -> None:
    """A checkpoint that was a directory of DCP, in a training script's way: model and "optim"."""
    plain = make_model()
    optimizer = train_once(plain)
    states = [dict(plain.state_dict()), get_optimizer_state_dict(plain, optimizer)]
    with alone():
        content = {"model": states[0], "optim": states[1]}
        dcp.save(content, checkpoint_id=tmp_path / "dcp", no_dist=True)
    run_command("convert", tmp_path / "dcp", tmp_path / "run", "--to", "checkpoint")
    run_ranks(2, _load_converted, tmp_path / "run", states)


def run_command(*words: object) -> None:
    """Run a command that ends well."""
    assert main([str(word) for word in words]) == 0


def _fails(words: list[object], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a command that ends with an error prints: no traceback, one line at the end."""
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    assert caught.value.code == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text.splitlines()[-1]


HERE = __name__
MODEL = f"{HERE}:make_model"
TWO = ["--world-size", "2"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["estimate", "--model", MODEL], "expected --world-size or --mesh-shape"),
        (["estimate", "--model", MODEL, "--world-size", "0"], "of at least 1, got '0'"),
        (["estimate", "--model", MODEL, "--mesh-shape", "2,a"], "of at least 1, got 'a'"),
        (
            ["estimate", "--model", MODEL, *TWO, "--memory", "much"],
            "expected --memory as a positive number of bytes or a text such as '5GB'",
        ),
        (["estimate", "--model", MODEL, *TWO, "--optimizer", "x"], "optimizer"),
        (["estimate", "--model", f"{HERE}:make_nothing", *TWO], "expected a model from"),
        (["estimate", "--model", f"{HERE}:gone", *TWO], "has no attribute 'gone'"),
        (["estimate", "--model", "nowhere", *TWO], "expected MODULE:FUNCTION"),
        (["estimate", "--model", "no.where:make", *TWO], "No module named 'no'"),
        (
            ["estimate", "--model", MODEL, "--units", "0", "--world-size", "9" * 20],
            "OverflowError: cannot",
        ),
        (["estimate", "--hf-config", "nowhere", *TWO], "there is no file nowhere"),
        (["estimate", *TWO], "one of the arguments --hf-config --model is required"),
        (["inspect", "nowhere"], "expected a checkpoint, a directory of"),
        (["convert", "nowhere", "x", "--to", "dcp"], "expected a checkpoint, a directory of"),
        (["convert", "nowhere", "x", "--to", "zip"], "invalid choice: 'zip'"),
        ([], "the following arguments are required: command"),
    ],
)
def test_bad_values_are_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last line says what was expected."""
    line = _fails(words, capsys)
    assert message in line
    assert "error: " in line


def test_a_configuration_that_its_library_refuses_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever class its error has."""
    pytest.importorskip("transformers", reason="needs transformers")
    path = tmp_path / "config.json"
    sizes = {"model_type": "llama", "hidden_size": 30, "num_attention_heads": 7}
    for text, message in (
        ("{not json", "not a valid JSON file"),
        ('{"model_type": "nothing"}', "`nothing`"),
        (json.dumps(sizes), "not a multiple of the number of attention heads"),
    ):
        path.write_text(text)
        assert message in _fails(["estimate", "--hf-config", path, *TWO], capsys)


def test_a_target_is_not_overwritten(
    saved_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The source itself, and a directory of DCP."""
    assert "another directory" in _fails(
        ["convert", saved_run, saved_run, "--to", "safetensors"], capsys
    )
    run_command("convert", saved_run, tmp_path / "dcp", "--to", "dcp")
    assert "choose another" in _fails(
        ["convert", saved_run, tmp_path / "dcp", "--to", "dcp"], capsys
    )
    size = ["--to", "safetensors", "--max-shard-size", "x"]
    assert "expected max_shard_size as a positive number of bytes" in _fails(
        ["convert", saved_run, tmp_path / "y", *size], capsys
    )
    with alone():
        dcp.save({"weights": {"a": torch.ones(2)}}, checkpoint_id=tmp_path / "other", no_dist=True)
    text = _fails(["convert", tmp_path / "other", tmp_path / "z", "--to", "safetensors"], capsys)
    assert "found ['weights']" in text


@pytest.mark.parametrize("name", ["make_model", "make_model_and_batch"])
def test_estimate_takes_any_model(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A function that makes one, on the meta device; with a batch, activations are counted."""
    run_command("estimate", "--model", f"{HERE}:{name}", *TWO, "--units", "0,3")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:6]] == [each.name for each in ShardingStrategy]
    start = lines[0].index("activations") - 4
    has_some = any(letter in "123456789" for letter in lines[2][start : start + 15])
    assert has_some == (name == "make_model_and_batch")


def test_help_keeps_lines_and_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """The examples stand on lines of their own."""
    for words in (["--help"], ["estimate", "--help"], ["convert", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 0
        text = capsys.readouterr().out
        if words == ["--help"]:
            assert "\n    python -m composable_shard inspect run\n" in text
        elif words[0] == "estimate":
            assert "\nWithout --strategy each strategy is a row." in text
        elif words[0] == "convert":
            assert "\nsafetensors  of Hugging Face" in text
        else:
            assert text == f"{__version__}\n"
