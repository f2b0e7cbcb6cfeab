"""States of accelerate at another world size, and models prepared in the wrong way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from composable_shard import get_optimizer_state_dict
from composable_shard.huggingface import keep_unwrapped
from tests.common.trainers import (
    accelerate_with_fsdp2,
    as_torchrun_starts,
    installed,
    make_accelerator,
    shards_on_cpu,
)
from tests.ecosystem.programs import make_hf_llama, needs, shard_llama, values_of, words
from tests.harness.ranks import distributed, run_ranks
from tests.programs.models import EVERYWHERE


@needs("accelerate", "transformers")
@distributed(2)
def test_a_sharded_model_is_not_prepared_alone() -> None:
    """Without `keep_unwrapped` accelerate puts DDP around it, which raises; then it is taken."""
    with as_torchrun_starts():
        accelerator = make_accelerator()
        model = shard_llama(make_hf_llama())
        with pytest.raises(RuntimeError, match="needs no DistributedDataParallel around"):
            accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        prepared, _ = accelerator.prepare(
            keep_unwrapped(model, accelerator), torch.optim.SGD(model.parameters(), lr=0.1)
        )
        assert prepared is model


def save_or_load(folder: Path, saves: bool, state: str) -> dict[str, Any]:
    """Train and save by accelerate, or load what it has saved; return values and states."""
    with as_torchrun_starts(), shards_on_cpu(), installed():
        accelerator = accelerate_with_fsdp2("no", state, False)
        model: Any = make_hf_llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        if saves:
            model(input_ids=words(0), labels=words(0)).loss.backward()
            optimizer.step()
            accelerator.save_state(str(folder))
        else:
            accelerator.load_state(str(folder))
        states = get_optimizer_state_dict(model, optimizer.optimizer, options=EVERYWHERE)["state"]
        flat = {f"{name}.{key}": v for name, each in states.items() for key, v in each.items()}
        return values_of(model) | flat


@needs("accelerate", "transformers")
@pytest.mark.parametrize("state", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_accelerates_state_loads_at_another_world_size(state: str, tmp_path: Path) -> None:
    """What two ranks saved by `save_state` is on three ranks what it was, bit by bit."""
    saved = run_ranks(2, save_or_load, tmp_path, True, state)[0]
    loaded = run_ranks(3, save_or_load, tmp_path, False, state)[0]
    torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
