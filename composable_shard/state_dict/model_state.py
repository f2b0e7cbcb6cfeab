"""The hooks behind a model's own `state_dict()` and `load_state_dict()`.

[Note: State dicts]
At rest a state dict holds a FlatShard for every managed parameter, under its own name and at its
own position, also where modules show a flat parameter or gathered values. Inside `unshard_params`
it holds the scope's values. The values share memory with the parameters.

A load is checked as a whole, on all ranks, before the first value is written. Then the hook of the
outermost unit writes every managed parameter and replaces the given values by the registered
parameters, so that torch's own load after it, assignments included, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable_shard.comm import HOST, Ranks
from composable_shard.flat_param import FlatParamHandle, Shown, take_place
from composable_shard.runtime import ShardState
from composable_shard.state_dict.model_tensors import (
    ManagedParam,
    by_handle,
    find_params,
    is_extra_state,
    iter_slots,
    mesh_groups,
    unwrapped,
)
from composable_shard.tensor import (
    FlatShard,
    FlatShardOfDTensor,
    has_fitting_shape,
    needs_gather,
    slice_given,
)
from composable_shard.torch_private import (
    load_from_state_dict_of,
    load_post_hooks_of,
    load_pre_hooks_of,
    locals_of_caller,
    parameters_of,
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

    Modules that translate state dicts, by a method or hook of their own, check their part.

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
    # torch's own functions add the model's parameters, flat ones too, to the given values.
    handles = {param.handle for param in params.values()}
    flats = {id(handle.shown.flat.sharded) for handle in handles if handle.shown.flat is not None}
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
    # Old state dicts have no count of batches; batch norm then counts from zero.
    needed = [name for name in expected if not name.endswith("num_batches_tracked")]
    missing = [name for name in needed if name in checked and name not in given]
    extra = [name for name in given if name in checked and name not in expected]
    lists = {"Missing": missing, "Unexpected": extra}
    return [
        f"{kind} key(s) in state_dict: {_quoted(each)}." for kind, each in lists.items() if each
    ]


def runs_own_code(model: nn.Module) -> bool:
    """Return whether code that is not torch's sees, or changes, the values of a load."""
    return any(_translates(each) or load_post_hooks_of(each) for each in model.modules())


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


def adopt_new_data(state: ShardState, *_: Any) -> None:
    """Adopt memory that `to_empty` and the like gave parameters, so that state dicts share it.

    A state-dict pre-hook of each module of a unit.
    """
    with torch.no_grad():
        for handle in state.needed:
            is_new = any(e.sharded._local is not e.shard_view for e in handle.shown.at_rest)
            if is_new and not handle.shown.is_in_scope:
                handle.adopt_changes()


