"""Tools that shard by their own FSDP2 settings, after `composable_shard.fsdp2.install()`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from composable_shard import is_sharded
from tests.ecosystem.programs import as_torchrun_starts, make_llama, needs, values_of, words
from tests.ecosystem.tools import (
    TOLERANCES,
    ByPlugin,
    accelerate_with_fsdp2,
    installed,
    logged,
    train_by_trl,
    train_with,
)
from tests.harness.helpers import distributed


def train_by_plugin(accelerator: Any, folder: Path) -> tuple[list[float], Any]:
    """Train, save, train, load, train again: the last two tell the same."""
    model = make_llama()
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    told: list[float] = []

    def take_step(step: int) -> None:
        for number in range(2):
            with accelerator.accumulate(prepared):
                batch = words(2 * step + number)
                loss = prepared(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
                    told.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
                optimizer.step()
                optimizer.zero_grad()
            told.append(loss.item())

    for step in range(3):
        take_step(step)
    accelerator.save_state(str(folder))
    take_step(3)
    accelerator.load_state(str(folder))
    take_step(3)
    assert told[-3:] == told[-6:-3]
    whole = accelerator.get_state_dict(prepared)
    assert {name: value.shape for name, value in whole.items()} == (
        {name: value.shape for name, value in make_llama().state_dict().items()}
        if dist.get_rank() == 0
        else {}
    )
    accelerator.save_model(prepared, str(folder / "model"))
    return told, prepared


@needs("accelerate", "transformers")
@pytest.mark.parametrize(
    ("precision", "state", "is_lazy"),
    [
        ("no", "FULL_STATE_DICT", False),
        ("no", "SHARDED_STATE_DICT", True),
        ("bf16", "FULL_STATE_DICT", True),
    ],
)
@distributed(2)
def test_accelerates_fsdp2_plugin_shards_by_this_library(
    precision: str, state: str, is_lazy: bool, tmp_path: Path
) -> None:
    """Prepare, clip, accumulate, save and load state, save the model: as with torch's FSDP2."""
    with as_torchrun_starts():
        accelerator = accelerate_with_fsdp2(precision, state, is_lazy)
        expected, plain = train_by_plugin(accelerator, tmp_path / "theirs")
        assert not is_sharded(plain)
        with installed():
            accelerator = accelerate_with_fsdp2(precision, state, is_lazy)
            found, model = train_by_plugin(accelerator, tmp_path / "ours")
        assert is_sharded(model)
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCES[precision])


@needs("accelerate", "transformers")
@distributed(2)
def test_trainers_fsdp_option_shards_by_this_library(tmp_path: Path) -> None:
    """Losses, checkpoints and resuming of a Trainer that knows nothing of it; smoothed labels."""
    from transformers import Trainer

    kind = type("Plugged", (ByPlugin, Trainer), {})
    with as_torchrun_starts():
        theirs = train_with(kind, make_llama(), tmp_path / "theirs", label_smoothing_factor=0.1)
        with installed():
            options = {"label_smoothing_factor": 0.1}
            ours = train_with(kind, make_llama(), tmp_path / "ours", **options)
            assert is_sharded(ours.model)
            assert isinstance(ours.model, torch.distributed.fsdp.FSDPModule)
            middle = str(tmp_path / "ours" / "checkpoint-4")
            later = train_with(kind, make_llama(), tmp_path / "again", middle, **options)
        # One unit of bf16 at most: the smoothed loss of an evaluation is computed in it.
        torch.testing.assert_close(logged(ours), logged(theirs), rtol=0, atol=2e-2)
        assert logged(later) == logged(ours)
        torch.testing.assert_close(values_of(later.model), values_of(ours.model), rtol=0, atol=0)


@needs("trl")
@pytest.mark.parametrize("name", ["SFT", "DPO"])
@distributed(2)
def test_trl_shards_by_this_library(name: str, tmp_path: Path) -> None:
    """TRL's trainers with FSDP2's plugin: its losses; the second model of DPO is sharded too."""
    import trl

    kind = type("Plugged", (ByPlugin, getattr(trl, f"{name}Trainer")), {})
    with as_torchrun_starts():
        theirs = train_by_trl(name, kind, tmp_path / "theirs")
        with installed():
            ours = train_by_trl(name, kind, tmp_path / "ours")
        assert all(is_sharded(getattr(ours, each, ours.model)) for each in ("model", "ref_model"))
        torch.testing.assert_close(logged(ours), logged(theirs), rtol=0, atol=5e-3)


# --- peft: weights for an engine ---
