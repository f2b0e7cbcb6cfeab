"""Other libraries with sharded models: transformers, accelerate, lightning, peft, torchao.

`pip install -e .[ecosystem]`, then `python -m tests.ecosystem [name ...]` runs each on two ranks,
beside what the library does by itself.
"""

from __future__ import annotations

import copy
import importlib.util
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from composable_shard import (
    Block,
    MixedPrecisionPolicy,
    StateDictOptions,
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    load_checkpoint,
    register_forward_method,
    save_checkpoint,
    set_optimizer_state_dict,
    shard_model,
    unshard_params,
)
from composable_shard.huggingface import save_pretrained
from composable_shard.optim import with_local_state
from composable_shard.planning import transformer_blocks
from tests.common.trainers import as_torchrun_starts
from tests.harness.ranks import run_ranks, shut_down_workers
from tests.programs.models import EVERYWHERE

WORDS = 32
SMALL: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "attn_implementation": "eager",
}
"""Options of a small decoder of transformers."""


def needs(*packages: str) -> Callable[[Any], Any]:
    """Mark a test of these packages, which CI installs and not everyone."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]

    def decorate(test: Any) -> Any:
        skip = pytest.mark.skipif(bool(missing), reason=f"needs {''.join(missing[:1])}")
        return pytest.mark.ecosystem(skip(test))

    return decorate


def make_hf_llama() -> Any:
    """Return a Llama of transformers, the same on all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=40))


def shard_llama(model: Any) -> Any:
    """Make each layer a unit, and the rest."""
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def words(step: int, rank: int | None = None) -> Tensor:
    """Return a rank's batch."""
    number = dist.get_rank() if rank is None else rank
    return torch.randint(WORDS, (2, 9), generator=torch.Generator().manual_seed(10 * step + number))


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's values on all ranks."""
    options = StateDictOptions(full_state_dict=True, rank0_only=False)
    return {
        name: value.clone() for name, value in get_model_state_dict(model, options=options).items()
    }


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare values by name."""
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def train_alike(model: Any, plain: Any, optimizers: list[torch.optim.Optimizer]) -> None:
    """Train a sharded model, and a plain one on the batches of both ranks; compare the values."""
    for step in range(3):
        model(input_ids=words(step), labels=words(step)).loss.backward()
        for rank in range(2):
            (plain(input_ids=words(step, rank), labels=words(step, rank)).loss / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_alike(values_of(model), dict(plain.state_dict()))


def shared_folder() -> Path:
    """Return a new directory that all ranks see."""
    found = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return Path(str(found[0]))


def run_lightning() -> None:
    """Lightning's ModelParallelStrategy, whose `configure_model` shards; saved and loaded."""
    import lightning as L
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    class Module(L.LightningModule):
        def __init__(self, shards: bool) -> None:
            super().__init__()
            self.model, self.shards, self.losses = make_hf_llama(), shards, []

        def configure_model(self) -> None:
            if self.shards:
                shard_llama(self.model)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss = self.model(input_ids=batch, labels=batch).loss
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    folder, results = shared_folder(), []
    for shards in (False, True):
        strategy = (
            ModelParallelStrategy(2, 1, process_group_backend="gloo")
            if shards
            else DDPStrategy(process_group_backend="gloo")
        )
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_steps=4,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            use_distributed_sampler=False,
            plugins=[TorchElasticEnvironment()],
        )
        module = Module(shards)
        loader = torch.utils.data.DataLoader([words(step) for step in range(4)], batch_size=None)
        trainer.fit(module, loader)
        results.append(module.losses)
        if shards:
            trainer.save_checkpoint(folder / "saved")
            assert (folder / "saved" / ".metadata").exists()
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-5)


def run_peft() -> None:
    """LoRA: trained beside FSDP2, saved as an adapter, loaded by peft, merged into the weights."""
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(1)
    model = get_peft_model(make_hf_llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    plain, theirs = copy.deepcopy(model), copy.deepcopy(model)
    for each, shard in ((model, fully_shard), (theirs, torch_fully_shard)):
        for layer in each.base_model.model.model.layers:
            shard(layer)
        shard(each)
    optimizers = [
        torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=1e-1)
        for each in (model, plain, theirs)
    ]
    train_alike(model, plain, optimizers[:2])
    for step in range(3):
        theirs(input_ids=words(step), labels=words(step)).loss.backward()
        optimizers[2].step()
        optimizers[2].zero_grad()
    for param, other in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), other.full_tensor(), rtol=1e-5, atol=1e-5)
    folder = shared_folder()
    save_pretrained(model, folder)
    dist.barrier()
    loaded = PeftModel.from_pretrained(make_hf_llama(), folder)
    with torch.no_grad():
        expected = plain(input_ids=words(7)).logits
        torch.testing.assert_close(loaded(input_ids=words(7)).logits, expected)
        with unshard_params(model):
            model.merge_adapter()
        merged = model(input_ids=words(7)).logits
    torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-5)


