"""What torch's own state-dict functions get from sharded models.

[Note: Torch's functions]
`torch.distributed.checkpoint.state_dict` gathers DTensors and ShardedTensors. Of any other tensor
it reads only the class: it calls `state_dict()` without arguments and returns the values without
another op or attribute. So only the interpreter's frames say which options a user has passed. A
state-dict hook of units reads them. Torch also asks each module whether it renames parameters;
there optimizers get hooks for one call, which gather or cut their state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from composable_shard.options import StateDictOptions
from composable_shard.runtime import ShardState
from composable_shard.state_dict.model_state import check_shows_originals
from composable_shard.state_dict.optimizer_groups import view_optimizers
from composable_shard.state_dict.optimizer_loading import cut_state
from composable_shard.state_dict.optimizer_reading import get_optimizer_state_dict
from composable_shard.tensor import FlatShard
from composable_shard.torch_private import running

_MODULE = "torch.distributed.checkpoint.state_dict"


def show_whole_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Gather parameters for torch's `get_model_state_dict` with `full_state_dict`.

    A state-dict hook of units, after `show_shards`. [Note: Torch's functions] One all-gather for
    each parameter; a collective.
    """
    call = next(running(_MODULE, "_get_model_state_dict"), {})
    if not getattr(call.get("info"), "full_state_dict", False):
        return
    for key in [key for key in state_dict if key.startswith(prefix)]:
        if isinstance(state_dict[key], FlatShard):
            state_dict[key] = state_dict[key].full_tensor()


def check_torch_call(state: ShardState) -> dict[str, str]:
    """Prepare one of torch's functions, when it asks a unit's module for new names.

    Return no new names. What the function would get wrong is refused.
    """
    # They would use the flat parameter's name, and with `broadcast_from_rank0` wait for ever.
    check_shows_originals(state)
    asked = next(running(_MODULE, "_verify_options"), {})
    options, optimizers = asked.get("options"), asked.get("optims") or ()
    names = "set_optimizer_state_dict", "set_state_dict"
    is_load = any(any(True for _ in running(_MODULE, name)) for name in names)
    is_flat = getattr(options, "flatten_optimizer_state_dict", False)
    is_full = getattr(options, "full_state_dict", False)
    # To an optimizer without state torch gives one for every parameter, in flat form too.
    is_ready = is_flat and not is_full and all(each.state for each in optimizers)
    problem = ""
    if is_load and not is_ready and any(handle.layout.owners for handle in state.needed_handles):
        problem = 'misses the state of parameters that other ranks own whole (granularity="param")'
    elif is_load and is_flat and is_full:
        problem = "loads no whole state in flat form"
    if problem:
        raise NotImplementedError(
            f"{_MODULE} {problem}. Call the function of the same name, with the same options: "
            "from composable_shard.fsdp2 import get_optimizer_state_dict, set_optimizer_state_dict."
        )
    if is_full:
        for optimizer in optimizers:
            _OneCall(optimizer, is_load=is_load)
    return {}


class _OneCall:
    """Hooks of an optimizer that make its state whole, or cut it, for one of torch's functions."""

    def __init__(self, optimizer: Optimizer, *, is_load: bool) -> None:
        previous = vars(optimizer).pop(_HOOK, None)  # of another unit, or of a call that failed
        if previous is not None:
            previous.remove()
        if is_load:
            hook = optimizer.register_load_state_dict_pre_hook(self._cut)
        else:
            hook = optimizer.register_state_dict_post_hook(self._make_whole)
        vars(optimizer)[_HOOK] = hook

    def _make_whole(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        call = next(running(_MODULE, "_get_optim_state_dict"), None)
        if call is None:
            return None
        vars(optimizer).pop(_HOOK).remove()
        model, on_host = call["model"], call["info"].cpu_offload
        options = StateDictOptions(full_state_dict=True, cpu_offload=on_host, rank0_only=on_host)
        whole = get_optimizer_state_dict(model, optimizer, options=options).get("state", {})
        names = [m.fqn for group in view_optimizers(model, [optimizer]) for m in group.members]
        return {**state, "state": {i: whole[fqn] for i, fqn in enumerate(names) if fqn in whole}}

    def _cut(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        call = next(running(_MODULE, "_load_optim_state_dict"), None)
        if call is None:
            return None
        vars(optimizer).pop(_HOOK).remove()
        with torch.no_grad():
            return {**state, "state": cut_state(call["model"], optimizer, state)}


_HOOK = "_composable_shard_hook"  # attribute of an optimizer
