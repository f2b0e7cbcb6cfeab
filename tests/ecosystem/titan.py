"""torchtitan's `parallelize_llama`, with FSDP2 and with its two import statements changed.

`pip install torchtitan==0.3.0`, then `python -m tests.ecosystem.titan` runs each case on four
ranks. Its file for FSDP2 is taken as it is installed, but for the two modules that it imports names
from. Two things are other than on GPUs: attention is torch's `scaled_dot_product_attention`, which
the library still has, and FSDP2 adds gradients up before it divides them, as gloo can't do both.
"""

from __future__ import annotations

import difflib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from tests.ecosystem.programs import print_each
from tests.harness.ranks import run_ranks

FROM = ("torch.distributed._composable.fsdp import FSDPModule", "torch.distributed.fsdp import (")
TO = ("composable_shard.fsdp2 import FSDPModule", "composable_shard.fsdp2 import (")
NUM_RANKS = 4


@dataclass(frozen=True)
class TitanCase:
    """A way to train. The backend "spmd_types" needs torch 2.14 or newer.

    Args:
        replicas, shards, tensor: Degrees of parallelism.
        experts: Degree of parallelism of a mixture of experts; 0 is a dense model.
    """

    replicas: int
    shards: int
    tensor: int
    experts: int = 0
    is_checkpointed: bool = False
    is_compiled: bool = False
    dtype: str = "float32"
    backend: str = "partial_dtensor"


_TYPED: dict[str, Any] = {"backend": "spmd_types"}
_COMPILED: dict[str, Any] = {"is_checkpointed": True, "is_compiled": True, "dtype": "bfloat16"}
CASES = {
    "sharded": TitanCase(1, 4, 1),
    "tensor and sequence parallel": TitanCase(1, 2, 2),
    "replicas, checkpointed": TitanCase(2, 2, 1, is_checkpointed=True),
    "checkpointed, compiled, bf16": TitanCase(1, 4, 1, **_COMPILED),
    "experts": TitanCase(1, 4, 1, experts=1),
    "experts parallel": TitanCase(1, 4, 1, experts=2),
    "typed: sharded": TitanCase(1, 4, 1, **_TYPED),
    "typed: tensor and sequence parallel": TitanCase(1, 2, 2, **_TYPED),
    "typed: tensor parallel alone": TitanCase(1, 1, 4, **_TYPED),
    "typed: tensor parallel, checkpointed": TitanCase(1, 2, 2, is_checkpointed=True, **_TYPED),
    "typed: replicas, checkpointed": TitanCase(2, 2, 1, is_checkpointed=True, **_TYPED),
    "typed: replicas, tensor parallel": TitanCase(2, 1, 2, **_TYPED),
    "typed: checkpointed, compiled, bf16": TitanCase(1, 4, 1, **_COMPILED, **_TYPED),
    "typed: tensor parallel, checkpointed, compiled": TitanCase(
        1, 2, 2, is_checkpointed=True, is_compiled=True, **_TYPED
    ),
    "typed: experts": TitanCase(1, 4, 1, experts=1, **_TYPED),
    "typed: experts parallel": TitanCase(1, 4, 1, experts=2, **_TYPED),
    "typed: experts and tensor parallel": TitanCase(1, 2, 2, experts=2, **_TYPED),
    "typed: experts over all, tensor parallel": TitanCase(1, 2, 2, experts=4, **_TYPED),
    "typed: experts parallel, checkpointed": TitanCase(
        1, 4, 1, experts=4, is_checkpointed=True, **_TYPED
    ),
}


class _NoKernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for a module of kernels that needs triton, for experts alone."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Answer for that module."""
        is_it = name == "torchtitan.distributed.minimal_async_ep.kernels"
        return importlib.machinery.ModuleSpec(name, self) if is_it else None

    def create_module(self, spec: Any) -> Any:
        """Make something that has every name."""
        return MagicMock(name=spec.name)

    def exec_module(self, module: Any) -> None:
        """Do nothing."""


def ported(file: str) -> tuple[Any, list[str]]:
    """Return the module in a file with its imports changed, and the lines that differ."""
    text = Path(file).read_text()
    changed = text
    for before, after in zip(FROM, TO, strict=True):
        assert changed.count(before) == 1
        changed = changed.replace(before, after)
    lines = difflib.ndiff(text.splitlines(), changed.splitlines())
    module = types.ModuleType("ported")
    exec(compile(changed, "ported", "exec"), vars(module))
    return module, [line for line in lines if line.startswith("+ ")]


def llama_config() -> Any:
    """Return the configuration of a Llama of three layers."""
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    llama3.get_attention_config = lambda name: ScaledDotProductAttention.Config()
    rope = llama3.ComplexRoPE.Config(dim=16, max_seq_len=64, theta=500000, scaling="llama")
    sizes = {"n_layers": 3, "dim": 64, "n_heads": 4, "hidden_dim": 96}
    config = llama3.Llama3Model.Config(
        dim=64,
        vocab_size=128,
        tok_embeddings=llama3.Embedding.Config(
            num_embeddings=128, embedding_dim=64, param_init=llama3._EMBEDDING_INIT
        ),
        norm=llama3.RMSNorm.Config(normalized_shape=64, param_init=llama3._NORM_INIT),
        lm_head=llama3.Linear.Config(
            in_features=64, out_features=128, param_init=llama3._output_linear_init(64)
        ),
        layers=llama3._build_llama3_layers(
            **sizes, fuse_qkv=True, rope=rope, attn_backend="replaced above"
        ),
    )
    set_llama3_sharding_config(config, enable_sp=True)
    return config


