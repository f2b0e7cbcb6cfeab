"""Options of a Trainer, on both ways: beside its DDP, and beside FSDP2 in it."""

from __future__ import annotations

from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard import fsdp2, is_sharded
from tests.common.trainers import as_torchrun_starts, forget_accelerators
from tests.ecosystem.programs import make_hf_llama, needs, values_of, words
from tests.ecosystem.tools import WAYS, keep_predictions, logged, sides, train_with
from tests.harness.ranks import distributed


@needs("accelerate", "transformers")
@pytest.mark.parametrize("way", WAYS)
@distributed(2)
def test_seq2seq_trainer_generates(way: str, tmp_path: Path) -> None:
    """Losses and words of an encoder and decoder that share a weight: DDP's, as FSDP2 raises."""
    from transformers import (
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        T5Config,
        T5ForConditionalGeneration,
    )

    config = T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    samples = [{"input_ids": row, "labels": row} for step in range(12) for row in words(step, 0)]
    results = []
    with as_torchrun_starts():
        plain = (Seq2SeqTrainer, lambda model: model, {})
        for kind, shard, options in chain([plain], sides(way, Seq2SeqTrainer)):
            forget_accelerators()
            torch.manual_seed(0)
            model = shard(T5ForConditionalGeneration(config))
            written: list[Any] = []
            arguments = Seq2SeqTrainingArguments(
                str(tmp_path / str(len(results))),
                max_steps=3,
                per_device_train_batch_size=2,
                learning_rate=1e-1,
                logging_steps=1,
                eval_strategy="steps",
                eval_steps=1,
                predict_with_generate=True,
                generation_max_length=6,
                bf16=way == "TrainerMixin",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                save_strategy="no",
                **options,
            )
            trainer = kind(
                model,
                arguments,
                train_dataset=samples,
                eval_dataset=samples[:4],
                compute_metrics=partial(keep_predictions, written),
            )
            if options and torch.distributed.fsdp.fully_shard is not fsdp2.fully_shard:
                with pytest.raises(ValueError, match="already managed by another FSDP group"):
                    trainer.train()
                continue
            trainer.train()
            results.append((logged(trainer), [torch.as_tensor(each) for each in written]))
        assert is_sharded(trainer.model)
        tolerance = 2e-3 if way == "TrainerMixin" else 1e-5
        torch.testing.assert_close(results[-1], results[0], rtol=0, atol=tolerance)


@needs("accelerate", "transformers")
@pytest.mark.parametrize("way", WAYS)
@distributed(2, timeout=110)
def test_a_trainer_compiles(way: str, tmp_path: Path) -> None:
    """Losses of `torch_compile=True`; what is saved loads."""
    from transformers import AutoModelForCausalLM, Trainer

    more = {"torch_compile": True, "torch_compile_backend": "eager", "eval_strategy": "no"}
    results = []
    with as_torchrun_starts():
        for kind, shard, options in sides(way, Trainer):
            torch._dynamo.reset()
            folder = tmp_path / str(len(results))
            trainer = train_with(kind, shard(make_hf_llama()), folder, **options | more)
            results.append(logged(trainer))
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-5)
        dist.barrier()
        saved = AutoModelForCausalLM.from_pretrained(folder / "checkpoint-6").state_dict()
        model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        torch.testing.assert_close(dict(saved), values_of(model), rtol=0, atol=0)


@needs("accelerate", "transformers")
@pytest.mark.parametrize("way", WAYS)
@distributed(2)
def test_a_trainer_evaluates_in_sixteen_bits(way: str, tmp_path: Path) -> None:
    """The loss of `bf16_full_eval` after a training: that of DDP, as FSDP2 raises."""
    from transformers import Trainer

    results = []
    with as_torchrun_starts():
        plain = (Trainer, lambda model: model, {})
        for kind, shard, options in chain([plain], sides(way, Trainer)):
            more = {"bf16_full_eval": True, "eval_strategy": "no"}
            trainer = train_with(kind, shard(make_hf_llama()), tmp_path, **options | more)
            if options and not is_sharded(trainer.model):
                with pytest.raises(RuntimeError, match="Expected out tensor to have dtype"):
                    trainer.evaluate()
                continue
            results.append(trainer.evaluate()["eval_loss"])
            assert {param.dtype for param in trainer.model.parameters()} == {torch.bfloat16}
        assert is_sharded(trainer.model)
        assert results == pytest.approx(results[:1] * len(results), abs=1e-5)


