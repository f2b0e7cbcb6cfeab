"""Small trainings by accelerate, Trainer and TRL, for the tests beside this file."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dict

from composable_shard import fsdp2, shard_model
from composable_shard.huggingface import TrainerMixin
from composable_shard.planning import transformer_blocks
from tests.ecosystem.programs import make_llama, words

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCES = {"no": 1e-5, "bf16": 2e-3, "fp16": 2e-3}


def forget_accelerators() -> None:
    """Let the next Accelerator be made as in a new process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def make_accelerator(precision: str = "no", **options: Any) -> Any:
    """Return an Accelerator of the CPU; of fp16, which it refuses there, with a scaler."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    forget_accelerators()
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
    accelerators: Any = importlib.import_module("accelerate.accelerator").Accelerator
    prepare = accelerators._prepare_fsdp2
    fsdp2.install()
    try:
        yield
    finally:
        accelerators._prepare_fsdp2 = prepare
        for module, name, value in before:
            setattr(module, name, value)


@contextmanager
def shards_on_cpu(reduce_dtype: torch.dtype | None = None) -> Iterator[None]:
    """Let accelerate shard on the CPU too, where it takes DDP; in another dtype than its own."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    make_state = AcceleratorState.__init__

    def make_sharding(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        make_state(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
                if reduce_dtype is not None:
                    policy = replace(fsdp_plugin.mixed_precision_policy, reduce_dtype=reduce_dtype)
                    fsdp_plugin.mixed_precision_policy = policy
            self.fsdp_plugin, self.distributed_type = fsdp_plugin, DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    with patch.object(AcceleratorState, "__init__", make_sharding), patch.dict(os.environ):
        yield


# For `TrainingArguments`: FSDP2, with the layers that the model names as units.
BY_FSDP2 = {"fsdp": True, "fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}


def accelerate_with_fsdp2(precision: str, state: str, is_lazy: bool) -> Any:
    """Return an Accelerator that shards by FSDP2."""
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type=state,
        cpu_ram_efficient_loading=is_lazy,
    )
    found = make_accelerator(precision, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    if precision == "fp16":
        plugin.set_mixed_precision(precision)
    return found


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
