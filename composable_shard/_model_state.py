"""State-dict hooks of units: sharded values under the original names, and values of any form back.

[Note: State dicts]
At rest a state dict holds a FlatShard for every managed parameter, under its own name and in its
own place, also where a flat parameter, or full values by hand, are shown instead; inside
`unshard_params` it holds what the scope shows. The values share memory with the parameters.
A load is checked as a whole, with the ranks, before the first value is written; then the hook of
the outermost unit writes every managed parameter and puts the registered objects in place of what
was given, so that what torch does after it, assignments included, changes nothing more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable_shard._flat_param import FlatParamHandle
from composable_shard._flat_shard import FlatShard, FlatShardOfDTensor
from composable_shard._given_values import has_fitting_shape, needs_gather, slice_given
from composable_shard._host_copies import HOST
from composable_shard._param_names import (
    ManagedParam,
    find_params,
    flat_names,
    handles_of,
    mesh_groups,
)
from composable_shard._rank_messages import all_messages, raise_together
from composable_shard._state import ShardState
from composable_shard._storage import take_place

__all__ = [
    "agree_on_values",
    "find_problems",
    "load_values",
    "make_whole",
    "materialize",
    "show_shards",
    "write_values",
]


def show_shards(
    state: ShardState, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """Put FlatShards of the originals where anything else is shown of them at rest.

    A state-dict hook, which runs after everything in the module has been saved.
    """
    if not any(h.shows_flat or h.is_registered_unsharded or h.is_in_scope for h in state.needed):
        return
    with torch.no_grad():
        for name in flat_names(module):
            state_dict.pop(prefix + name, None)
        for name, param in find_params(module).items():
            value = _value_of(param)
            if value is not None:
                # torch's checkpoint wrapper takes its own name out of state dicts.
                state_dict[prefix + name.replace(_WRAPPER, "")] = value
    _restore_order(module, state_dict, prefix)


_WRAPPER = "_checkpoint_wrapped_module."


def _value_of(param: ManagedParam) -> Tensor | None:
    handle, entry = param.handle, param.entry
    if handle.is_in_scope:
        return handle.scope_params[param.index].detach() if handle._hides_scope_params else None
    if not (handle.shows_flat or handle.is_registered_unsharded):
        return None
    handle.adopt_changes()
    # Not detach(): a hidden parameter's class would come along.
    kind = FlatShard if entry.spec.tensor_parallel is None else FlatShardOfDTensor
    return kind(entry.sharded._local, entry.spec, guard=handle.guard)


def _restore_order(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Put the module's part of a state dict, which is the end of it, in the order of names."""
    names = (name.replace(_WRAPPER, "") for name in _local_names(module))
    expected = {prefix + name: i for i, name in enumerate(names)}
    mine = [key for key in state_dict if key.startswith(prefix)]
    places: dict[str, tuple[int, int]] = {}
    last = -1
    for number, key in enumerate(mine):
        # What has no place of its own (extra state) stays behind what it came after.
        last = expected.get(key, last)
        places[key] = (last, number)
    for key in sorted(mine, key=places.__getitem__):
        state_dict[key] = state_dict.pop(key)


def _local_names(module: nn.Module) -> Iterator[str]:
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name in (*child._parameters, *child._buffers):
            yield f"{prefix}.{name}".lstrip(".")


# Load


