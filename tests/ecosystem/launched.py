"""A script that `accelerate launch` starts: it calls `install()`, and the rest is the tools'.

accelerate launch --config_file FILE tests/ecosystem/launched.py FOLDER
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import composable_shard.fsdp2
from tests.common.trainers import shards_on_cpu
from tests.ecosystem.programs import make_hf_llama, words
from tests.ecosystem.tools import logged, train_with


def loop(accelerator: Any, folder: Path) -> list[float]:
    """Train, save, load, train again, as a script of accelerate does."""
    model = make_hf_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)

    def take_step(step: int) -> float:
        with accelerator.accumulate(model):
            loss = model(input_ids=words(step), labels=words(step)).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    told = [take_step(step) for step in range(3)]
    accelerator.save_state(str(folder / "state"))
    told.append(take_step(3))
    accelerator.load_state(str(folder / "state"))
    told.append(take_step(3))
    accelerator.save_model(model, str(folder / "model"))
    return told


def train_in_tools(folder: Path) -> dict[str, Any]:
    """Run a loop of accelerate and a Trainer that know nothing of the library; tell the losses."""
    from accelerate import Accelerator
    from transformers import Trainer

    with shards_on_cpu(torch.float32):
        told: dict[str, Any] = {"loop": loop(Accelerator(), folder / "loop")}
        trainer = train_with(Trainer, make_hf_llama(), folder / "trainer", save_strategy="no")
        return told | logged(trainer) | {"class": type(trainer.model).__mro__[1].__module__}


def run_launched(folder: Path) -> None:
    """Train, and write what was told."""
    composable_shard.fsdp2.install()
    told = train_in_tools(folder)
    if dist.get_rank() == 0:
        (folder / "told.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # what the tools deprecate of each other
    run_launched(Path(sys.argv[1]))
