"""Small trainings by accelerate, Trainer and TRL, for the tests beside this file."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dict

from composable_shard import fsdp2
from tests.ecosystem.programs import make_llama, words

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCES = {"no": 1e-5, "bf16": 2e-3, "fp16": 2e-3}


def make_accelerator(precision: str = "no", **options: Any) -> Any:
    """Return an Accelerator of the CPU; of fp16, which it refuses there, with a scaler."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # which the last one with a plugin has set
    found = Accelerator(
        cpu=True, mixed_precision="no" if precision == "fp16" else precision, **options
    )
    if precision == "fp16":
        AcceleratorState._shared_state["_mixed_precision"] = "fp16"
        found.native_amp, found.scaler = True, torch.amp.GradScaler("cpu", init_scale=2.0**10)
    return found


def dtypes_of(model: nn.Module) -> list[torch.dtype]:
    """Return a list that gets the dtype in which a layer computes."""
    seen: list[torch.dtype] = []
    layer: Any = model.get_submodule("model.layers.0.mlp.down_proj")
    layer.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    return seen


def train_with(kind: type, model: Any, folder: Path, resume: Any = None, **options: Any) -> Any:
    """Train six steps of a Trainer, saving all two; return it."""
    from transformers import TrainingArguments

    make_accelerator()
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
    trainer = kind(model, arguments, train_dataset=samples, eval_dataset=samples[:4])
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


def make_tokenizer() -> Any:
    """Return a tokenizer of words "w0" to "w31", without a download."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{index}": index for index in range(32)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="w0", eos_token="w1", bos_token="w2", unk_token="w0"
    )


def train_by_trl(name: str, kind: Any, folder: Path, shard: Any = lambda model: model) -> Any:
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
    make_accelerator()
    models = [shard(make_llama()) for _ in range(2 if name == "DPO" else 1)]
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


@contextmanager
def installed() -> Iterator[None]:
    """Call `install()`, and put back at the end what it replaces."""
    homes = [torch.distributed.fsdp, torch_state_dict]
    names = [vars(home).get(name) for home in homes for name in fsdp2.__all__]
    tools = importlib.import_module("accelerate.utils.fsdp_utils")
    names.append(tools.fsdp2_load_full_state_dict)
    torchs = {id(found) for found in names if found is not None}
    before = [
        (module, name, value)
        for module in [*sys.modules.values()]
        if module is not None
        for name, value in [*vars(module).items()]
        if id(value) in torchs
    ]
    fsdp2.install()
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def accelerate_with_fsdp2(precision: str, state: str, is_lazy: bool) -> Any:
    """Return an Accelerator that shards by FSDP2, which accelerate leaves to accelerators."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type=state,
        cpu_ram_efficient_loading=is_lazy,
    )
    found = make_accelerator(precision, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    if precision != "no":
        plugin.set_mixed_precision(precision)
    for each in (AcceleratorState, PartialState):
        each._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    return found


class ByPlugin:
    """A Trainer whose `fsdp=` also shards on the CPU."""

    def create_accelerator_and_postprocess(self: Any) -> None:
        """Make the accelerator."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc] # Trainer's
        self.accelerator = accelerate_with_fsdp2("bf16", "FULL_STATE_DICT", False)
        self.accelerator.gradient_accumulation_steps = 1
        self.gather_function = self.accelerator.gather_for_metrics
        self.is_fsdp_enabled = True
