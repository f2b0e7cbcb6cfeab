"""The hooks behind a model's own `state_dict()` and `load_state_dict()`.

[Note: State dicts]
At rest a state dict holds a FlatShard for every managed parameter, even if modules show full
values. Inside `unshard_params` it holds the scope's values. The values share memory with the
parameters. A unit that shows a flat parameter has no state dict: an error says so on every rank.

A load is checked as a whole, on all ranks, before the first value is written. Then the hook of the
outermost unit writes every managed parameter and replaces the given values by the registered
parameters, so that torch's own load after it, assignments included, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from composable_shard.comm import HOST, Ranks
from composable_shard.flat_param import (
    FlatParamHandle,
    shows_scope_originals,
    swap_keeping_hooks,
)
from composable_shard.options import describe_prefix
from composable_shard.runtime import ShardState
from composable_shard.state_dict.model_tensors import (
    ManagedParam,
    by_handle,
    find_params,
    is_extra_state,
    mesh_groups,
    prefixed_modules,
    unwrapped,
)
from composable_shard.tensor import (
    FlatShard,
    FlatShardOfDTensor,
    has_fitting_shape,
    is_distributed,
    needs_gather,
    slice_given,
)
from composable_shard.torch_private import (
    load_from_state_dict_of,
    load_post_hooks_of,
    load_pre_hooks_of,
    modules_in,
    running,
)


def keys_by_name(state_dict: Mapping[str, Any], prefix: str) -> dict[str, str]:
    """Return the keys of a state dict that begin with `prefix`, by unwrapped name.

    Keys contain the name of a checkpoint wrapper only while torch loads the wrapped module.
    """
    return {unwrapped(key): key for key in state_dict if key.startswith(prefix)}


def find_problems(
    module: nn.Module,
    params: Mapping[str, ManagedParam],
    state_dict: Mapping[str, Any],
    prefix: str = "",
    *,
    is_strict: bool,
    is_assigned: bool = False,
) -> list[str]:
    """Return all problems of a state dict for `module`, in torch's words; changes nothing.

    A module that translates state dicts by its own method or hook checks its part itself.

    Args:
        state_dict: May hold other modules' values too.
        is_strict: Whether missing and unexpected names are problems.
        is_assigned: Whether values replace tensors on the meta device.
    """
    if not isinstance(state_dict, Mapping):
        return [f"expected a state dict, got {type(state_dict).__name__}."]
    by_name = {unwrapped(prefix + name): param for name, param in params.items()}
    expected = {
        unwrapped(key): value.shape if isinstance(value, Tensor) else None
        for key, value in module.state_dict(prefix=prefix).items()
    }
    given = {name: state_dict[key] for name, key in keys_by_name(state_dict, prefix).items()}
    # Names below a module that translates are checked by nobody here: the names that it is given
    # need not be those that it has.
    translated = tuple(
        unwrapped(prefix + path) for path, child in prefixed_modules(module) if _translates(child)
    )
    names = dict.fromkeys((*expected, *given))
    checked = {name for name in names if not (translated and name.startswith(translated))}
    problems = _find_name_problems(expected, given, checked) if is_strict else []
    if is_strict and expected and not given:
        problems.append(f"the state dict is empty. {FROM_FIRST}")
    for name, shape in expected.items():
        if name in checked and name in given and shape is not None and not is_extra_state(name):
            problems += _find_value_problem(name, given[name], shape, by_name.get(name))
    named = by_handle((param, name) for name, param in by_name.items() if name in given)
    for handle, by_index in named.items():
        problems += _find_handle_problem(handle, by_index, is_assigned)
    return problems


def _find_name_problems(
    expected: Mapping[str, Any], given: Mapping[str, Any], checked: set[str]
) -> list[str]:
    # State dicts of old versions have no count of batches; batch norm then counts from zero.
    needed = [name for name in expected if not name.endswith("num_batches_tracked")]
    missing = [name for name in needed if name in checked and name not in given]
    extra = [name for name in given if name in checked and name not in expected]
    lists = {"Missing": missing, "Unexpected": extra}
    problems = [
        f"{kind} key(s) in state_dict: {_quoted(each)}." for kind, each in lists.items() if each
    ]
    prefix = describe_prefix(missing, extra)
    return [*problems, prefix] if prefix else problems


def runs_own_code(model: nn.Module) -> bool:
    """Return whether code outside of torch reads or changes the values of a load."""
    return any(_translates(each) or load_post_hooks_of(each) for each in modules_in(model))


def _translates(module: nn.Module) -> bool:
    method = load_from_state_dict_of(type(module))
    if not method.__module__.startswith("torch.nn.modules."):
        return True
    hooks = [getattr(hook, "hook", hook) for hook in load_pre_hooks_of(module).values()]
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


def _find_handle_problem(
    handle: FlatParamHandle, given: Mapping[int, str], is_assigned: bool
) -> list[str]:
    if handle.shown.is_unsharded:
        return [
            f"unit '{handle.name}' shows its full parameters, which would miss the values. Call "
            "reshard(module) first, or load inside unshard_params(module)."
        ]
    if handle.shard.values.is_meta and not is_assigned:
        return [
            f"parameters of unit '{handle.name}' are on the meta device. Call "
            "model.to_empty(device=...) first, or pass assign=True."
        ]
    if handle.shard.values.is_meta and len(given) < len(handle.entries):
        lacking = [str(e.label) for i, e in enumerate(handle.entries) if i not in given]
        return [f"assign=True needs the values of {_quoted(lacking)} too: they share one shard."]
    return []


def _quoted(names: list[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def adopt_new_data(state: ShardState, *_: Any) -> None:
    """Adopt new memory of parameters (from `to_empty`, for example), so that state dicts share it.

    A state-dict pre-hook of each module of a unit.
    """
    with torch.no_grad():
        for handle in state.needed_handles:
            is_new = any(e.sharded._local is not e.shard_view for e in handle.shown.at_rest)
            if is_new and handle.shown.scope is None:
                handle.adopt_changes()


def check_shows_originals(state: ShardState) -> None:
    """Check that a unit shows original parameters, whose names state dicts have."""
    flat = [
        h.name
        for h in state.needed_handles
        if not (h.shown.form.has_names or shows_scope_originals(h.shown))
    ]
    if flat:
        raise RuntimeError(
            f"units {flat} show flat parameters (use_orig_params=False), and state dicts hold "
            "original parameters. Call register_orig_params(model) first, and build optimizers "
            "whose state is to be saved after it; register_flat_param(model) undoes it."
        )


def show_shards(
    state: ShardState, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """Replace gathered values in a state dict by FlatShards of the originals.

    A state-dict hook of each module of a unit, which runs when everything in it has been saved.
    """
    check_shows_originals(state)
    if not any(handle.shown.is_unsharded for handle in state.needed_handles):
        return
    keys = keys_by_name(state_dict, prefix)
    with torch.no_grad():
        for name, param in find_params(module, state).items():
            if param.handle.shown.is_unsharded and param.handle.shown.scope is None:
                param.handle.adopt_changes()
                entry = param.entry
                # Not detach(): a hidden parameter's class would come along.
                kind = FlatShardOfDTensor if entry.spec.is_shown_as_dtensor else FlatShard
                shard = kind(entry.sharded._local, entry.spec, guard=param.handle.guard)
                state_dict[keys[unwrapped(prefix + name)]] = shard


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
    """Load the managed parameters of all units in `module`, if all ranks' values fit.

    A load-state-dict hook of each module of a unit, which runs before anything in it is loaded.
    """
    if _is_done(state, module, prefix, missing_keys):
        return
    params = find_params(module, state)
    handles = list(dict.fromkeys(param.handle for param in params.values()))
    if not handles or any(handle.shown.scope is not None for handle in handles):
        return  # the scope's own parameters are shown
    for handle in handles:
        handle.adopt_changes()
    problems = find_problems(
        module,
        params,
        state_dict,
        prefix,
        # Torch passes True to every hook, and raises for names after everything has been loaded.
        is_strict=bool(next(running("torch.nn.modules.module", "load_state_dict"))["strict"]),
        is_assigned=bool(metadata.get("assign_to_params_buffers", False)),
    )
    given = _given_params(params, state_dict, prefix)
    agree_on_values(module, params, state_dict, prefix, problems)
    make_whole(module, state_dict, prefix)
    _write_values(given, state_dict)
    for key, param in given.items():
        if has_fitting_shape(state_dict[key], param.entry.spec):
            state_dict[key] = param.entry.sharded


def _is_done(state: ShardState, module: nn.Module, prefix: str, missing_keys: list[str]) -> bool:
    """Return whether an outer hook has loaded `module`; if not, note that this one does.

    The list of missing keys identifies a call of `load_state_dict`: all its hooks get the same one.
    """
    if state.load_call is not None:
        known, done = state.load_call
        if known is missing_keys and prefix.startswith(done):
            return True
    # Including handles of units outside that share parameters of the module.
    hooks = [hook for each in modules_in(module) for hook in load_pre_hooks_of(each).values()]
    for hook in (getattr(hook, "hook", hook) for hook in hooks):
        if getattr(hook, "func", None) is load_values:
            hook.args[0].set_load_call(missing_keys, prefix)
    return False


def _given_params(
    params: Mapping[str, ManagedParam], state_dict: dict[str, Any], prefix: str
) -> dict[str, ManagedParam]:
    """Return the parameters that a state dict has values for, by its keys."""
    keys = keys_by_name(state_dict, prefix)
    named = {unwrapped(prefix + name): param for name, param in params.items()}
    return {keys[name]: param for name, param in named.items() if name in keys}


def agree_on_values(
    module: nn.Module,
    params: Mapping[str, ManagedParam],
    state_dict: dict[str, Any],
    prefix: str,
    problems: list[str],
) -> None:
    """Check that no rank has found a problem, and that all ranks give equally sharded values.

    Ranks that give values for different parameters are refused too: their replicas would differ.
    Two all-gathers of 31 bytes for each process group.
    """
    handles = list(dict.fromkeys(param.handle for param in params.values()))
    ranks = Ranks(mesh_groups(handles), handles[0].shard_group.device)
    text = "\n\t".join([f"Error(s) in loading state_dict for {type(module).__name__}:", *problems])
    ranks.agree(RuntimeError(text) if problems else None)
    given = _given_params(params, state_dict, prefix)
    gathered = [
        unwrapped(key.removeprefix(prefix))
        for key, param in given.items()
        if isinstance(value := state_dict[key], Tensor) and needs_gather(value, param.entry.spec)
    ]
    gathered += _to_make_whole(module, state_dict, prefix)
    keys = keys_by_name(state_dict, prefix)
    lacking = [name for name in params if unwrapped(prefix + name) not in keys]
    told = ranks.all_messages([gathered, lacking])
    unequal = _unequal([names for _, names in told])
    if unequal:
        raise RuntimeError(
            f"the ranks gave values of different parameters: some have {_quoted(unequal[:8])}"
            f"{f' and {len(unequal) - 8} more' if len(unequal) > 8 else ''}, others do not. Load "
            f"the same names on every rank. {FROM_FIRST}"
        )
    odd = _unequal([names for names, _ in told])
    if odd:
        raise RuntimeError(
            f"the ranks gave values that are sharded in different ways for {_quoted(odd)}. Load "
            "the same kind of state dict on every rank."
        )


# What to call if only rank 0 has values.
FROM_FIRST = (
    "To load what only the first rank has, call set_model_state_dict(model, state_dict, "
    "options=StateDictOptions(broadcast_from_rank0=True)) on all ranks, with {} on the others."
)


def _unequal(lists: list[list[str]]) -> list[str]:
    """Return the names that are in some lists and not in others, in order."""
    return [
        name
        for name in dict.fromkeys(name for names in lists for name in names)
        if not all(name in names for names in lists)
    ]


def make_whole(module: nn.Module, state_dict: dict[str, Any], prefix: str = "") -> None:
    """Replace sharded values of unmanaged parameters and buffers by whole ones, in the dict."""
    for key in _to_make_whole(module, state_dict, prefix):
        state_dict[key] = state_dict[key].full_tensor()


def _to_make_whole(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> list[str]:
    keys = keys_by_name(state_dict, prefix)
    own = {unwrapped(key): value for key, value in module.state_dict(prefix=prefix).items()}
    return [
        keys[name]
        for name, value in own.items()
        if name in keys and is_distributed(state_dict[keys[name]]) and not is_distributed(value)
    ]


def _write_values(given: dict[str, ManagedParam], state_dict: dict[str, Any]) -> None:
    """Write the given values of managed parameters into the shards."""
    values = by_handle((param, state_dict[key]) for key, param in given.items())
    with torch.inference_mode(False), torch.no_grad():
        for handle, by_index in values.items():
            # Cut one by one, because each may be gathered. Modules translate values that don't fit.
            pieces = (
                (index, slice_given(value, handle.entries[index].spec))
                for index, value in by_index.items()
                if has_fitting_shape(value, handle.entries[index].spec)
            )
            write_shard(handle, pieces)


def write_shard(handle: FlatParamHandle, pieces: Iterable[tuple[int, Tensor]]) -> None:
    """Write pieces of parameters, by index, into a handle's shard, which leaves the meta device."""
    if handle.shard.values.is_meta:
        materialize(handle)
    handle.adopt_changes()
    for index, piece in pieces:
        entry = handle.entries[index]
        handle.guard.note_write(entry.label.fqn)
        place = entry.slice_of(handle.shard.values)
        if piece.data_ptr() != place.data_ptr():  # torch's load functions fill it themselves
            place.copy_(piece)


def materialize(handle: FlatParamHandle, given: dict[int, Tensor] | None = None) -> None:
    """Give a handle on the meta device memory, filled with zeros.

    Args:
        given: Values in place of zeros: this rank's shards of the originals by index. Each is
            removed when it has been copied, to save memory. Not with a flat parameter.
    """
    device = HOST if handle.memory.offload.is_active else handle.shard_group.device
    for index, shown in enumerate(handle.shown.at_rest):
        param, flag = shown.sharded, shown.sharded.requires_grad
        if given:
            memory = given.pop(index).to(device)
        else:
            memory = torch.zeros_like(param._local, device=device)
        kind = FlatShardOfDTensor if isinstance(param, FlatShardOfDTensor) else FlatShard
        shard = kind(memory, shown.spec, guard=handle.guard)
        swap_keeping_hooks(cast(nn.Parameter, param), nn.Parameter(shard, flag))
    handle.adopt_changes()