def show_shards(
    state: ShardState, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """Replace flat parameters and gathered values in a state dict by FlatShards of the originals.

    A state-dict hook of each module of a unit, which runs when everything in it has been saved.
    """
    if not any(
        h.shown.shows_flat or h.shown.is_unsharded or h.shown.is_in_scope for h in state.needed
    ):
        return
    with torch.no_grad():
        entries = [h.shown.flat for h in state.needed if h.shown.flat is not None]
        flats = {id(flat.sharded) for flat in entries}
        flats |= {id(flat.unsharded) for flat in entries if flat.unsharded is not None}
        for name, child, key in iter_slots(module):
            if id(parameters_of(child).get(key)) in flats:
                state_dict.pop(prefix + name, None)
        for name, param in find_params(module, state).items():
            value = _value_of(param)
            if value is not None:
                state_dict[prefix + unwrapped(name)] = value
    _restore_order(module, state_dict, prefix)


def _value_of(param: ManagedParam) -> Tensor | None:
    handle, entry = param.handle, param.entry
    if handle.shown.scope is not None:
        is_hidden = handle.shown.state is Shown.SCOPE_FLAT
        return handle.shown.scope.params[param.index].detach() if is_hidden else None
    if not (handle.shown.shows_flat or handle.shown.is_unsharded):
        return None
    handle.adopt_changes()
    # Not detach(): a hidden parameter's class would come along.
    kind = FlatShard if entry.spec.tensor_parallel is None else FlatShardOfDTensor
    return kind(entry.sharded._local, entry.spec, guard=handle.guard)


def _restore_order(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Put the module's part of a state dict in the order of names."""
    names = [name for name, _, _ in iter_slots(module)]
    expected = {prefix + unwrapped(name): i for i, name in enumerate(names)}
    # They are the last keys of the dict.
    mine = list(takewhile(lambda key: key.startswith(prefix), reversed(state_dict)))[::-1]
    places: dict[str, tuple[int, int]] = {}
    last = -1
    for number, key in enumerate(mine):
        # Extra state has no position of its own and follows the key before it.
        last = expected.get(key, last)
        places[key] = (last, number)
    for key in sorted(mine, key=places.__getitem__):
        state_dict[key] = state_dict.pop(key)


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
        _add_flat_params(state, module, state_dict, prefix)
        return
    params = find_params(module, state)
    handles = list(dict.fromkeys(param.handle for param in params.values()))
    if not handles or any(handle.shown.is_in_scope for handle in handles):
        return  # the scope's own parameters are shown
    for handle in handles:
        handle.adopt_changes()
    problems = find_problems(
        module,
        params,
        state_dict,
        prefix,
        # Torch passes True to every hook, and raises for names after everything has been loaded.
        is_strict=bool(locals_of_caller("load_state_dict", "torch.nn.modules.module")["strict"]),
        is_assigned=bool(metadata.get("assign_to_params_buffers", False)),
    )
    given = _given_params(params, state_dict, prefix)
    agree_on_values(module, params, state_dict, prefix, problems)
    make_whole(module, state_dict, prefix)
    _write_values(given, state_dict)
    by_name = keys_by_name(state_dict, prefix)
    missing_keys += [
        name
        for name, param in ((unwrapped(prefix + n), p) for n, p in params.items())
        if param.handle.shown.shows_flat and name not in by_name
    ]
    for key, param in given.items():
        if param.handle.shown.shows_flat:
            del state_dict[key]
        elif has_fitting_shape(state_dict[key], param.entry.spec):
            state_dict[key] = param.entry.sharded
    _add_flat_params(state, module, state_dict, prefix)


def _add_flat_params(
    state: ShardState, module: nn.Module, state_dict: dict[str, Any], prefix: str
) -> None:
    """Add the flat parameters that `module` itself shows, which torch would miss.

    Not those of a whole tree: a checkpoint wrapper would take them for its module's.
    """
    flats = {
        id(handle.shown.flat.sharded) for handle in state.needed if handle.shown.flat is not None
    }
    for name, param in parameters_of(module).items():
        if id(param) in flats:
            state_dict[prefix + name] = param


def _is_done(state: ShardState, module: nn.Module, prefix: str, missing_keys: list[str]) -> bool:
    """Return whether an outer hook has loaded `module`; if not, note that this one does.

    The list of missing keys identifies a call of `load_state_dict`: all its hooks get the same one.
    """
    if state.load_call is not None:
        known, done = state.load_call
        if known is missing_keys and prefix.startswith(done):
            return True
    # Those of units outside, too, that share what is in the module.
    hooks = [hook for each in module.modules() for hook in load_pre_hooks_of(each).values()]
    for hook in (getattr(hook, "hook", hook) for hook in hooks):
        if getattr(hook, "func", None) is load_values:
            hook.args[0].note_load(missing_keys, prefix)
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
    """Check that no rank has found a problem, and that all ranks give values sharded the same way.

    Nor may ranks give values of different parameters: each would keep other values than the rest.
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


# What to call where only rank 0 has values.
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
        if name in keys
        and isinstance(state_dict[keys[name]], FlatShard | DTensor)
        and not isinstance(value, FlatShard | DTensor)
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
    if handle.local_shard.is_meta:
        materialize(handle)
    handle.adopt_changes()
    for index, piece in pieces:
        entry = handle.entries[index]
        handle.guard.note_write(entry.label.fqn)
        place = entry.slice_of(handle.local_shard)
        if piece.data_ptr() != place.data_ptr():  # torch's load functions fill it themselves
            place.copy_(piece)


def materialize(handle: FlatParamHandle, given: dict[int, Tensor] | None = None) -> None:
    """Give a handle on the meta device memory, filled with zeros.

    Args:
        given: Values in place of zeros: this rank's shards of the originals by index. Each is
            removed when it has been copied, to save memory. Not with a flat parameter.
    """
    device = HOST if handle.offload.is_active else handle.shard_group.device
    for index, shown in enumerate(handle.shown.at_rest):
        param, flag = shown.sharded, shown.sharded.requires_grad
        if given:
            memory = given.pop(index).to(device)
        else:
            memory = torch.zeros_like(param._local, device=device)
        kind = FlatShardOfDTensor if isinstance(param, FlatShardOfDTensor) else FlatShard
        shard = kind(memory, shown.spec, guard=handle.guard)
        take_place(cast(nn.Parameter, param), nn.Parameter(shard, flag))
    handle.adopt_changes()
