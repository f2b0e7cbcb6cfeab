"""Tools that change weights of a sharded model: adapters on stacked experts, resized embeddings."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from composable_shard import ShardingStrategy, fully_shard, register_orig_params, unshard_params
from composable_shard.huggingface import iter_merged_params, save_pretrained
from tests.common.trainers import as_torchrun_starts
from tests.ecosystem.programs import (
    SMALL,
    WORDS,
    assert_alike,
    make_hf_llama,
    needs,
    train_alike,
    values_of,
    words,
)
from tests.harness.pairs import pairwise
from tests.harness.ranks import distributed


def make_adapted_mixtral() -> Any:
    """Return a Mixtral with adapters on the experts, whose weights are stacked, and on a layer."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        make_mixtral(),
        LoraConfig(
            r=2,
            target_modules=["q_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            init_lora_weights=False,  # zeros would hide what the adapters compute
        ),
    )


def make_mixtral() -> Any:
    """Return a Mixtral of transformers, the same on all ranks."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(**SMALL, intermediate_size=24, num_local_experts=4)
    return MixtralForCausalLM(config)


def shard_mixtral(model: Any, *, has_expert_units: bool, **options: Any) -> None:
    """Make each layer a unit, the experts in it too on request, and the rest."""
    for layer in model.base_model.model.model.layers:
        if has_expert_units:
            fully_shard(layer.mlp.experts, **options)
        fully_shard(layer, **options)
    fully_shard(model, **options)


def adapters_of(model: Any) -> list[Any]:
    """Return an optimizer's parameters."""
    return [param for param in model.parameters() if param.requires_grad]


@needs("peft", "transformers")
@pytest.mark.parametrize(
    *pairwise(
        strategy=list(ShardingStrategy),
        has_expert_units=[False, True],
        use_orig_params=[True, False],
    )
)
@distributed(2)
def test_adapters_on_stacked_experts_train(
    strategy: ShardingStrategy, has_expert_units: bool, use_orig_params: bool
) -> None:
    """Values of three steps are a plain model's; peft parametrizes the experts in each forward."""
    with as_torchrun_starts():
        model = make_adapted_mixtral()
        plain = copy.deepcopy(model)
        options = {"strategy": strategy, "use_orig_params": use_orig_params}
        shard_mixtral(model, has_expert_units=has_expert_units, **options)
        optimizers = [torch.optim.AdamW(adapters_of(each), lr=1e-2) for each in (model, plain)]
        if use_orig_params:
            train_alike(model, plain, optimizers)
            return
        for step in range(3):
            model(input_ids=words(step), labels=words(step)).loss.backward()
            for rank in range(2):
                (plain(input_ids=words(step, rank), labels=words(step, rank)).loss / 2).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with unshard_params(model, writeback=False):
            found = {name: param.detach().clone() for name, param in model.named_parameters()}
        assert_alike(found, {name: param.detach() for name, param in plain.named_parameters()})


@needs("peft", "transformers")
@distributed(2)
def test_adapters_on_stacked_experts_are_saved_and_merged(tmp_path: Path) -> None:
    """What peft loads, and what it merges by itself."""
    from peft import PeftModel

    with as_torchrun_starts():
        model = make_adapted_mixtral()
        plain = copy.deepcopy(model)
        shard_mixtral(model, has_expert_units=True)
        optimizers = [torch.optim.AdamW(adapters_of(each), lr=1e-2) for each in (model, plain)]
        train_alike(model, plain, optimizers)
        save_pretrained(model, tmp_path)
        dist.barrier()
        loaded = PeftModel.from_pretrained(make_mixtral(), tmp_path)
        found = dict(iter_merged_params(model))
        plain.load_state_dict(values_of(model))
        with torch.no_grad():
            expected = plain(input_ids=words(7)).logits
            torch.testing.assert_close(loaded(input_ids=words(7)).logits, expected)
        merged = dict(plain.merge_and_unload().named_parameters())
        assert_alike(found, {name: param.detach() for name, param in merged.items()})


def make_tied_llama(*, is_tied: bool) -> Any:
    """Return a Llama of transformers whose head is that of the embeddings, on request."""
    from transformers import LlamaForCausalLM

    config = make_hf_llama().config
    config.tie_word_embeddings = is_tied
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def shard_llama_by(model: Any, **options: Any) -> None:
    """Make each layer a unit, and the rest."""
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)


@needs("transformers")
@pytest.mark.parametrize(
    *pairwise(
        strategy=list(ShardingStrategy),
        num_words=[WORDS + 8, WORDS - 8, WORDS],
        is_tied=[True, False],
        has_run=[True, False],
        use_orig_params=[True, False],
    )
)
@distributed(2)
def test_embeddings_resized_after_sharding_are_right_or_named_with_the_remedy(
    strategy: ShardingStrategy,
    num_words: int,
    is_tied: bool,
    has_run: bool,
    use_orig_params: bool,
) -> None:
    """The remedy, to resize before, trains as a plain model does; to the same size it is right."""
    options = {"strategy": strategy, "use_orig_params": use_orig_params}
    with as_torchrun_starts():
        model = make_tied_llama(is_tied=is_tied)
        shard_llama_by(model, **options)
        if has_run:
            model(input_ids=words(0) % 16, labels=words(0) % 16).loss.backward()
            model.zero_grad()

        def resize_and_run() -> None:
            model.resize_token_embeddings(num_words, mean_resizing=False)
            model(input_ids=words(0) % 16, labels=words(0) % 16).loss.backward()

        if num_words == WORDS:
            resize_and_run()
            return
        if not use_orig_params:
            with pytest.raises(RuntimeError, match=r"embed_tokens.* call register_orig_params\("):
                resize_and_run()
            register_orig_params(model)
        with pytest.raises((RuntimeError, ValueError), match=r"embed_tokens.* before fully_shard"):
            resize_and_run()
        remedied, plain = (make_tied_llama(is_tied=is_tied) for _ in range(2))
        for each in (remedied, plain):
            torch.manual_seed(1)
            each.resize_token_embeddings(num_words, mean_resizing=False)
        shard_llama_by(remedied, **options)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (remedied, plain)]
        for step in range(2):
            ids = words(step) % 16
            remedied(input_ids=ids, labels=ids).loss.backward()
            for rank in range(2):
                ids = words(step, rank) % 16
                (plain(input_ids=ids, labels=ids).loss / 2).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with unshard_params(remedied, writeback=False):
            found = {name: param.detach().clone() for name, param in remedied.named_parameters()}
        assert_alike(found, {name: param.detach() for name, param in plain.named_parameters()})
