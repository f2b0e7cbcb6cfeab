"""Tools that shard by their own FSDP2 settings, after `composable_shard.fsdp2.install()`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from composable_shard import is_sharded
from tests.common.trainers import (
    BY_FSDP2,
    accelerate_with_fsdp2,
    as_torchrun_starts,
    installed,
    shards_on_cpu,
)
from tests.ecosystem.programs import make_hf_llama, needs, values_of, words
from tests.ecosystem.tools import TOLERANCES, logged, train_by_trl, train_with
from tests.harness.ranks import distributed


def train_by_plugin(accelerator: Any, folder: Path) -> tuple[list[Any], Any]:
    """Train, save, train, load, train again: the last two tell the same."""
    model = make_hf_llama()
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    told: list[Any] = []

    def take_step(step: int, factor: float = 1.0) -> None:
        for number in range(2):
            with accelerator.accumulate(prepared):
                batch = words(2 * step + number)
                loss = prepared(input_ids=batch, labels=batch).loss
                accelerator.backward(loss * factor)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
                    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
                    told.append(norm.item() if norm.isfinite() else "not finite")
                optimizer.step()
                optimizer.zero_grad()
            told.append(loss.item())
        told.append(accelerator.optimizer_step_was_skipped)

    for step in range(3):
        take_step(step)
    if accelerator.scaler is not None:  # one rank overflows: both skip the step
        take_step(3, torch.inf if dist.get_rank() == 1 else 1.0)
        assert told[-1]
    accelerator.save_state(str(folder))
    take_step(4)
    if accelerator.scaler is not None:  # accelerate loads into new ones alone
        accelerator.scaler._scale = accelerator.scaler._growth_tracker = None
    accelerator.load_state(str(folder))
    take_step(4)
    assert told[-4:] == told[-8:-4]
    whole = accelerator.get_state_dict(prepared)
    assert {name: value.shape for name, value in whole.items()} == (
        {name: value.shape for name, value in make_hf_llama().state_dict().items()}
        if dist.get_rank() == 0
        else {}
    )
    assert accelerator.unwrap_model(prepared) is prepared
    accelerator.save_model(prepared, str(folder / "model"))
    return told, prepared


@needs("accelerate", "transformers")
@pytest.mark.parametrize(
    ("precision", "state", "is_lazy"),
    [
        ("no", "FULL_STATE_DICT", False),
        ("no", "SHARDED_STATE_DICT", True),
        ("bf16", "FULL_STATE_DICT", True),
        ("fp16", "SHARDED_STATE_DICT", False),
    ],
)
@distributed(2)
def test_accelerates_fsdp2_plugin_shards_by_this_library(
    precision: str, state: str, is_lazy: bool, tmp_path: Path
) -> None:
    """Prepare, clip, accumulate, skip a step, save and load state, save the model: as FSDP2."""
    with as_torchrun_starts(), shards_on_cpu():
        accelerator = accelerate_with_fsdp2(precision, state, is_lazy)
        expected, plain = train_by_plugin(accelerator, tmp_path / "theirs")
        assert not is_sharded(plain)
        with installed():
            accelerator = accelerate_with_fsdp2(precision, state, is_lazy)
            found, model = train_by_plugin(accelerator, tmp_path / "ours")
            assert isinstance(model, torch.distributed.fsdp.FSDPModule)
        assert is_sharded(model)
        for one, other in zip(found, expected, strict=True):
            is_number = isinstance(other, float)
            assert one == (pytest.approx(other, abs=TOLERANCES[precision]) if is_number else other)


@needs("accelerate", "transformers")
@pytest.mark.parametrize("precision", ["no", "bf16"])
@distributed(2)
def test_trainers_fsdp_option_shards_by_this_library(precision: str, tmp_path: Path) -> None:
    """Losses, checkpoints and resuming of a Trainer that knows nothing of it; smoothed labels."""
    from transformers import Trainer

    options = {
        "bf16": precision == "bf16",
        "gradient_accumulation_steps": 2,
        "label_smoothing_factor": 0.1,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "max_grad_norm": 0.5,
        **BY_FSDP2,
    }
    with as_torchrun_starts(), shards_on_cpu(torch.float32):
        theirs = train_with(Trainer, make_hf_llama(), tmp_path / "theirs", **options)
        with installed():
            ours = train_with(Trainer, make_hf_llama(), tmp_path / "ours", **options)
            assert is_sharded(ours.model)
            assert isinstance(ours.model, torch.distributed.fsdp.FSDPModule)
            middle = str(tmp_path / "ours" / "checkpoint-4")
            later = train_with(Trainer, make_hf_llama(), tmp_path / "again", middle, **options)
        torch.testing.assert_close(logged(ours), logged(theirs), rtol=0, atol=1e-5)
        dist.barrier()
        kept = sorted(path.name for path in (tmp_path / "ours").iterdir())
        assert kept == ["checkpoint-4", "checkpoint-6"]
        assert logged(later) == logged(ours)
        torch.testing.assert_close(values_of(later.model), values_of(ours.model), rtol=0, atol=0)


@needs("trl")
@pytest.mark.parametrize("name", ["SFT", "DPO"])
@distributed(2)
def test_trl_shards_by_this_library(name: str, tmp_path: Path) -> None:
    """TRL's trainers with FSDP2's plugin: its losses; the second model of DPO is sharded too."""
    import trl

    kind = getattr(trl, f"{name}Trainer")
    with as_torchrun_starts(), shards_on_cpu(torch.float32):
        theirs = train_by_trl(name, kind, tmp_path / "theirs", **BY_FSDP2)
        with installed():
            ours = train_by_trl(name, kind, tmp_path / "ours", **BY_FSDP2)
        assert all(is_sharded(getattr(ours, each, ours.model)) for each in ("model", "ref_model"))
        torch.testing.assert_close(logged(ours), logged(theirs), rtol=0, atol=1e-5)