def limit_batch(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
    """Run out of memory if a batch has more than one sample."""
    if args[0].shape[0] > 1:
        raise RuntimeError("CUDA out of memory. Tried to allocate")


@needs("accelerate", "transformers")
@pytest.mark.parametrize("way", WAYS)
@distributed(2)
def test_a_trainer_finds_its_batch_size(way: str, tmp_path: Path) -> None:
    """After steps that run out of memory in a layer, on all ranks; FSDP2 raises in accelerate."""
    from transformers import Trainer

    results = []
    with as_torchrun_starts():
        plain = (Trainer, lambda model: model, {})
        for kind, shard, options in chain([plain], sides(way, Trainer)):
            model: Any = make_hf_llama()
            model.model.layers[1].register_forward_pre_hook(limit_batch)
            more = {"auto_find_batch_size": True, "eval_strategy": "no", "save_strategy": "no"}
            train = partial(train_with, kind, shard(model), tmp_path, **options | more)
            if options and torch.distributed.fsdp.fully_shard is not fsdp2.fully_shard:
                with pytest.raises(KeyError, match="couldn't be switched to its sharded"):
                    train()
                continue
            trainer = train()
            assert trainer._train_batch_size == 1
            results.append(logged(trainer))
        assert is_sharded(trainer.model)
        for found in results[1:]:
            torch.testing.assert_close(found, results[0], rtol=0, atol=1e-5)


# Where a layer runs out of memory: the calls of its forward that may, and whether its backward may.
PLACES = {"forward": (0, False), "backward": (100, True), "third step": (2, False)}


def run_out_of_memory(model: Any, place: str) -> None:
    """Let a layer run out of memory where a batch has more than one sample."""
    layer, (first, in_backward) = model.model.layers[1], PLACES[place]
    numbers = count()

    def limit_forward(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        if next(numbers) >= first:
            limit_batch(layer, args)

    layer.register_forward_pre_hook(limit_forward)
    if in_backward:
        layer.register_full_backward_pre_hook(limit_batch)


def make_check(batches: list[Tensor], checked: list[int]) -> Any:
    """Return a callback that compares the gradients of each step with a plain model's."""
    from transformers import TrainerCallback

    class Check(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            plain = make_hf_llama()
            plain.load_state_dict(values_of(model))
            everyone = [torch.empty_like(batches[-1]) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, batches[-1])
            for batch in everyone:
                (plain(input_ids=batch, labels=batch).loss / len(everyone)).backward()
            expected = {name: param.grad for name, param in plain.named_parameters()}
            found = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
            checked.append(len(batches[-1]))

    return Check()


@needs("accelerate", "transformers")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
@distributed(2)
def test_gradients_after_a_retry_are_a_plain_models(place: str, way: str, tmp_path: Path) -> None:
    """After a layer ran out of memory on all ranks, where FSDP2 raises (see the test above)."""
    from transformers import Trainer

    batches: list[Tensor] = []
    checked: list[int] = []
    model = make_hf_llama()
    model.register_forward_pre_hook(
        lambda model, args, kwargs: batches.append(kwargs["input_ids"]), with_kwargs=True
    )
    run_out_of_memory(model, place)
    more = {"auto_find_batch_size": True, "eval_strategy": "no", "save_strategy": "no"}
    more["max_grad_norm"] = 0.0  # gradients as they are reduced
    with as_torchrun_starts():
        for number, (kind, shard, options) in enumerate(sides(way, Trainer)):
            if number == 0:  # the tool by itself
                continue
            callbacks = [make_check(batches, checked)]
            trainer = train_with(
                kind, shard(model), tmp_path, callbacks=callbacks, **options | more
            )
            assert is_sharded(trainer.model)
    assert checked == ([2, 2] if place == "third step" else []) + [1] * 6
