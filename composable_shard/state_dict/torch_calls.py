"""What torch's own functions for state dicts get of sharded models.

[Note: Torch's functions]
`torch.distributed.checkpoint.state_dict` makes values whole that are DTensors or ShardedTensors.
Of any other tensor it asks nothing but its class: no op and no attribute is read between the call
of `state_dict()`, which has no arguments, and the return to the user. So only the frames of the
running functions tell what a user has asked for. They are looked at in a state-dict hook of units,
and where torch asks a module whether it renames parameters.

[Note: Flat form]
`{"state": {"a.w": {"step": 1}}, "param_groups": [{"lr": 0.1, "params": ["a.w"]}]}` becomes
`{"state.a.w.step": 1, "param_groups.a.w.lr": 0.1}`. Each parameter has the options of its group, so
dicts of ranks that own different parameters join without conflict. The groups themselves are lost:
parameters with equal options are one group again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from composable_shard.runtime import ShardState
from composable_shard.tensor import FlatShard
from composable_shard.torch_private import locals_of_caller

_MODULE = "torch.distributed.checkpoint.state_dict"
_STATE, _GROUPS = "state", "param_groups"


def show_whole_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Gather parameters for torch's `get_model_state_dict` with `full_state_dict`.

    A state-dict hook of units, after `show_shards`. [Note: Torch's functions] One all-gather for
    each parameter; a collective.
    """
    info = locals_of_caller("_get_model_state_dict", _MODULE).get("info")
    if not getattr(info, "full_state_dict", False):
        return
    for key in [key for key in state_dict if key.startswith(prefix)]:
        if isinstance(state_dict[key], FlatShard):
            state_dict[key] = state_dict[key].full_tensor()


def check_torch_call(state: ShardState) -> dict[str, str]:
    """Refuse what torch's functions would get wrong, when they ask a unit's module for new names.

    Return no new names.
    """
    problem = ""
    if any(handle.shown.shows_flat for handle in state.needed):
        # They would use the flat parameter's name, and with `broadcast_from_rank0` wait for ever.
        problem = (
            "does not know the original parameters that a flat parameter stands for "
            "(use_orig_params=False)"
        )
    asked = locals_of_caller("_verify_options", _MODULE)
    loads = [
        locals_of_caller(f"set_{each}", _MODULE) for each in ("optimizer_state_dict", "state_dict")
    ]
    is_load = any(loads)
    is_flat = any(getattr(e.get("options"), "flatten_optimizer_state_dict", False) for e in loads)
    # To an optimizer without state torch gives one for every parameter, in flat form too.
    is_ready = is_flat and all(each.state for each in asked["optims"])
    if is_load and not is_ready and any(handle.layout.owners for handle in state.needed):
        problem = 'misses the state of parameters that other ranks own whole (granularity="param")'
    is_full = getattr(asked.get("options"), "full_state_dict", False)
    if is_full and is_flat:
        problem = "loads no whole state in flat form, of any model (it ends in a KeyError)"
    if is_full and asked["optims"] and not is_load:
        problem = "would return shards of optimizer state for whole tensors"
    if problem:
        raise NotImplementedError(
            f"{_MODULE} {problem}. Call the function of the same name in composable_shard, which "
            "takes the same options, or register_orig_params(model) before building the optimizer."
        )
    return {}


# Flat form


def flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flat form of an optimizer state dict by parameter name. [Note: Flat form]"""
    flat = {
        f"{_STATE}.{fqn}.{name}": value
        for fqn, state in nested[_STATE].items()
        for name, value in state.items()
    }
    for group in nested[_GROUPS]:
        options = {name: value for name, value in group.items() if name != "params"}
        for fqn in group["params"]:
            flat |= {f"{_GROUPS}.{fqn}.{name}": value for name, value in options.items()}
    return flat


def is_flat(given: Any) -> bool:
    """Return whether something is an optimizer state dict in flat form."""
    return (
        isinstance(given, Mapping)
        and bool(given)
        and all(
            isinstance(key, str) and key.startswith((f"{_STATE}.", f"{_GROUPS}.")) for key in given
        )
    )


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested form, with one group for each set of equal options. [Note: Flat form]"""
    options: dict[str, dict[str, Any]] = {}
    state: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        kind, _, rest = key.partition(".")
        fqn, _, name = rest.rpartition(".")
        (state if kind == _STATE else options).setdefault(fqn, {})[name] = value
    lost = sorted(state.keys() - options.keys())
    if lost:
        raise ValueError(
            f"the flat optimizer state dict has state of {lost[:8]} and no options of these "
            "parameters ('param_groups....')"
        )
    groups: list[dict[str, Any]] = []
    for fqn, own in options.items():
        group = next((each for each in groups if _is_same({**own, "params": 0}, each)), None)
        if group is None:
            groups.append(group := {**own, "params": []})
        group["params"].append(fqn)
    return {_STATE: state, _GROUPS: groups}


def _is_same(options: dict[str, Any], group: dict[str, Any]) -> bool:
    return options.keys() == group.keys() and all(
        name == "params" or _is_equal(value, group[name]) for name, value in options.items()
    )


def _is_equal(value: Any, other: Any) -> bool:
    if isinstance(value, tuple | list) and isinstance(other, tuple | list):
        pairs = zip(value, other, strict=False)
        return len(value) == len(other) and all(_is_equal(a, b) for a, b in pairs)
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        both = isinstance(value, Tensor) and isinstance(other, Tensor)
        return both and torch.equal(value, other)
    return bool(value == other)
