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


# Of the package, that a program imports which shards a model and steps: 141 and `dtensors`, by
# which it does not import torch's 500 modules of DTensors and sympy.
MAX_MODULES = 142


def _modules_after(*statements: str) -> list[set[str]]:
    """Return the modules that are imported after each statement, in a new interpreter."""
    shown = "; print(*sys.modules)"
    code = "\n".join(["import sys", *(statement + shown for statement in statements)])
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return [set(line.split()) for line in found.stdout.splitlines()]


def test_a_program_imports_what_it_uses() -> None:
    """Of the package what a step needs; nothing of torch that FSDP2 does not need, and less."""
    plain, more = _modules_after("import composable_shard", "composable_shard.shard_model")
    assert {name.split(".")[1] for name in plain if name.startswith("composable_shard.")} == {
        *("comm", "construct", "flat_param", "layout", "options", "runtime", "tensor"),
        *("dtensors", "torch_private"),
    }
    assert len([name for name in plain if name.startswith("composable_shard")]) <= MAX_MODULES
    new = {name.split(".")[1] for name in more - plain if name.startswith("composable_shard.")}
    assert "planning" in new
    assert not new & {"checkpoint", "huggingface"}
    theirs, both = _modules_after("import torch.distributed.fsdp", "import composable_shard")
    assert {name for name in both - theirs if not name.startswith("composable_shard")} == set()


def test_torchs_modules_that_an_import_adds() -> None:
    """Those of `contract`, by which a module tells what was applied to it; FSDP2's adds 550."""
    torchs, plain = _modules_after("import torch", "import composable_shard")
    added = {name for name in plain - torchs if not name.startswith("composable_shard")}
    assert added
    assert all(name.startswith("torch.distributed._composable") for name in added)
    (theirs,) = _modules_after("from torch.distributed.fsdp import fully_shard")
    assert len(theirs - torchs) > 20 * len(added)


def test_a_program_without_dtensors_imports_none() -> None:
    """Not for forwards, backwards and scopes. Torch imports DTensor itself with an optimizer, and
    with the first operation on any tensor that has `__torch_dispatch__`, as `state_dict()`."""
    code = (
        "import torch, composable_shard; from torch import nn;"
        "model = composable_shard.fully_shard(nn.Linear(3, 3));"
        "model(torch.ones(1, 3)).sum().backward(); model.eval()(torch.ones(1, 3));"
        "shown = composable_shard.unshard_params(model); shown.__enter__();"
        "shown.__exit__(None, None, None)"
    )
    (found,) = _modules_after(code)
    assert "composable_shard.module_api.full_params" in found
    assert not found & {"torch.distributed.tensor", "sympy", "torch._dynamo"}


def test_a_step_imports_nothing_more() -> None:
    """Of the package: `state_dict()` is the first that does, for its hooks."""
    code = (
        "import torch, composable_shard; from torch import nn; model = nn.Linear(3, 3);"
        "optimizer = torch.optim.AdamW(composable_shard.fully_shard(model).parameters());"
        "model(torch.ones(1, 3)).sum().backward(); optimizer.step(); optimizer.zero_grad()"
    )
    before, stepped, saved = _modules_after(
        "import composable_shard",
        f"{code}",
        "assert type(model.state_dict()['weight']) is not nn.Parameter",
    )
    ours = {name for name in stepped - before if name.startswith("composable_shard")}
    assert ours == set()
    assert "composable_shard.state_dict.model_state" in saved - stepped


def test_names_that_are_imported_late_are_like_others() -> None:
    """In `dir` from the start, the packages' own objects, and no other name passes for one."""
    code = (
        "import composable_shard; names = dir(composable_shard);"
        "assert {*composable_shard.__all__, 'checkpoint', 'planning', 'module_api'} <= {*names};"
        "from composable_shard import *;"
        "assert shard_model is composable_shard.shard_model;"
        "assert shard_model is composable_shard.planning.shard_model;"
        "assert no_sync is composable_shard.module_api.no_sync;"
        "assert clip_grad_norm_ is composable_shard.optim.clip_grad_norm_"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="'composable_shard' has no attribute 'shard_modle'"):
        composable_shard.shard_modle  # noqa: B018 -- raises
    with pytest.raises(ImportError, match="cannot import name 'shard_modle'"):
        exec("from composable_shard import shard_modle")
