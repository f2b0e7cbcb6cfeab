"""What torch's own functions for state dicts get of sharded models.

[Note: Torch's functions]
`torch.distributed.checkpoint.state_dict` makes values whole that are DTensors or ShardedTensors.
Of any other tensor it asks nothing but its class: no op and no attribute is read between the call
of `state_dict()`, which has no arguments, and the return to the user. So only the frames of the
running functions tell what a user has asked for. They are looked at in a state-dict hook of units,
and where torch asks a module whether it renames parameters.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from composable_shard.runtime import ShardState
from composable_shard.state_dict.model_state import check_shows_originals
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
    """Refuse what torch's functions would get wrong, when they ask a unit's module for new names.

    Return no new names.
    """
    # They would use the flat parameter's name, and with `broadcast_from_rank0` wait for ever.
    check_shows_originals(state)
    problem = ""
    asked = next(running(_MODULE, "_verify_options"), {})
    loads = [
        call
        for name in ("set_optimizer_state_dict", "set_state_dict")
        for call in running(_MODULE, name)
    ]
    is_load = any(loads)
    is_flat = any(getattr(e.get("options"), "flatten_optimizer_state_dict", False) for e in loads)
    # To an optimizer without state torch gives one for every parameter, in flat form too.
    is_ready = is_flat and all(each.state for each in asked.get("optims", ()))
    if is_load and not is_ready and any(handle.layout.owners for handle in state.needed):
        problem = 'misses the state of parameters that other ranks own whole (granularity="param")'
    is_full = getattr(asked.get("options"), "full_state_dict", False)
    if is_full and asked.get("optims"):
        # Of a load the next step would fail: torch gives the optimizer whole tensors.
        problem = "takes shards of optimizer state for whole tensors"
    if problem:
        raise NotImplementedError(
            f"{_MODULE} {problem}. Call the function of the same name, with the same options: "
            "from composable_shard.fsdp2 import get_optimizer_state_dict, set_optimizer_state_dict."
        )
    return {}
