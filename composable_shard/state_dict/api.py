"""State dicts by parameter name, in the formats of torch.distributed.checkpoint.state_dict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer

from composable_shard.comm import HOST
from composable_shard.flat_param import FlatParamHandle
from composable_shard.optim import init_state
from composable_shard.options import StateDictOptions
from composable_shard.runtime import check_is_idle, get_states
from composable_shard.state_dict.broadcast import broadcast_model
from composable_shard.state_dict.full_values import Shares, gather_full
from composable_shard.state_dict.model_state import agree_on_values, find_problems, make_whole
from composable_shard.state_dict.names import ModelRanks, handles_of
from composable_shard.state_dict.optimizer_load import load_optimizers
from composable_shard.state_dict.optimizer_state import read_optimizers
from composable_shard.state_dict.optimizer_view import canonical, params_by_fqn
from composable_shard.tensor import FlatShard

__all__ = [
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
]


_Optimizers = Optimizer | Iterable[Optimizer]


def get_model_state_dict(
    model: nn.Module,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Return the parameters and persistent buffers of a model by name; call it on all ranks.

    By default the values are FlatShards that share memory with the parameters; no communication.
    With `full_state_dict` they are whole plain tensors in memory of their own, on the first rank:
    one gather for each flat parameter, one after another, so that no rank ever has more than one
    of them on its device besides what it returns. Where the full values are there anyway (a
    strategy that keeps them, no step since the last forward) nothing is gathered. Inside
    `unshard_params` the values are those of the scope.

    Args:
        model: A model with sharded units, or a plain one.
        submodules: Only what is in these modules.
        options: What to return.

    Returns:
        The state dict; empty on all ranks but the first with `full_state_dict` and `rank0_only`.

    Raises:
        NotImplementedError: With `full_state_dict` and `rank0_only`, if units' meshes begin with
            different ranks, of which none has all values.
        RuntimeError: Inside forward or backward.
    """
    options = options or StateDictOptions()
    _check_is_idle(model, "a state dict can't be made")
    found = {canonical(name): value for name, value in model.state_dict().items()}
    names = _names_in(model, submodules, options)
    if options.full_state_dict and not any(h.is_in_scope for h in handles_of(model)):
        with torch.no_grad():
            found = _make_full(model, found, names, options)
    else:
        device = HOST if options.cpu_offload else None
        found = {key: _moved(value, device) for key, value in found.items()}
    kept = {names(key): value for key, value in found.items()}
    return {key: _cast(value, options.dtype) for key, value in kept.items() if key is not None}


def _check_is_idle(model: nn.Module, what: str) -> None:
    for context in dict.fromkeys(state.context for state in get_states(model)):
        if context is not None:
            check_is_idle(context, what)


class _Names:
    """Which names are wanted, and what they shall be."""

    def __init__(self, prefixes: list[str] | None, keeps_prefixes: bool) -> None:
        self._prefixes = prefixes
        self._keeps_prefixes = keeps_prefixes

    def __call__(self, key: str) -> str | None:
        """Return the name under which `key` is returned, None if it is not."""
        if self._prefixes is None:
            return key
        for prefix in self._prefixes:
            if key.startswith(prefix):
                return key if self._keeps_prefixes else key.removeprefix(prefix)
        return None


def _names_in(
    model: nn.Module, submodules: set[nn.Module] | None, options: StateDictOptions
) -> _Names:
    if not submodules:
        return _Names(None, True)
    paths = {module: canonical(f"{name}.") for name, module in model.named_modules() if name}
    unknown = [type(module).__name__ for module in submodules if module not in paths]
    if unknown:
        raise ValueError(f"expected submodules of the model, got others: {unknown}")
    prefixes = [path for module, path in paths.items() if module in submodules]
    return _Names(prefixes, options.keep_submodule_prefixes)


def _make_full(
    model: nn.Module, found: dict[str, Any], names: _Names, options: StateDictOptions
) -> dict[str, Any]:
    ranks = ModelRanks(model)
    if options.rank0_only:
        ranks.check_one_is_first()
    found = {key: value for key, value in found.items() if names(key) is not None}
    places: dict[FlatParamHandle, dict[int, list[str]]] = {}
    for fqn, param in params_by_fqn(model).items():
        if fqn in found:
            places.setdefault(param.handle, {}).setdefault(param.index, []).append(fqn)
    wanted = (Shares(handle, indices=list(keys)) for handle, keys in places.items())
    device = HOST if options.cpu_offload else None
    done: set[str] = set()
    for shares, values in gather_full(
        wanted, to_first=options.rank0_only, device=device, dtype=options.dtype
    ):
        for index, keys in places[shares.handle].items():
            done.update(keys)
            if index in values:
                found.update(dict.fromkeys(keys, values[index]))
    for key, value in found.items():
        # FlatShards: `model` may be a part of a unit.
        if key not in done and isinstance(value, FlatShard | DTensor):
            found[key] = value.full_tensor()
    if options.rank0_only and not ranks.is_first:
        return {}
    return {key: value if key in done else _copied(value, device) for key, value in found.items()}