def load_values(  # noqa: PLR0913 -- torch's hook
    state: ShardState,
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    *_: Any,
) -> None:
    """Write the values given for managed parameters, of all units in `module`.

    A load-state-dict hook, which runs before anything in the module is loaded.

    Raises:
        RuntimeError: On all ranks alike, if keys are missing or unexpected, or values are wrong;
            nothing in the module has been changed then.
    """
    params = {prefix + name: param for name, param in find_params(module).items()}
    flats = {prefix + name: handle for name, handle in flat_names(module).items()}
    ours = {key: param.entry.sharded for key, param in params.items()}
    ours |= {key: h.flat.sharded for key, h in flats.items() if h.flat is not None}
    is_done = all(state_dict[key] is value for key, value in ours.items() if key in state_dict)
    if is_done or any(param.handle.is_in_scope for param in params.values()):
        return  # by the hook of a unit around this one; or the scope's own parameters are shown
    is_assigned = bool(metadata.get("assign_to_params_buffers", False))
    problems = find_problems(
        module, state_dict, prefix, is_strict=_is_strict(), is_assigned=is_assigned
    )
    agree_on_values(module, state_dict, prefix, problems)
    make_whole(module, state_dict, prefix)
    write_values(module, state_dict, prefix)
    missing_keys += [
        key for key, param in params.items() if param.handle.shows_flat and key not in state_dict
    ]
    for key in [key for key in params if key in state_dict]:
        if params[key].handle.shows_flat:
            del state_dict[key]
        elif has_fitting_shape(state_dict[key], params[key].entry.spec):
            state_dict[key] = params[key].entry.sharded
    state_dict.update({key: h.flat.sharded for key, h in flats.items() if h.flat is not None})


