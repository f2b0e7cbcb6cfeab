"""Adapters, averages and uploads of a Trainer, on both ways: beside DDP, and FSDP2, in it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard import is_sharded
from composable_shard.huggingface import iter_merged_params
from tests.common.trainers import as_torchrun_starts
from tests.ecosystem.programs import make_hf_llama, needs, values_of
from tests.ecosystem.tools import WAYS, logged, sides, train_with
from tests.harness.ranks import distributed


def to_whole(value: Any) -> Tensor:
    """Return the whole value of a parameter or what was computed of it."""
    value = value.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


@needs("peft", "transformers")
@pytest.mark.parametrize("way", WAYS)
@distributed(2)
def test_adapters_are_trained_saved_resumed_and_merged(way: str, tmp_path: Path) -> None:
    """Losses; what peft loads of a checkpoint; merged weights; a run that was taken up."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import Trainer

    def make() -> Any:
        torch.manual_seed(1)
        return get_peft_model(make_hf_llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))

    trainers = []
    with as_torchrun_starts():
        for kind, shard, options in sides(way, Trainer):
            folder = tmp_path / str(len(trainers))
            trainers.append(train_with(kind, shard(make()), folder, **options))
            middle = folder / "checkpoint-4"
            later = train_with(kind, shard(make()), tmp_path / "later", middle, **options)
        ours = trainers[1]
        assert is_sharded(ours.model)
        torch.testing.assert_close(logged(ours), logged(trainers[0]), rtol=0, atol=1e-5)
        assert logged(later) == logged(ours)
        torch.testing.assert_close(values_of(later.model), values_of(ours.model), rtol=0, atol=0)
        dist.barrier()
        saved = PeftModel.from_pretrained(make_hf_llama(), folder / "checkpoint-6")
        merged = dict(saved.merge_and_unload().named_parameters())
        merged = {name: to_whole(each) for name, each in merged.items()}
        found = dict(iter_merged_params(ours.model))
        torch.testing.assert_close(found, merged, rtol=0, atol=0)


def make_average() -> Any:
    """Return a callback that averages the weights after each step."""
    from transformers import TrainerCallback

    class Average(TrainerCallback):  # type: ignore[misc]
        values: Any = None

        def on_train_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
            self.values = [param.detach().clone() for param in model.parameters()]

        def on_step_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
            params = [param.detach() for param in model.parameters()]
            torch._foreach_lerp_(self.values, params, 0.5)

    return Average()


@needs("accelerate", "transformers")
@pytest.mark.parametrize("way", WAYS)
@distributed(2)
def test_a_callback_averages_weights(way: str, tmp_path: Path) -> None:
    """By its own list of parameters, which are shards; and by torch's `AveragedModel`, a copy."""
    from transformers import Trainer

    results = []
    with as_torchrun_starts():
        for kind, shard, options in sides(way, Trainer):
            average = make_average()
            trainer = train_with(
                kind, shard(make_hf_llama()), tmp_path, callbacks=[average], **options
            )
            results.append([to_whole(value) for value in average.values])
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-5)
        copied = torch.optim.swa_utils.AveragedModel(trainer.model)
        copied.update_parameters(trainer.model)
        for one, other in zip(copied.module.parameters(), trainer.model.parameters(), strict=True):
            assert torch.equal(to_whole(one), to_whole(other))


@needs("accelerate", "transformers")
@pytest.mark.parametrize("way", WAYS)
@distributed(2)
def test_a_trainer_pushes_its_model(way: str, tmp_path: Path) -> None:
    """`save_model` and `push_to_hub` upload whole weights, from the first rank alone."""
    from transformers import AutoModelForCausalLM, Trainer

    told = []
    with as_torchrun_starts():
        for kind, shard, options in sides(way, Trainer):
            uploads: list[Any] = []

            def upload(uploads: Any = uploads, **told: Any) -> None:
                saved = AutoModelForCausalLM.from_pretrained(told["folder_path"]).state_dict()
                uploads.append((told["commit_message"], copy.deepcopy(saved)))

            hub = Mock(upload_folder=upload, **{"create_repo.return_value.repo_id": "us/model"})
            with patch("transformers.trainer.hf_api", Mock(return_value=hub)):
                more = {"push_to_hub": True, "eval_strategy": "no", "save_strategy": "no"}
                folder = tmp_path / str(len(told))
                trainer = train_with(kind, shard(make_hf_llama()), folder, **options | more)
                trainer.save_model()
                trainer.push_to_hub("By hand")
            values = values_of(trainer.model) if is_sharded(trainer.model) else None
            assert len(uploads) == (2 if dist.get_rank() == 0 else 0)
            told.append([message for message, _ in uploads])
        for _, saved in uploads:
            torch.testing.assert_close(dict(saved), values, rtol=0, atol=0)
        assert told[0] == told[1]
