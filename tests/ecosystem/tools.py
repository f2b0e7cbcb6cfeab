"""Small trainings by accelerate, Trainer and TRL, for the tests beside this file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composable_shard import shard_model
from composable_shard.huggingface import TrainerMixin
from composable_shard.planning import transformer_blocks
from tests.common.trainers import (
    BY_FSDP2,
    forget_accelerators,
    installed,
    make_tokenizer,
    shards_on_cpu,
)
from tests.ecosystem.programs import make_hf_llama, words

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCES = {"no": 1e-5, "bf16": 2e-3, "fp16": 2e-3}


def dtypes_of(model: nn.Module) -> list[torch.dtype]:
    """Return a list that gets the dtype in which a layer computes."""
    seen: list[torch.dtype] = []
    layer: Any = model.get_submodule("model.layers.0.mlp.down_proj")
    layer.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    return seen


def train_with(
    kind: Any, model: Any, folder: Path, resume: Any = None, callbacks: Any = (), **options: Any
) -> Any:
    """Train six steps of a Trainer, saving all two; return it."""
    from transformers import TrainingArguments

    forget_accelerators()
    samples = [{"input_ids": row, "labels": row} for step in range(12) for row in words(step, 0)]
    chosen = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "seed": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    arguments = TrainingArguments(str(folder), **chosen | options)
    more = {"train_dataset": samples, "eval_dataset": samples[:4], "callbacks": [*callbacks]}
    trainer = kind(model, arguments, **more)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer: Any) -> dict[str, list[float]]:
    """Return losses and norms that a Trainer has logged, by name."""
    names = ("loss", "grad_norm", "eval_loss")
    history = trainer.state.log_history
    return {name: [entry[name] for entry in history if name in entry] for name in names}


def keep_predictions(written: list[Any], found: Any) -> dict[str, float]:
    """Keep what a model wrote, as a metric."""
    written.append(found.predictions)
    return {}


def train_by_trl(
    name: str, kind: Any, folder: Path, shard: Any = lambda model: model, **options: Any
) -> Any:
    """Train four steps, of DPO with a second model; return the trainer."""
    import trl
    from datasets import Dataset

    rows = [
        " ".join(f"w{index}" for index in row.tolist())
        for step in range(12)
        for row in words(step, 0)
    ]
    content = {"text": rows}
    if name == "DPO":
        content = {"prompt": [row[:8] for row in rows], "chosen": rows, "rejected": rows[::-1]}
    forget_accelerators()
    models = [shard(make_hf_llama()) for _ in range(2 if name == "DPO" else 1)]
    arguments = getattr(trl, f"{name}Config")(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        bf16=True,
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
        **options,
    )
    others = {"ref_model": models[1]} if name == "DPO" else {}
    trainer = kind(
        model=models[0],
        args=arguments,
        train_dataset=Dataset.from_dict(content),
        processing_class=make_tokenizer(),
        **others,
    )
    seen = dtypes_of(models[0])
    trainer.train()
    assert set(seen) == {torch.bfloat16}
    return trainer


WAYS = ("TrainerMixin", "install")


def sides(way: str, kind: Any) -> Iterator[tuple[Any, Callable[[Any], Any], dict[str, Any]]]:
    """Yield a Trainer as it shards or replicates by itself, then with this library, on one way.

    Each is a class, a function that shards a model if the script has to, and options.
    """
    if way == "TrainerMixin":
        yield kind, lambda model: model, {}
        yield type("Sharded", (TrainerMixin, kind), {}), shard_by_blocks, {}
        return
    with shards_on_cpu(torch.float32):
        yield kind, lambda model: model, BY_FSDP2
        with installed():
            yield kind, lambda model: model, BY_FSDP2


def shard_by_blocks(model: Any) -> Any:
    """Shard a model of transformers or peft."""
    shard_model(model, transformer_blocks(model))
    return model