def _is_strict() -> bool:
    """Return the argument of the running `load_state_dict`.

    Torch tells every hook True, and raises for names only when all else has been loaded.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is _LOAD_CODE:
            return bool(frame.f_locals["strict"])
        frame = frame.f_back  # type: ignore[assignment]
    return False


_LOAD_CODE = nn.Module.load_state_dict.__code__


def find_problems(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str = "",
    *,
    is_strict: bool,
    is_assigned: bool = False,
) -> list[str]:
    """Return all that is wrong with a state dict for `module`, in torch's words; changes nothing.

    Names and shapes in modules that translate state dicts as they load (by a method or hook of
    their own) are left to them.
    """
    params = find_params(module)
    expected = {
        key: value.shape if isinstance(value, Tensor) else None
        for key, value in module.state_dict(prefix=prefix).items()
    }
    translated = tuple(
        f"{prefix}{path}." if path else prefix
        for path, child in module.named_modules(remove_duplicate=False)
        if _translates(child)
    )
    names = {key for key in (*expected, *state_dict) if key.startswith(prefix)}
    checked = {key for key in names if not (translated and key.startswith(translated))}
    problems = []
    if is_strict:
        missing = [key for key in expected if key in checked and key not in state_dict]
        extra = [key for key in state_dict if key in checked and key not in expected]
        if missing:
            problems.append(f"Missing key(s) in state_dict: {_quoted(missing)}.")
        if extra:
            problems.append(f"Unexpected key(s) in state_dict: {_quoted(extra)}.")
    for key, shape in expected.items():
        if key in checked and key in state_dict and shape is not None:
            param = params.get(key.removeprefix(prefix))
            problems += _find_value_problem(key, state_dict[key], shape, param)
    for handle in dict.fromkeys(param.handle for param in params.values()):
        problems += _find_handle_problem(handle, params, state_dict, prefix, is_assigned)
    return problems


def _translates(module: nn.Module) -> bool:
    if type(module)._load_from_state_dict is not nn.Module._load_from_state_dict:
        return True
    hooks = [getattr(hook, "hook", None) for hook in module._load_state_dict_pre_hooks.values()]
    return any(getattr(hook, "func", None) is not load_values for hook in hooks)


def _find_value_problem(
    key: str, value: Any, shape: torch.Size, param: ManagedParam | None
) -> list[str]:
    if not isinstance(value, Tensor):
        return [f"expected a tensor for {key}, got {type(value).__name__}."]
    if param is None:
        is_fitting = value.shape == shape or (not shape and value.numel() == 1)
    else:
        is_fitting = has_fitting_shape(value, param.entry.spec)
    if is_fitting:
        return []
    return [
        f"size mismatch for {key}: copying a param with shape {value.shape} from checkpoint, the "
        f"shape in current model is {shape}."
    ]


def _find_handle_problem(
    handle: FlatParamHandle,
    params: dict[str, ManagedParam],
    state_dict: dict[str, Any],
    prefix: str,
    is_assigned: bool,
) -> list[str]:
    names = {name: param for name, param in params.items() if param.handle is handle}
    given = {param.index for name, param in names.items() if prefix + name in state_dict}
    if not given:
        return []
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


def agree_on_values(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, problems: list[str]
) -> None:
    """See that no rank has found a problem, and that all give values that lie alike.

    Two all-gathers of 31 bytes for each process group.

    Raises:
        RuntimeError: On all ranks alike.
    """
    handles = handles_of(module)
    device = handles[0].shard_group.device
    groups = mesh_groups(handles)
    text = "\n\t".join([f"Error(s) in loading state_dict for {type(module).__name__}:", *problems])
    raise_together(groups, device, RuntimeError(text) if problems else None)
    gathered = [
        name
        for name, param in find_params(module).items()
        if isinstance(value := state_dict.get(prefix + name), Tensor)
        and needs_gather(value, param.entry.spec)
    ]
    gathered += _to_make_whole(module, state_dict, prefix)
    told = all_messages(groups, device, gathered)
    if len(told) > 1:
        odd = sorted({name for names in told for name in names})
        raise RuntimeError(
            f"the ranks gave values that lie on them in different ways for {_quoted(odd)}. Load "
            "the same kind of state dict on every rank."
        )


def make_whole(module: nn.Module, state_dict: dict[str, Any], prefix: str = "") -> None:
    """Replace sharded values of what is plain in `module` by whole ones, in the dict."""
    for key in _to_make_whole(module, state_dict, prefix):
        state_dict[key] = state_dict[key].full_tensor()


def _to_make_whole(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> list[str]:
    return [
        key
        for key, own in module.state_dict(prefix=prefix).items()
        if isinstance(state_dict.get(key), FlatShard | DTensor)
        and not isinstance(own, FlatShard | DTensor)
    ]


def write_values(module: nn.Module, state_dict: dict[str, Any], prefix: str = "") -> None:
    """Write what a state dict has of the managed parameters of `module` into the shards."""
    params = find_params(module)
    with torch.inference_mode(False), torch.no_grad():
        for handle in dict.fromkeys(param.handle for param in params.values()):
            given = {
                param.index: state_dict[prefix + name]
                for name, param in params.items()
                if param.handle is handle and prefix + name in state_dict
            }
            if given and handle.local_shard.is_meta:
                materialize(handle)
            _write_handle(handle, given)


def _write_handle(handle: FlatParamHandle, given: dict[int, Tensor]) -> None:
    handle.adopt_changes()
    for index, value in given.items():
        entry = handle.entries[index]
        if not has_fitting_shape(value, entry.spec):
            continue  # what a module is going to translate
        piece = slice_given(value, entry.spec)
        handle.guard.note_write(entry.label.fqn)
        handle.slice_of(entry, handle.local_shard).copy_(piece)


def materialize(handle: FlatParamHandle, given: dict[int, Tensor] | None = None) -> None:
    """Give a handle on the meta device memory; its parameters hold zeros then.

    Args:
        handle: Of a unit at rest.
        given: This rank's part of the originals, by index, in place of zeros; used up, so that
            nothing is there twice. Not where a flat parameter is shown.
    """
    device = HOST if handle.offload.is_active else handle.shard_group.device
    for index, shown in enumerate(handle.shown_at_rest):
        param, flag = shown.sharded, shown.sharded.requires_grad
        if given:
            memory = given.pop(index).to(device)
        else:
            memory = torch.zeros_like(param._local, device=device)
        kind = FlatShardOfDTensor if isinstance(param, FlatShardOfDTensor) else FlatShard
        shard = kind(memory, shown.spec, guard=handle.guard)
        take_place(cast(nn.Parameter, param), nn.Parameter(shard, flag))
    handle.adopt_changes()
