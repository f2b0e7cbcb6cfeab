"""Models and the Trainer of transformers, where it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from composable_shard import fully_shard
from composable_shard.huggingface import save_pretrained
from tests.helpers import assert_equal, distributed

NEEDS_TRANSFORMERS = "needs transformers"
_IS_THERE = all(importlib.util.find_spec(name) for name in ("transformers", "accelerate"))


def _make_llama(transformers: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=13,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def _shard_llama(model: Any) -> None:
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)


@pytest.mark.skipif(not _IS_THERE, reason=NEEDS_TRANSFORMERS)
@distributed(2)
def test_save_model_of_a_trainer_at_rest(tmp_path: Path) -> None:
    """Its own gives advice; with the function here it writes what `from_pretrained` reads."""
    import transformers  # noqa: PLC0415 -- not installed everywhere

    class Trainer(transformers.Trainer):  # type: ignore[misc]  # no types
        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            save_pretrained(self.model, output_dir or self.args.output_dir)

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), report_to=[], use_cpu=True
    )
    expected = {
        name: value.detach() for name, value in _make_llama(transformers).named_parameters()
    }
    for kind, folder in ((transformers.Trainer, tmp_path / "own"), (Trainer, tmp_path / "ours")):
        trainer = kind(model=_make_llama(transformers), args=arguments)
        _shard_llama(trainer.model)
        if kind is transformers.Trainer:
            if dist.get_rank() == 0:
                with pytest.raises(RuntimeError, match="Call save_safetensors"):
                    trainer.save_model(str(folder))
            continue
        trainer.save_model(str(folder))
    dist.barrier()
    found: dict[str, Tensor] = load_file(tmp_path / "ours" / "model.safetensors")
    for name, value in found.items():
        assert_equal(value, expected[name], name)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours")
    for name, value in again.named_parameters():
        assert_equal(value.detach(), expected[name], name)
