"""Optimizer state dicts without nesting, as torch.distributed.checkpoint.state_dict has them.

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
from torch import Tensor

_STATE, _GROUPS = "state", "param_groups"


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
    """Return the nested form, with one group for each set of equal options. [Note: Flat form]

    Raises:
        ValueError: If a parameter has state and no options.
    """
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