def run_generate() -> None:
    """Generate and train by turns, as in reinforcement learning: a plain model's words, FSDP2's."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    model, plain, theirs = shard_llama(make_hf_llama()), make_hf_llama(), make_hf_llama()
    register_forward_method(model, "generate")
    for layer in theirs.model.layers:
        torch_fully_shard(layer)
    register_fsdp_forward_method(torch_fully_shard(theirs), "generate")
    models = (model, plain, theirs)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in models]
    for step in range(3):
        prompt = words(step, 0)[:, :4]
        written = [
            each.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
            for each in models
        ]
        assert torch.equal(*written[:2])
        assert torch.equal(*written[1:])
        for each, optimizer in zip(models, optimizers, strict=True):
            each(input_ids=written[0], labels=written[0]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def run_blocks() -> None:
    """`transformer_blocks` of models whose blocks take turns, or are one that runs repeatedly."""
    from transformers import AlbertConfig, AlbertForMaskedLM, JambaConfig, JambaForCausalLM

    sizes = {
        "vocab_size": WORDS,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
    }
    for make in (
        lambda: AlbertForMaskedLM(AlbertConfig(embedding_size=8, **sizes)),
        lambda: JambaForCausalLM(JambaConfig(num_key_value_heads=2, num_experts=2, **sizes)),
    ):
        torch.manual_seed(1)
        model = make().train(False)  # no dropout
        plain = copy.deepcopy(model)
        shard_model(model, transformer_blocks(model))
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
        train_alike(model, plain, optimizers)


def run_torchao() -> None:
    """8-bit, 4-bit and float8 AdamW: beside FSDP2 and one process."""
    from torch._inductor import config
    from torchao import optim

    # The caches take a DTensor of one of these classes for one of another.
    config.force_disable_caches = True

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))

    for kind in (optim.AdamW8bit, optim.AdamW4bit, optim.AdamWFp8):
        torch.compiler.reset()
        size = 128 if kind is optim.AdamW4bit else 256
        models = [make(), make(), make()]
        torch_fully_shard(models[0])
        fully_shard(models[1], granularity=Block(size))
        kinds = (kind, with_local_state(kind), kind)
        optimizers = [
            each(model.parameters(), lr=1e-2, block_size=size)
            for each, model in zip(kinds, models, strict=True)
        ]
        losses: list[list[Tensor]] = [[], [], []]
        for step in range(4):
            for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                for rank in range(2) if index == 2 else [dist.get_rank()]:
                    x = torch.randn(
                        8, 64, generator=torch.Generator().manual_seed(10 * step + rank)
                    )
                    loss = model(x).square().mean()
                    (loss / 2 if index == 2 else loss).backward()
                    if rank == dist.get_rank():
                        losses[index].append(loss.detach())
                optimizer.step()
                optimizer.zero_grad()
        states = [state["exp_avg"].to_local() for state in optimizers[1].state.values()]
        assert any("OptimState" in type(state).__name__ for state in states)
        torch.testing.assert_close(losses[1], losses[2], rtol=0, atol=1e-6)
        torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=1e-6)
        _check_states(models[1], optimizers[1])


def run_torchao_weights() -> None:
    """Weights of torchao's classes, gathered as float8, 2 bits, bf16: beside FSDP2, bit by bit."""
    from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.prototype.moe_training.config import (
        Float8TrainingOpConfig,
        MXFP8TrainingOpConfig,
        MXFP8TrainingRecipe,
    )
    from torchao.prototype.quantized_training import (
        bitnet_training,
        int8_mixed_precision_training,
    )
    from torchao.quantization import quantize_

    def float8(gathers: bool) -> Any:
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers, emulate=True)
        return lambda model: convert_to_float8_training(model, config=config)

    def compiled(model: nn.Sequential) -> None:
        float8(True)(model)
        for layer in (model[0], model[2]):
            layer.compile(backend="aot_eager", fullgraph=True)

    mxfp8 = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
    conversions = [
        float8(False),
        float8(True),
        compiled,
        lambda model: quantize_(model, int8_mixed_precision_training()),
        lambda model: quantize_(model, bitnet_training()),
        lambda model: quantize_(model, Float8TrainingOpConfig()),
        lambda model: quantize_(model, mxfp8),
    ]
    for convert in conversions:
        for dtype in (None, torch.bfloat16):
            theirs = TorchPolicy(dtype, torch.float32)
            ours = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            expected = _train_converted(convert, torch_fully_shard, theirs)
            found = _train_converted(convert, fully_shard, ours)
            assert all(map(torch.equal, found, expected))


