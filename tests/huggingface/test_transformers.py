"""Models and the Trainer of transformers, where it is installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from composable_shard.huggingface import save_pretrained
from tests.ecosystem.programs import make_hf_llama, needs, shard_llama
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed


@needs("accelerate", "transformers")
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
    expected = {name: value.detach() for name, value in make_hf_llama().named_parameters()}
    for kind, folder in ((transformers.Trainer, tmp_path / "own"), (Trainer, tmp_path / "ours")):
        trainer = kind(model=make_hf_llama(), args=arguments)
        shard_llama(trainer.model)
        if kind is transformers.Trainer:
            if dist.get_rank() == 0:
                with pytest.raises(RuntimeError, match="call save_safetensors"):
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
