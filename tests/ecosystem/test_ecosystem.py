"""Tools that train, with models that are sharded before: accelerate, Trainer, TRL, peft."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard import fully_shard, is_sharded
from composable_shard.huggingface import TrainerMixin, iter_merged_params, keep_unwrapped
from tests.common.trainers import as_torchrun_starts, make_accelerator
from tests.ecosystem.programs import make_hf_llama, needs, shard_llama, values_of, words
from tests.ecosystem.tools import DTYPES, TOLERANCES, dtypes_of, logged, train_by_trl, train_with
from tests.harness.assertions import assert_equal
from tests.harness.ranks import distributed


def train_prepared(accelerator: Any, model: nn.Module, precision: str) -> tuple[list[Any], Any]:
    """Train a model of an Accelerator; return losses, norms and whether steps were skipped."""
    seen = dtypes_of(model)
    if is_sharded(model):
        model = keep_unwrapped(model, accelerator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    assert (prepared is model) == is_sharded(model)
    told: list[Any] = []
    for step in range(6):
        with accelerator.accumulate(prepared):
            loss = prepared(input_ids=words(step), labels=words(step)).loss
            told.append(loss.item())
            if step == 3 and precision == "fp16" and dist.get_rank() == 1:
                loss = loss * torch.inf  # of one rank: both skip the step
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
                told.append(norm.item() if norm.isfinite() else "not finite")
            optimizer.step()
            told.append(accelerator.optimizer_step_was_skipped)
            optimizer.zero_grad()
    assert set(seen) == {DTYPES[precision]}
    return told, accelerator.unwrap_model(prepared)


@needs("accelerate", "transformers")
@pytest.mark.parametrize("precision", DTYPES)
@distributed(2)
def test_accelerate_computes_in_its_precision(precision: str) -> None:
    """Losses, norms and weights are those of its DDP, with accumulation, clipping and overflow."""
    with as_torchrun_starts():
        accelerator = make_accelerator(precision, gradient_accumulation_steps=2)
        expected, plain = train_prepared(accelerator, make_hf_llama(), precision)
        accelerator = make_accelerator(precision, gradient_accumulation_steps=2)
        found, model = train_prepared(accelerator, shard_llama(make_hf_llama()), precision)
        tolerance = TOLERANCES[precision]
        for one, other in zip(found, expected, strict=True):
            assert one == (
                pytest.approx(other, abs=tolerance) if isinstance(other, float) else other
            )
        assert ("not finite" in found) == (precision == "fp16")
        assert (True in found) == (precision == "fp16")
        torch.testing.assert_close(
            values_of(model), dict(plain.state_dict()), rtol=0, atol=tolerance
        )


@needs("accelerate", "transformers")
@distributed(2)
def test_accelerate_saves_a_whole_model_and_refuses_state(tmp_path: Path) -> None:
    """`save_model`, `get_state_dict`, `unwrap_model`; `save_state` raises on all ranks."""
    from transformers import LlamaForCausalLM

    with as_torchrun_starts():
        accelerator = make_accelerator("bf16")
        with pytest.raises(ValueError, match="expected a model with sharded units"):
            keep_unwrapped(make_hf_llama(), accelerator)
        model = keep_unwrapped(shard_llama(make_hf_llama()), accelerator)
        assert keep_unwrapped(model, accelerator) is model
        prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False) is model
        for call in (accelerator.save_state, accelerator.load_state):
            (tmp_path / "state").mkdir(exist_ok=True)
            with pytest.raises(NotImplementedError, match=r"Call save_checkpoint\(path, model"):
                call(str(tmp_path / "state"))
        accelerator.save_model(model, str(tmp_path / "model"), max_shard_size="2KB")
        whole = accelerator.get_state_dict(model)
        assert bool(whole) == (dist.get_rank() == 0)
        dist.barrier()
        model.config.save_pretrained(tmp_path / "model")
        saved = LlamaForCausalLM.from_pretrained(tmp_path / "model").state_dict()
        torch.testing.assert_close(dict(saved), values_of(model), rtol=0, atol=0)


# --- Trainer ---


@needs("accelerate", "transformers")
@pytest.mark.parametrize("precision", ["no", "bf16"])
@distributed(2)
def test_trainer_trains_evaluates_rotates_and_resumes(precision: str, tmp_path: Path) -> None:
    """As its DDP: losses, smoothed labels, accumulation, evaluation, checkpoints, the best one."""
    from transformers import AutoModelForCausalLM, Trainer

    class Sharded(TrainerMixin, Trainer):  # type: ignore[misc]
        pass

    options = {
        "bf16": precision == "bf16",
        "gradient_accumulation_steps": 2,
        "label_smoothing_factor": 0.1,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "max_grad_norm": 0.5,
    }
    with as_torchrun_starts():
        plain, model = make_hf_llama(), shard_llama(make_hf_llama())
        expected = train_with(Trainer, plain, tmp_path / "plain", **options)
        seen = dtypes_of(model)
        trainer = train_with(Sharded, model, tmp_path / "sharded", **options)
        assert set(seen) == {DTYPES[precision]}
        torch.testing.assert_close(logged(trainer), logged(expected), rtol=0, atol=1e-5)
        torch.testing.assert_close(values_of(model), dict(plain.state_dict()), rtol=0, atol=1e-5)
        dist.barrier()
        kept = sorted(path.name for path in (tmp_path / "sharded").iterdir())
        assert kept == ["checkpoint-4", "checkpoint-6"]
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "sharded" / "checkpoint-6")
        torch.testing.assert_close(dict(saved.state_dict()), values_of(model), rtol=0, atol=0)
        again = shard_llama(make_hf_llama())
        middle = str(tmp_path / "sharded" / "checkpoint-4")
        later = train_with(Sharded, again, tmp_path / "again", middle, **options)
        assert logged(later) == logged(trainer)
        torch.testing.assert_close(values_of(again), values_of(model), rtol=0, atol=0)


@needs("trl")
@pytest.mark.parametrize("name", ["SFT", "DPO"])
@distributed(2)
def test_trl_trains(name: str, tmp_path: Path) -> None:
    """Supervised, and by preferences with a second model that is sharded too: TRL's DDP."""
    import trl

    kind = getattr(trl, f"{name}Trainer")
    sharded = type("Sharded", (TrainerMixin, kind), {})
    with as_torchrun_starts():
        expected = train_by_trl(name, kind, tmp_path / "theirs")
        found = train_by_trl(name, sharded, tmp_path / "ours", shard_llama)
        torch.testing.assert_close(logged(found), logged(expected), rtol=0, atol=1e-4)