def run_torchao_parallel() -> None:
    """Float8 gathers of weights that tensor parallelism split: beside FSDP2, bit by bit."""
    from torch.distributed.tensor.parallel import parallelize_module
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)

    def convert(model: nn.Module) -> None:
        convert_to_float8_training(model, config=config)
        plan = {"0": Float8ColwiseParallel(), "2": Float8RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)

    expected = _train_converted(convert, torch_fully_shard, mesh=mesh["dp"])
    found = _train_converted(convert, fully_shard, mesh=mesh["dp"])
    assert all(map(torch.equal, found, expected))


def _train_converted(convert: Any, shard: Any, policy: Any = None, mesh: Any = None) -> list[Any]:
    """Train three steps; return the losses and, but for DTensors, the weights."""
    options = {} if policy is None else {"mp_policy": policy}
    rank = dist.get_rank() if mesh is None else mesh.get_local_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh())
    convert(model)
    for layer in (model[0], model[2]):
        shard(layer, mesh=mesh, **options)
    shard(model, mesh=mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if mesh is not None:
        return losses
    whole: list[Any] = [param.full_tensor() for param in model.parameters()]
    is_class = torch.utils._python_dispatch.is_traceable_wrapper_subclass
    plain = [getattr(w, w.__tensor_flatten__()[0][0]) if is_class(w) else w for w in whole]
    return [*losses, *plain]


def _check_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """State dicts and checkpoints keep quantised state bitwise, whole state dicts in fp32."""
    whole = get_optimizer_state_dict(model, optimizer, options=EVERYWHERE)["state"]
    state = pickle.loads(pickle.dumps(get_optimizer_state_dict(model, optimizer)))
    other = copy.deepcopy(state)
    for each in other["state"].values():
        each["exp_avg"] = torch.zeros(each["exp_avg"].shape)
    for given, is_same in ((other, False), (state, True)):
        set_optimizer_state_dict(model, optimizer, given)
        found = get_optimizer_state_dict(model, optimizer, options=EVERYWHERE)["state"]
        kinds = {type(s["exp_avg"].to_local()).__name__ for s in optimizer.state.values()}
        assert any("OptimState" in kind for kind in kinds)
        for fqn, values in whole.items():
            assert torch.equal(found[fqn]["exp_avg"], values["exp_avg"]) is is_same
            assert torch.equal(found[fqn]["exp_avg_sq"], values["exp_avg_sq"])
    folder = shared_folder()
    save_checkpoint(folder, model, optimizer, step=1)
    expected = _plain_parts(optimizer)
    set_optimizer_state_dict(model, optimizer, other)
    for each in (optimizer, type(optimizer)(model.parameters(), block_size=optimizer.block_size)):
        load_checkpoint(folder, model, each)
        found = _plain_parts(each)
        assert all(map(torch.equal, found, expected))
        assert len(found) == len(expected)


def _plain_parts(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the bytes of this rank's state: codes, scales, lookup tables."""
    found = []
    for state in optimizer.state.values():
        for value in state.values():
            local = value.to_local() if hasattr(value, "to_local") else value
            names = local.__tensor_flatten__()[0] if hasattr(local, "__tensor_flatten__") else ()
            parts = [getattr(local, name) for name in names] or [local]
            found += [part.reshape(-1).view(torch.uint8).clone() for part in parts]
    return found


RUNS = {
    "lightning": run_lightning,
    "peft": run_peft,
    "generate": run_generate,
    "blocks": run_blocks,
    "torchao": run_torchao,
    "torchao_weights": run_torchao_weights,
    "torchao_parallel": run_torchao_parallel,
}
NUM_RANKS = {"torchao_parallel": 4}


def run_quietly(name: str) -> None:
    """Run one."""
    with as_torchrun_starts():
        RUNS[name]()


def run_all(names: list[str]) -> None:
    """Run each on two ranks, or four; print which are right."""

    def run(name: str) -> str:
        run_ranks(NUM_RANKS.get(name, 2), run_quietly, name, timeout=300)
        return "right"

    print_each(names or RUNS, run)


def print_each(names: Iterable[str], run: Callable[[str], str]) -> None:
    """Run each; print what came of it, or its error."""
    for name in names:
        try:
            sys.stdout.write(f"{name}: {run(name)}\n")
        except Exception as error:  # the next library is another matter
            sys.stdout.write(f"{name}: {error}\n")
        sys.stdout.flush()
    shut_down_workers()
