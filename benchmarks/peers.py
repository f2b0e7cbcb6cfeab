"""Ways to train one model on several ranks, each built around a model with a `layers` list.

`fsdp2` and `ours` are the defaults of both: every layer is freed after its forward, the root kept.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from benchmarks import other_libraries

Builder = Callable[[nn.Module], nn.Module]


def _ddp(model: nn.Module, *, bucket_view: bool) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)


def _fsdp1(model: nn.Module, *, strategy: ShardingStrategy) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({type(layer) for layer in model.layers}),
        device_id=torch.device("cpu"),
    )


def _fsdp2(
    model: nn.Module,
    *,
    reshard_after_forward: bool | None,
    splits_root: bool = False,
    replicas: int = 1,
) -> nn.Module:
    options: dict[str, Any] = {"reshard_after_forward": reshard_after_forward}
    if replicas > 1:
        options["mesh"] = _two_dimensional(replicas)
    for layer in (*model.layers, *([model.embedding] if splits_root else [])):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def _two_dimensional(replicas: int) -> Any:
    """Return a mesh of so many replicas, each of which shards over its own ranks."""
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def _ours(
    model: nn.Module,
    *,
    strategy: str = "FULL_SHARD",
    layers_per_unit: int = 1,
    splits_root: bool = False,
    replicas: int = 1,
    **options: Any,
) -> nn.Module:
    package = importlib.import_module("composable_shard")
    options["strategy"] = package.ShardingStrategy[strategy]
    if replicas > 1:
        options["mesh"] = _two_dimensional(replicas)
    if splits_root:
        package.fully_shard(model.embedding, **options)
    layers = list(model.layers) if layers_per_unit else []
    for start in range(0, len(layers), layers_per_unit or 1):
        package.fully_shard(layers[start : start + layers_per_unit], **options)
    return package.fully_shard(model, **options)


def _ours_blocks(model: nn.Module) -> nn.Module:
    package = importlib.import_module("composable_shard")
    rules = importlib.import_module("composable_shard.planning").transformer_blocks(model)
    package.shard_model(model, rules)
    return model


class Subclass(torch.Tensor):
    """Torch asks such a tensor what it asks any subclass, and then takes it for a plain one."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def _subclass(model: nn.Module) -> nn.Module:
    """Make the parameters and their gradients tensors of a subclass that does nothing."""
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            # Not through `nn.Parameter`, which wants a subclass that `detach` keeps.
            module._parameters[name] = param.detach().as_subclass(Subclass).requires_grad_()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(_cast_gradient)
    return model


def _cast_gradient(param: torch.Tensor) -> None:
    param.grad = param.grad.as_subclass(Subclass)


_BUILDERS: dict[str, Builder] = {
    "bare": lambda model: model,
    "subclass": _subclass,
    "ddp": partial(_ddp, bucket_view=False),
    "ddp_view": partial(_ddp, bucket_view=True),
    "zero1": partial(_ddp, bucket_view=True),
    "fsdp1": partial(_fsdp1, strategy=ShardingStrategy.FULL_SHARD),
    "fsdp1_gradop": partial(_fsdp1, strategy=ShardingStrategy.SHARD_GRAD_OP),
    "fsdp1_noshard": partial(_fsdp1, strategy=ShardingStrategy.NO_SHARD),
    "fsdp2": partial(_fsdp2, reshard_after_forward=None),
    "fsdp2_raf": partial(_fsdp2, reshard_after_forward=True),  # the root as well
    "fsdp2_keep": partial(_fsdp2, reshard_after_forward=False),
    # The embedding is a unit of its own: it is freed between its forward and its backward.
    "fsdp2_split": partial(_fsdp2, reshard_after_forward=None, splits_root=True),
    "fsdp2_2d": partial(_fsdp2, reshard_after_forward=None, replicas=2),
    "ours_2d": partial(_ours, replicas=2),
    "ours_blocks": _ours_blocks,  # as `shard_model` splits it
    "ours_split": partial(_ours, splits_root=True),
    "ours_optim_split": partial(_ours, strategy="SHARD_OPTIM", splits_root=True),
    "ours": partial(_ours, reshard_after_forward=None),
    "ours_raf": partial(_ours, reshard_after_forward=True),  # the root as well
    "ours_keep": partial(_ours, reshard_after_forward=False),
    "ours_flat": partial(_ours, use_orig_params=False),
    "ours_row": partial(_ours, granularity="row"),
    "ours_param": partial(_ours, granularity="param"),
    "ours_gradop": partial(_ours, strategy="SHARD_GRAD_OP"),
    "ours_optim": partial(_ours, strategy="SHARD_OPTIM"),
    "ours_noshard": partial(_ours, strategy="NO_SHARD"),
    # Small layers, many to a unit: one collective for all of them.
    "ours_merged": partial(_ours, layers_per_unit=12),
    "ours_gradop_merged": partial(_ours, strategy="SHARD_GRAD_OP", layers_per_unit=12),
    "ours_optim_merged": partial(_ours, strategy="SHARD_OPTIM", layers_per_unit=12),
    "ours_noshard_merged": partial(_ours, strategy="NO_SHARD", layers_per_unit=8),
    "ours_noshard_one": partial(_ours, strategy="NO_SHARD", layers_per_unit=0),
    "ours_buckets": partial(_ours, strategy="NO_SHARD", layers_per_unit=0, bucket_cap_mb=25),
    **{name: build for name, (_, build) in other_libraries.BUILDERS.items()},
}
PEERS = tuple(_BUILDERS)


def is_available(peer: str) -> bool:
    """Return whether the peer can be built here; ours and other libraries may be missing."""
    if peer not in _BUILDERS:
        raise ValueError(f"expected a peer out of {', '.join(PEERS)}, got {peer!r}")
    if peer in other_libraries.BUILDERS:
        return importlib.util.find_spec(other_libraries.BUILDERS[peer][0]) is not None
    if not peer.startswith("ours"):
        return True
    if importlib.util.find_spec("composable_shard") is None:
        return False
    return hasattr(importlib.import_module("composable_shard"), "fully_shard")


def parse_peers(text: str) -> list[str]:
    """Return the available peers of a comma-separated list, in order."""
    names = text.split(",")
    missing = [name for name in names if not is_available(name)]
    if missing:
        print(f"left out: {', '.join(missing)} (not installed)", file=sys.stderr)
    return [name for name in names if name not in missing]


def build(peer: str, model: nn.Module) -> nn.Module:
    """Return the model made ready for training by this peer; most change it in place."""
    return _BUILDERS[peer](model)


def make_optimizer(peer: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return fused AdamW over the built model's parameters."""
    if hasattr(model, "peer_optimizer"):
        return model.peer_optimizer  # type: ignore[no-any-return]
    if peer == "zero1":
        # Imported where it is wanted: it warns of a deprecated function of its own.
        kind = importlib.import_module("torch.distributed.optim").ZeroRedundancyOptimizer
        return kind(model.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