def experts_config(is_parallel: bool) -> Any:
    """Return the configuration of a Qwen3 of two layers with eight experts each."""
    from torchtitan.models import qwen3
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

    qwen3.get_attention_config = lambda name: ScaledDotProductAttention.Config()
    config = qwen3.Qwen3Model.Config(
        dim=64,
        vocab_size=128,
        norm=qwen3._qwen3_norm(64),
        tok_embeddings=qwen3.Embedding.Config(
            num_embeddings=128, embedding_dim=64, param_init=qwen3._EMBEDDING_INIT
        ),
        lm_head=qwen3.Linear.Config(
            in_features=64, out_features=128, param_init=qwen3._LINEAR_INIT
        ),
        layers=qwen3._build_qwen3_moe_layers(
            n_layers=2,
            dim=64,
            n_heads=4,
            n_kv_heads=2,
            head_dim=16,
            moe_hidden_dim=96,
            num_experts=8,
            top_k=2,
            attn_backend="replaced above",
            rope=qwen3.CosSinRoPE.Config(dim=16, max_seq_len=64, theta=1e6),
            moe_comm_backend="standard",
        ),
    )
    set_qwen3_sharding_config(config, enable_sp=True, enable_ep=is_parallel)
    return config


def all_to_all(outputs: list[Tensor], inputs: list[Tensor], group: Any = None) -> None:
    """Exchange rows; gloo's own takes as many of each rank."""
    received = torch.cat(outputs)
    rows = [list(map(len, each)) for each in (outputs, inputs)]
    dist.all_to_all_single(received, torch.cat(inputs), *rows, group=group)
    for output, rows_of_rank in zip(outputs, received.split(rows[0]), strict=True):
        output.copy_(rows_of_rank)


def built(case: TitanCase, shard: Any) -> tuple[nn.Module, Any]:
    """Return a sharded model, and its degrees of parallelism."""
    from torchtitan import config as titan
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed import utils as titan_utils
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models.llama3 import parallelize as of_llama
    from torchtitan.models.qwen3 import parallelize as of_qwen

    parallel_dims.device_type = "cpu"
    degrees = titan.ParallelismConfig(
        data_parallel_replicate_degree=case.replicas,
        data_parallel_shard_degree=case.shards,
        tensor_parallel_degree=case.tensor,
        expert_parallel_degree=max(case.experts, 1),
        spmd_backend=case.backend,
    )
    titan_utils.set_spmd_backend(case.backend)
    dims = ParallelDims.from_config(degrees, dist.get_world_size())
    dims.build_mesh()
    torch.manual_seed(0)
    config = experts_config(case.experts > 1) if case.experts else llama_config()
    model = config.build()
    model.init_states()
    of_model = of_qwen if case.experts else of_llama
    of_model.apply_fsdp_to_decoder = shard
    parallelize = of_qwen.parallelize_qwen3 if case.experts else of_llama.parallelize_llama
    parallelize(
        model,
        parallel_dims=dims,
        training=titan.TrainingConfig(
            mixed_precision_param=case.dtype, mixed_precision_reduce="float32"
        ),
        parallelism=degrees,
        compile_config=titan.CompileConfig(enable=case.is_compiled, backend="aot_eager"),
        ac_config=FullAC.Config() if case.is_checkpointed else None,
        dump_folder="",
    )
    return model, dims


def grouped_mm(self: Any, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
    """Multiply the rows of each expert, which end at `offs`, by its matrix, in any dtype."""
    ends = offs.tolist()
    rows = [A[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return torch.cat([x @ matrix for x, matrix in zip(rows, B_t, strict=True)])


def train_titan(name: str, shard: Any) -> list[tuple[float, float]]:
    """Return loss and gradient norm of three steps."""
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.distributed import utils as titan_utils

    case = CASES[name]
    model, dims = built(case, shard)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(3):
        seed = 10 * step + dist.get_rank() // case.tensor
        words = torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(seed))
        with titan_utils.get_spmd_context(parallel_dims=dims)():
            logits = model(words)
            if case.backend == "spmd_types":
                loss = cross_entropy_loss(logits, words, global_vocab_size=128) / words.numel()
            else:
                logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
                loss = cross_entropy(logits.flatten(0, 1).float(), words.flatten())
            (loss / (case.replicas * case.shards)).backward()
        # It has a way of its own for experts, which asks for DTensors. Ours need none.
        is_fsdp2 = isinstance(next(model.parameters()), DTensor)
        norm = titan_utils.clip_grad_norm_(
            model.parameters(), 1.0, ep_enabled=is_fsdp2 and case.experts > 1
        )
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


def train_both(name: str) -> list[str]:
    """Train with FSDP2 and without it; return the lines that differ."""
    warnings.simplefilter("ignore")
    dist.all_to_all = all_to_all
    # Experts cast to bf16 always, where a last bit of float32 may become one of bf16.
    torch.Tensor.bfloat16 = torch.Tensor.float  # type: ignore[method-assign,assignment]
    sys.meta_path.insert(0, _NoKernels())
    from torchtitan.distributed import fsdp
    from torchtitan.models.common.moe import GroupedExperts

    GroupedExperts._grouped_mm = grouped_mm
    module, lines = ported(fsdp.__file__)
    expected = train_titan(name, fsdp.apply_fsdp_to_decoder)
    torch.compiler.reset()
    found = train_titan(name, module.apply_fsdp_to_decoder)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    return lines


def run_cases(names: list[str]) -> None:
    """Run each case; print which are right, and what was changed."""

    def run(name: str) -> str:
        lines = run_ranks(NUM_RANKS, train_both, name, timeout=300)[0]
        return f"right, {len(lines)} lines changed"

    print_each(names or CASES, run)


if __name__ == "__main__":
    from tests.ecosystem import titan  # by its name, under which the workers find its functions

    titan.run_cases(sys.argv[1:])
