"""Other libraries' checkpoints in other forms, without ranks and without these libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from composable_shard import load_checkpoint
from composable_shard.conversion import convert, describe_checkpoint
from tests.harness.assertions import assert_equal
from tests.peers.model import NUM_STEPS, PeerModel, peer_batches, peer_loss, two_groups
from tests.peers.test_continue import fixture


def _loaded_run(path: Path) -> tuple[PeerModel, torch.optim.AdamW]:
    model = PeerModel()
    optimizer = torch.optim.AdamW(two_groups(model), lr=1.0)
    load_checkpoint(path, model, optimizer)
    return model, optimizer


def _assert_runs_agree(
    found: tuple[PeerModel, torch.optim.AdamW], expected: tuple[PeerModel, torch.optim.AdamW]
) -> None:
    """Compare two runs bit by bit, now and after three more steps."""
    for _ in range(2):
        for name, value in expected[0].state_dict().items():
            assert_equal(found[0].state_dict()[name], value, name)
        for each in (found, expected):
            for tokens in peer_batches(3, 0):
                each[1].zero_grad()
                peer_loss(each[0](tokens), tokens).backward()
                each[1].step()
    assert NUM_STEPS == 3


@pytest.mark.parametrize("to", ["checkpoint", "dcp", "deepspeed", "torch"])
@pytest.mark.parametrize(
    "source", ["stage2-fp32-deepspeed", "stage3-fp32-deepspeed", "titan-torch", "fsdp2-torch"]
)
def test_converted_run_continues(source: str, to: str, tmp_path: Path) -> None:
    """In each form the run is the one that its own files give."""
    convert(fixture(source), tmp_path / "converted", to)
    _assert_runs_agree(_loaded_run(tmp_path / "converted"), _loaded_run(fixture(source)))


def test_plain_torch_resumes_an_exported_file(tmp_path: Path) -> None:
    """By `load_state_dict` of model and optimizer, weights only."""
    convert(fixture("universal3-deepspeed") / "universal", tmp_path / "run.pt", "torch")
    state: Any = torch.load(tmp_path / "run.pt", weights_only=True)
    model = PeerModel()
    optimizer = torch.optim.AdamW(two_groups(model), lr=1.0)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    # The universal files of stage 3 may lack the groups' options: both sides keep their own.
    _assert_runs_agree(
        (model, optimizer), _loaded_run(fixture("universal3-deepspeed") / "universal")
    )


def test_converted_safetensors_have_the_master_weights(tmp_path: Path) -> None:
    """Weights of 16 bits were trained: the files have those in fp32."""
    convert(fixture("stage3-bf16-deepspeed"), tmp_path / "model", "safetensors")
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert found["up.weight"].dtype == torch.float32
    assert found.keys() >= {"offset", "frozen.weight", "scale"}


def test_counted_parameters_that_leave_a_choice_are_refused(tmp_path: Path) -> None:
    """Several tensors of one shape, some of them in no group: no guess is made."""
    path = fixture("ddp-torch") / "checkpoint.pt"
    with pytest.raises(ValueError, match=r"counts the optimizer's parameters.*may be any of"):
        convert(path, tmp_path / "converted", "checkpoint")
    assert not (tmp_path / "converted").exists()


def test_inspect_says_what_it_is() -> None:
    """Library, version, step, ranks, groups, and what is not read."""
    text = describe_checkpoint(fixture("stage2-bf16-deepspeed"))
    assert "DeepSpeed, ZeRO stage 2 0.19.8: step 3, saved by 2 ranks" in text
    assert "optimizer: 2 groups of 3 and 5 named parameters" in text
    assert "ds_config" in text
