"""What accelerate, and trainers on top of it, need to shard on a CPU."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as torch_state_dict

from composable_shard import fsdp2


@contextmanager
def as_torchrun_starts() -> Iterator[None]:
    """Be a rank that torchrun started; what the libraries deprecate of each other is not ours."""
    os.environ["LOCAL_RANK"] = os.environ["RANK"] = str(dist.get_rank())
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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