# --- By one line: `composable_shard.fsdp2.install()` ---


@needs("peft", "transformers")
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}])
@distributed(2)
def test_merged_weights_have_the_names_and_values_of_the_model_without_adapters(
    options: dict[str, Any],
) -> None:
    """Those of peft's own merge, bit by bit; the model trains on as if nobody had read them."""
    from peft import LoraConfig, get_peft_model

    with as_torchrun_starts():
        torch.manual_seed(1)
        targets = ["q_proj", "down_proj"]
        model = get_peft_model(make_hf_llama(), LoraConfig(r=2, target_modules=targets, **options))
        plain = copy.deepcopy(model)
        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.1)
        model(input_ids=words(0), labels=words(0)).loss.backward()
        optimizer.step()
        before = values_of(model)
        found = dict(iter_merged_params(model))
        halves = dict(iter_merged_params(model, dtype=torch.bfloat16, rank0_only=True))
        assert_values(values_of(model), before)
        plain.load_state_dict(before)
        merged = dict(plain.merge_and_unload().named_parameters())
        assert merged.keys() == dict(make_hf_llama().named_parameters()).keys()
        assert_values(found, merged)
        wanted = merged if dist.get_rank() == 0 else {}
        assert_values(halves, {name: value.bfloat16() for name, value in wanted.items()})
        assert not any(getattr(each, "merged_adapters", ()) for each in model.modules())
        model(input_ids=words(1), labels=words(1)).loss.backward()


def assert_values(found: dict[str, Tensor], expected: dict[str, Any]) -> None:
    """Compare names and values, bit by bit."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert_equal(value.detach(), expected[name].detach(), name)


@needs("peft", "transformers")
@distributed(2)
def test_weights_that_cannot_be_merged_are_refused() -> None:
    """A model without adapters, and adapters apart from their weight; nothing is gathered."""
    from peft import LoraConfig, get_peft_model

    with pytest.raises(ValueError, match=r"iter_full_params\(model\) yields the weights"):
        iter_merged_params(shard_llama(make_hf_llama()))
    with as_torchrun_starts():
        model = get_peft_model(make_hf_llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    layer = model.base_model.model.model.layers[0]
    fully_shard(layer, ignored_params={layer.self_attn.q_proj.base_layer.weight})
    fully_shard(model)
    with pytest.raises(NotImplementedError, match=r"'.*layers\.0\.self_attn\.q_proj' and its adap"):
        iter_merged_params(model)