def _copied(value: Any, device: torch.device | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(value.device if device is None else device, copy=True)


def _moved(value: Any, device: torch.device | None) -> Any:
    return value.to(device) if device is not None and isinstance(value, Tensor) else value


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None or not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.to(dtype)


def set_model_state_dict(
    model: nn.Module,
    model_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> _IncompatibleKeys:
    """Write a state dict into a model; call it on all ranks.

    The values are FlatShards of this or any other layout, DTensors, or whole plain tensors that
    are the same on all ranks. What lies on the ranks in another way is gathered, a tensor at a
    time. With `broadcast_from_rank0` only the first rank passes a dict, of whole tensors: one
    scatter for each flat parameter, and a broadcast for each other tensor.

    Args:
        model: A model with sharded units.
        model_state_dict: What to write.
        options: `strict` and `broadcast_from_rank0` count.

    Returns:
        Names that are missing, and unexpected ones: with `strict=False` there may be some.

    Raises:
        RuntimeError: On all ranks alike, for missing, unexpected and wrongly shaped values on any
            rank, naming them; nothing has been changed then. Inside forward or backward.
        NotImplementedError: With `broadcast_from_rank0`, if units' meshes begin with different
            ranks.
    """
    options = options or StateDictOptions()
    _check_is_idle(model, "a state dict can't be loaded")
    if options.broadcast_from_rank0:
        return broadcast_model(model, model_state_dict, is_strict=options.strict)
    raw = {name.replace(_COMPILED, ""): name for name in model.state_dict()}
    given = model_state_dict
    if isinstance(given, Mapping):
        given = {raw.get(key, key): value for key, value in given.items()}
    handles = handles_of(model)
    if handles and not any(handle.is_in_scope for handle in handles):
        for handle in handles:
            handle.adopt_changes()
        # As a whole: the hook of a unit knows only what is in its module.
        problems = find_problems(model, given, is_strict=options.strict)
        agree_on_values(model, given, "", problems)
    if isinstance(given, dict):
        make_whole(model, given)
    return cast(_IncompatibleKeys, model.load_state_dict(given, strict=options.strict))


_COMPILED = "_orig_mod."


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: _Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Return the state of optimizers by parameter name; call it on all ranks.

    That is `{"state": {fqn: {name: value}}, "param_groups": [{..., "params": [fqn, ...]}]}`, as a
    plain optimizer on the full model would have it; what has a parameter's shape is a FlatShard
    like the parameter, which shares memory with the optimizer's, or with `full_state_dict` a whole
    plain tensor on the first rank: one gather for each flat parameter and kind of state. State of a
    flat parameter is cut into that of its originals. Parameters without state have none here
    either. Otherwise one all-gather of 31 bytes for each process group.

    Args:
        model: The model that the optimizers were built for.
        optimizers: One, or several whose state is joined.
        submodules: Only the parameters in these modules.
        options: What to return.

    Returns:
        The state dict; empty on all ranks but the first with `full_state_dict` and `rank0_only`.

    Raises:
        ValueError: If an optimizer holds parameters that are not the model's.
        NotImplementedError: For state that is no tensor or number (LBFGS).
        RuntimeError: If ranks lack state of a parameter that they hold a part of.
    """
    options = options or StateDictOptions()
    with torch.no_grad():
        if options.init_optimizer_state:
            for optimizer in _as_list(optimizers):
                init_state(optimizer)
        found = read_optimizers(model, _as_list(optimizers), options)
    if not found or not submodules:
        return found
    names = _names_in(model, submodules, options)
    kept = {names(fqn): state for fqn, state in found["state"].items()}
    found["state"] = {fqn: state for fqn, state in kept.items() if fqn is not None}
    for group in found["param_groups"]:
        group["params"] = [names(fqn) for fqn in group["params"] if names(fqn) is not None]
    return found


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: _Optimizers,
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Put state by parameter name into optimizers; call it on all ranks.

    It may come from any layout, world size or plain model; the optimizers may be fresh, without a
    step. Values are whole, or sharded in any way, and are loaded by the optimizers' own
    `load_state_dict`, with their casts and hooks. Options of groups (`lr`, ...) are taken from the
    saved group with the same parameters. State that a parameter has and the dict has not is
    dropped. With `broadcast_from_rank0` only the first rank passes a dict, of whole tensors.

    Args:
        model: The model that the optimizers were built for.
        optimizers: One or several.
        optim_state_dict: What `get_optimizer_state_dict` returns, here or elsewhere, or torch's
            function of that name.
        options: `strict` and `broadcast_from_rank0` count.

    Raises:
        ValueError: On all ranks alike, for missing, unexpected and wrongly shaped state on any
            rank, naming it; no optimizer has been changed then.
    """
    options = options or StateDictOptions()
    with torch.no_grad():
        load_optimizers(model, _as_list(optimizers), optim_state_dict, options)


def _as_list(optimizers: _Optimizers) -> list[Optimizer]:
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
