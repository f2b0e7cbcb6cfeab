"""What is wrong with the values that users give for a module's parameters and buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from composable_shard._flat_param import FlatParamHandle
from composable_shard._given_values import has_fitting_shape
from composable_shard._param_names import ManagedParam, find_params, handles_of, unwrapped
from composable_shard._state import ShardState

__all__ = ["find_problems", "keys_by_name"]


def keys_by_name(state_dict: Mapping[str, Any], prefix: str) -> dict[str, str]:
    """Return the keys of a state dict below `prefix`, by names without checkpoint wrappers.

    While torch loads what is in a wrapper, the keys have the wrapper's name in them, and elsewhere
    they do not.
    """
    return {unwrapped(key): key for key in state_dict if key.startswith(prefix)}


def find_problems(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str = "",
    *,
    around: ShardState | None = None,
    is_strict: bool,
    is_assigned: bool = False,
) -> list[str]:
    """Return all that is wrong with a state dict for `module`, in torch's words; changes nothing.

    Names and shapes in modules that translate state dicts as they load (by a method or hook of
    their own) are left to them.

    Args:
        module: What is loaded into.
        state_dict: What is given for it, and more.
        prefix: What the keys for `module` begin with.
        around: The unit that `module` is a part of, if it is none itself.
        is_strict: Whether names count.
        is_assigned: Whether values are to take the place of tensors on the meta device.
    """
    if not isinstance(state_dict, Mapping):
        return [f"expected a state dict, got {type(state_dict).__name__}."]
    params = {
        unwrapped(prefix + name): param for name, param in find_params(module, around).items()
    }
    expected = {
        unwrapped(key): value.shape if isinstance(value, Tensor) else None
        for key, value in module.state_dict(prefix=prefix).items()
    }
    # torch's own functions put the model's parameters, flat ones too, beside what was given.
    flats = {id(h.flat.sharded) for h in handles_of(module, around) if h.flat is not None}
    given = {
        name: state_dict[key]
        for name, key in keys_by_name(state_dict, prefix).items()
        if id(state_dict[key]) not in flats
    }
    translated = tuple(
        unwrapped(f"{prefix}{path}." if path else prefix)
        for path, child in module.named_modules(remove_duplicate=False)
        if _translates(child)
    )
    names = dict.fromkeys((*expected, *given))
    checked = {name for name in names if not (translated and name.startswith(translated))}
    problems = _find_name_problems(expected, given, checked) if is_strict else []
    for name, shape in expected.items():
        if name in checked and name in given and shape is not None:
            problems += _find_value_problem(name, given[name], shape, params.get(name))
    by_handle: dict[FlatParamHandle, set[int]] = {}
    for name, param in params.items():
        if name in given:
            by_handle.setdefault(param.handle, set()).add(param.index)
    for handle, indices in by_handle.items():
        problems += _find_handle_problem(handle, indices, is_assigned)
    return problems


def _find_name_problems(
    expected: Mapping[str, Any], given: Mapping[str, Any], checked: set[str]
) -> list[str]:
    # Batch norm counts from zero where an old state dict has no count.
    needed = [name for name in expected if not name.endswith("num_batches_tracked")]
    missing = [name for name in needed if name in checked and name not in given]
    extra = [name for name in given if name in checked and name not in expected]
    problems = []
    if missing:
        problems.append(f"Missing key(s) in state_dict: {_quoted(missing)}.")
    if extra:
        problems.append(f"Unexpected key(s) in state_dict: {_quoted(extra)}.")
    return problems


def _translates(module: nn.Module) -> bool:
    method = type(module)._load_from_state_dict
    if not method.__module__.startswith("torch.nn.modules."):
        return True
    hooks = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
    return not all(_is_known(hook) for hook in hooks)


def _is_known(hook: Any) -> bool:
    function = getattr(hook, "func", hook)
    is_ours = str(getattr(function, "__module__", "")).startswith("composable_shard.")
    # torch's checkpoint wrapper, see `keys_by_name`.
    wrapper_hook = "ActivationWrapper._pre_load_state_dict_hook"
    return is_ours or getattr(function, "__qualname__", "") == wrapper_hook


def _find_value_problem(
    name: str, value: Any, shape: torch.Size, param: ManagedParam | None
) -> list[str]:
    if not isinstance(value, Tensor):
        return [f"expected a tensor for {name}, got {type(value).__name__}."]
    if param is None:
        is_fitting = value.shape == shape or (not shape and value.shape == (1,))
    else:
        is_fitting = has_fitting_shape(value, param.entry.spec)
    if is_fitting:
        return []
    return [
        f"size mismatch for {name}: copying a param with shape {value.shape} from checkpoint, the "
        f"shape in current model is {shape}."
    ]


def _find_handle_problem(handle: FlatParamHandle, given: set[int], is_assigned: bool) -> list[str]:
    if handle.is_registered_unsharded:
        return [
            f"unit '{handle.name}' shows its full parameters, which would not get the values. Call "
            "reshard(module) first, or load inside unshard_params(module)."
        ]
    if handle.local_shard.is_meta and not is_assigned:
        return [
            f"parameters of unit '{handle.name}' are on the meta device. Call "
            "model.to_empty(device=...) first, or pass assign=True."
        ]
    if handle.local_shard.is_meta and len(given) < len(handle.entries):
        lacking = [str(e.label) for i, e in enumerate(handle.entries) if i not in given]
        return [f"assign=True needs the values of {_quoted(lacking)} too: they share one shard."]
    return []


def _quoted(names: list[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
