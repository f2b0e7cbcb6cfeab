"""Adding or removing a public name is a decision, not an accident."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings

import pytest

import composable_shard
from composable_shard.torch_private import warn_of_newer

TOP = [
    "Block",
    "FlatLayout",
    "FlatParamHandle",
    "FlatShard",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardedGradScaler",
    "ShardingStrategy",
    "StateDictOptions",
    "clip_grad_norm_",
    "count_collectives",
    "describe",
    "drop_pending_gradients",
    "estimate",
    "find_checkpoint",
    "fully_shard",
    "get_handles",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_pending_gradients",
    "get_root_states",
    "get_states",
    "is_sharded",
    "iter_full_params",
    "lazy_init",
    "load_checkpoint",
    "load_safetensors",
    "no_sync",
    "reduce_pending_gradients",
    "register_comm_hook",
    "register_flat_param",
    "register_forward_method",
    "register_orig_params",
    "reshard",
    "save_checkpoint",
    "save_safetensors",
    "set_backward_prefetch",
    "set_forward_prefetch",
    "set_gathers_at_rest",
    "set_gradient_divide_factor",
    "set_is_last_backward",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_requires_all_reduce",
    "set_requires_gradient_sync",
    "set_reshard_after_backward",
    "set_reshard_after_forward",
    "set_unshard_in_backward",
    "shard_model",
    "shard_optimizer_state",
    "unshard",
    "unshard_params",
    "writeback",
]
# What users find only in a package.
BELOW = {
    "checkpoint": ["CheckpointSave", "LoadedCheckpoint"],
    "comm": [
        "CommHook",
        "ReductionStage",
    ],
    "huggingface": [
        "Joined",
        "TrainerMixin",
        "iter_merged_params",
        "keep_unwrapped",
        "save_pretrained",
    ],
    "module_api": ["UnshardWork"],
    "optim": ["with_local_state"],
    "pipelining": ["PipelineStage"],
    "planning": [
        "DescribedUnit",
        "Description",
        "Estimate",
        "ShardingPlan",
        "by_class",
        "tabulate",
        "transformer_blocks",
    ],
}


# FSDP2's names, in the place of those at the top.
FSDP2 = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "StateDictOptions",
    "UnshardHandle",
    "fully_shard",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "install",
    "register_fsdp_forward_method",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "share_comm_ctx",
]


def test_top_level_names() -> None:
    """What most programs need; DESIGN section 4, as far as it exists."""
    assert composable_shard.__all__ == TOP
    assert all(hasattr(composable_shard, name) for name in TOP)


def test_names_of_fsdp2() -> None:
    """Torch's; policies are torch's own classes."""
    assert importlib.import_module("composable_shard.fsdp2").__all__ == FSDP2


@pytest.mark.parametrize("package", BELOW)
def test_names_of_packages(package: str) -> None:
    """`__all__` has them; what else is imported is at the top, or for other packages."""
    module = importlib.import_module(f"composable_shard.{package}")
    assert module.__all__ == BELOW[package]
    assert all(hasattr(module, name) for name in module.__all__)
    assert not set(BELOW[package]) & set(TOP)


def test_a_torch_newer_than_those_tried_is_warned_of() -> None:
    """By name and version, with what to do."""
    with pytest.warns(UserWarning, match=r"tried on torch up to 2\.15, and this is 3\.0\.0a0\+git"):
        warn_of_newer("3.0.0a0+git")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for version in ("2.11.0", "2.15.1+cu132"):
            warn_of_newer(version)


def test_importing_the_package_imports_no_checkpoint_and_no_fsdp_of_torch() -> None:
    """They take as long as all of the package; what saves, and what shards by FSDP, has them."""
    code = (
        "import sys, composable_shard;"
        "print([n for n in sys.modules if n in"
        " ('torch.distributed.checkpoint', 'torch.distributed.fsdp')])"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"
