"""Other libraries' ways to train a model, each imported when it is asked for.

Nothing else needs them. On the CPU, beside torch 2.13 as it is:

    pip install --no-deps deepspeed==0.19.8 hjson msgpack py-cpuinfo psutil pydantic pydantic_core \
        typing-inspection annotated-types tqdm einops ninja
    pip install --no-deps --no-build-isolation fairscale==0.4.13
    pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3 tyro typeguard docstring-parser rich

The first use of DeepSpeed compiles a communication kernel for the CPU, which takes 40 s.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

Builder = Callable[[nn.Module], nn.Module]


class EngineOptimizer(torch.optim.SGD):
    """Steps a DeepSpeed engine, which owns the real optimizer and clears gradients itself."""

    def __init__(self, engine: Any) -> None:
        super().__init__([torch.zeros(1, requires_grad=True)], lr=0.0)
        self._engine = engine

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Let the engine step."""
        self._engine.step()


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


def _deepspeed(model: nn.Module, *, stage: int) -> nn.Module:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Asked for before it looks for a launcher: the group that there is.
    names = {"RANK": dist.get_rank(), "LOCAL_RANK": 0, "WORLD_SIZE": dist.get_world_size()}
    for name, number in names.items():
        os.environ.setdefault(name, str(number))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # 1.0 if nothing is said
    }
    engine, *_ = importlib.import_module("deepspeed").initialize(
        model=model, optimizer=_adamw(model.parameters()), config=config
    )
    engine.peer_optimizer = EngineOptimizer(engine)
    return engine  # type: ignore[no-any-return]


def _simple_fsdp(model: nn.Module) -> nn.Module:
    shard = importlib.import_module(
        "torchtitan.experiments.graph_trainer.simple_fsdp"
    ).data_parallel
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    return shard(model, mesh, "fully_shard")  # type: ignore[no-any-return]


def _oss(model: nn.Module) -> Any:
    kind = importlib.import_module("fairscale.optim.oss").OSS
    return kind(model.parameters(), optim=torch.optim.AdamW, lr=1e-3, fused=True)


def _fairscale_sharded_ddp(model: nn.Module) -> nn.Module:
    optimizer = _oss(model)
    wrap = importlib.import_module("fairscale.nn.data_parallel").ShardedDataParallel
    # With buckets (the default) losses differ from DDP's from the third step on.
    wrapper = wrap(model, optimizer, reduce_buffer_size=0)
    wrapper.peer_optimizer = optimizer
    return wrapper  # type: ignore[no-any-return]


def _fairscale_oss(model: nn.Module) -> nn.Module:
    optimizer = _oss(model)
    wrapper = DistributedDataParallel(model, gradient_as_bucket_view=True)
    wrapper.peer_optimizer = optimizer  # type: ignore[assignment]
    return wrapper


# By peer: the package that it needs, and what builds it.
BUILDERS: dict[str, tuple[str, Builder]] = {
    "deepspeed_1": ("deepspeed", partial(_deepspeed, stage=1)),
    "deepspeed_2": ("deepspeed", partial(_deepspeed, stage=2)),
    "deepspeed_3": ("deepspeed", partial(_deepspeed, stage=3)),
    "fairscale_oss": ("fairscale", _fairscale_oss),
    "fairscale_sddp": ("fairscale", _fairscale_sharded_ddp),
    "simple_fsdp": ("torchtitan", _simple_fsdp),
}
