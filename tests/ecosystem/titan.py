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
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy

from tests.ecosystem.programs import print_each
from tests.harness.helpers import run_ranks

FROM = ("torch.distributed._composable.fsdp import FSDPModule", "torch.distributed.fsdp import (")
TO = ("composable_shard.fsdp2 import FSDPModule", "composable_shard.fsdp2 import (")
NUM_RANKS = 4

# Degrees of replicas, sharding and tensor parallelism; whether layers are checkpointed and
# compiled; the dtype of computations. Compiled tensor-parallel layers need a newer torch.
CASES: dict[str, tuple[tuple[int, int, int], bool, bool, str]] = {
    "sharded": ((1, 4, 1), False, False, "float32"),
    "tensor and sequence parallel": ((1, 2, 2), False, False, "float32"),
    "replicas, checkpointed": ((2, 2, 1), True, False, "float32"),
    "checkpointed, compiled, bf16": ((1, 4, 1), True, True, "bfloat16"),
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


def train_titan(name: str, shard: Any) -> list[tuple[float, float]]:
    """Return loss and gradient norm of three steps."""
    from torchtitan import config as titan
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models.llama3 import parallelize

    (replicas, shards, tensor), is_checkpointed, is_compiled, dtype = CASES[name]
    parallel_dims.device_type = "cpu"
    degrees = titan.ParallelismConfig(
        data_parallel_replicate_degree=replicas,
        data_parallel_shard_degree=shards,
        tensor_parallel_degree=tensor,
        spmd_backend="partial_dtensor",
    )
    dims = ParallelDims.from_config(degrees, dist.get_world_size())
    dims.build_mesh()
    torch.manual_seed(0)
    model = llama_config().build()
    model.init_states()
    parallelize.apply_fsdp_to_decoder = shard
    parallelize.parallelize_llama(
        model,
        parallel_dims=dims,
        training=titan.TrainingConfig(
            mixed_precision_param=dtype, mixed_precision_reduce="float32"
        ),
        parallelism=degrees,
        compile_config=titan.CompileConfig(enable=is_compiled, backend="aot_eager"),
        ac_config=FullAC.Config() if is_checkpointed else None,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(3):
        seed = 10 * step + dist.get_rank() // tensor
        words = torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(seed))
        logits = model(words)
        logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        loss = cross_entropy(logits.flatten(0, 1).float(), words.flatten()) / (replicas * shards)
        loss.backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


def train_both(name: str) -> list[str]:
    """Train with FSDP2 and without it; return the lines that differ."""
    warnings.simplefilter("ignore")
    sys.meta_path.insert(0, _NoKernels())
    from torchtitan.distributed import fsdp

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
