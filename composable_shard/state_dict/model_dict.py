"""A model's state dict by name, in the formats of torch.distributed.checkpoint.state_dict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from composable_shard.comm import HOST
from composable_shard.dtensors import distribute, is_dtensor
from composable_shard.options import StateDictOptions, describe_prefix
from composable_shard.runtime import check_whole
from composable_shard.state_dict.gathering import (
    Shares,
    copied,
    gather_full,
    scatter_full,
)
from composable_shard.state_dict.model_state import (
    agree_on_values,
    find_problems,
    make_whole,
    write_shard,
)
from composable_shard.state_dict.model_tensors import (
    ModelRanks,
    by_handle,
    canonical,
    check_model_is_idle,
    check_names,
    find_params,
    handles_of,
    is_extra_state,
    params_by_fqn,
    without_wrappers,
)
from composable_shard.tensor import FlatShard, is_distributed
from composable_shard.torch_private import IncompatibleKeys


def get_model_state_dict(
    model: nn.Module,
    *,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Return the parameters and persistent buffers of a model by name; call it on all ranks.

    By default the values are FlatShards that share memory with the parameters, without
    communication. With `full_state_dict` they are whole plain tensors in new memory; with
    `rank0_only`, on the first rank only. This takes one all-gather for each flat parameter, one
    after another, so a device holds at most one flat parameter besides the result. Full values
    that a strategy keeps, and that are current, are not gathered. Inside `unshard_params` the
    values are the scope's.

    Args:
        model: A model, sharded or not.
        options: Which values to return, and where.

    Returns:
        The state dict; empty on all ranks but the first with `full_state_dict` and `rank0_only`.

    Raises:
        NotImplementedError: With `full_state_dict` and `rank0_only`, if the meshes of the units
            begin with different ranks, so that no rank is the first of all.
        RuntimeError: Inside forward or backward, or if no unit manages a trainable parameter of a
            sharded model that is not in any unit's `ignored_params`.
        ValueError: If a module contains itself, or names differ only in those of wrappers.
    """
    options = StateDictOptions.of(options)
    check_model_is_idle(model, "a state dict can't be made")
    check_whole(model)
    try:
        found = without_wrappers(model, model.state_dict())
    except RecursionError:
        find_params(model)  # says where a module contains itself
        raise
    if options.ignore_frozen_params:
        frozen = _frozen_names(model)
        found = {key: value for key, value in found.items() if key not in frozen}
    device = HOST if options.cpu_offload else None
    if options.full_state_dict and not any(h.shown.scope is not None for h in handles_of(model)):
        with torch.no_grad():
            found, device = _make_full(model, found, options), None
    return {key: converted(value, device, options.dtype) for key, value in found.items()}


def _frozen_names(model: nn.Module) -> set[str]:
    shown: dict[str, Tensor] = {canonical(name): p for name, p in model.named_parameters()}
    shown |= {fqn: param.entry.sharded for fqn, param in params_by_fqn(model).items()}
    return {fqn for fqn, param in shown.items() if not param.requires_grad}


def _make_full(
    model: nn.Module, found: dict[str, Any], options: StateDictOptions
) -> dict[str, Any]:
    ranks = ModelRanks(model)
    if options.rank0_only:
        ranks.check_one_is_first()
    params = {param: param.names for fqn, param in params_by_fqn(model).items() if fqn in found}
    places = by_handle(params.items())
    wanted = (Shares(handle, indices=list(keys)) for handle, keys in places.items())
    device = HOST if options.cpu_offload else None
    done: set[str] = set()
    for shares, values in gather_full(
        wanted, to_first=options.rank0_only, device=device, dtype=options.dtype
    ):
        for index, fqns in places[shares.handle].items():
            keys = [fqn for fqn in fqns if fqn in found]
            done.update(keys)
            if index in values:
                found.update(dict.fromkeys(keys, values[index]))
    for key, value in found.items():
        # FlatShards: `model` may be a part of a unit.
        if key not in done and is_distributed(value):
            found[key] = value.full_tensor()
    if options.rank0_only and not ranks.is_first:
        return {}
    return {key: value if key in done else copied(value, device) for key, value in found.items()}


def converted(value: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """Return a tensor on a device and in a dtype, where given; return other values unchanged."""
    if not isinstance(value, Tensor):
        return value
    value = value if device is None else value.to(device)
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def set_model_state_dict(
    model: nn.Module,
    model_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> IncompatibleKeys:
    """Load a state dict into a model; call it on all ranks.

    The values are FlatShards of any layout, DTensors, or whole plain tensors that are the same on
    all ranks. Values with another sharding than the parameter's are gathered, one tensor at a time.
    With `broadcast_from_rank0` only the first rank passes a dict, of whole tensors. That takes one
    broadcast for each flat parameter and process group, and one for each other tensor.

    Args:
        model: A model with sharded units.
        model_state_dict: The values by name.
        options: Only `strict` and `broadcast_from_rank0` count.

    Returns:
        The missing and the unexpected names, where `strict` is False.

    Raises:
        RuntimeError: On all ranks, if values are missing, unexpected or wrongly shaped on any rank,
            naming them; the model is unchanged then. Or if code of the model
            (`_load_from_state_dict`, `set_extra_state`, hooks) raises: then load again. Inside
            forward or backward.
        NotImplementedError: With `broadcast_from_rank0`, if the meshes of the units begin with
            different ranks.
        ValueError: If names of the model differ only in those of wrappers.
    """
    options = StateDictOptions.of(options)
    check_model_is_idle(model, "a state dict can't be loaded")
    check_names(model)
    ModelRanks(model).check_all_broadcast(options.broadcast_from_rank0)
    if options.broadcast_from_rank0:
        return _broadcast_model(model, model_state_dict, is_strict=options.strict)
    given = check_values(model, model_state_dict, is_strict=options.strict)
    if isinstance(given, dict):
        make_whole(model, given)
    with _raising_everywhere(model):
        return cast(IncompatibleKeys, model.load_state_dict(given, strict=options.strict))


_COMPILED = "_orig_mod."


def check_values(
    model: nn.Module, state_dict: Mapping[str, Any], *, is_strict: bool
) -> Mapping[str, Any]:
    """Check a state dict as `set_model_state_dict` does, on all ranks; changes nothing.

    Return it with the names that the model's modules have.
    """
    given = state_dict
    if isinstance(given, Mapping):
        raw = {name.replace(_COMPILED, ""): name for name in model.state_dict()}
        given = {raw.get(key, key): value for key, value in given.items()}
    handles = handles_of(model)
    if handles and not any(handle.shown.scope is not None for handle in handles):
        for handle in handles:
            handle.adopt_changes()
        # For the whole model: the hook of a unit sees only its own module.
        params = find_params(model)
        problems = find_problems(model, params, given, is_strict=is_strict)
        agree_on_values(model, params, given, "", problems)
    return given


@contextmanager
def _raising_everywhere(model: nn.Module) -> Iterator[None]:
    """If a model's own code raises in a load on any rank, raise on all ranks.

    Everything has been checked before, so that only such code can raise. One all-gather of 31 bytes
    for each process group.
    """
    with ModelRanks(model).agreed():
        try:
            yield
        except Exception as error:
            raise RuntimeError(
                f"code of {type(model).__name__} raised while a state dict was loaded: "
                f"{type(error).__name__}: {error}. Some values are new, others are not. Load again "
                "before anything else."
            ) from error


def _broadcast_model(
    model: nn.Module, state_dict: Mapping[str, Any], *, is_strict: bool
) -> IncompatibleKeys:
    """Load the first rank's state dict of whole tensors on every rank, if it fits."""
    ranks, template = ModelRanks(model), model.state_dict()
    ranks.check_can_broadcast()
    expected = {canonical(name): value for name, value in template.items()}
    is_dict = isinstance(state_dict, Mapping)
    state_dict = state_dict if is_dict else {}
    names = [key for key in state_dict if key in expected]
    missing = [key for key in expected if key not in state_dict]
    extra = [key for key in state_dict if key not in expected]
    others = [key for key in names if _is_other(key, expected[key])]
    problems = []
    if ranks.is_first:
        problems += ["expected a dict"] * (not is_dict)
        problems += [f"missing {missing}"] * bool(missing and is_strict)
        problems += [f"unexpected {extra}"] * bool(extra and is_strict)
        prefix = describe_prefix(missing, extra) if is_strict else ""
        problems += [prefix] * bool(prefix)
        for key in names:
            if key not in others:
                problems += _check(key, state_dict[key], expected[key])
    shown = [handle.name for handle in ranks.handles if handle.shown.is_unsharded]
    if shown:
        problems.append(f"units {shown} show their full parameters: call reshard(module) first")
    text = f"the state dict does not fit {type(model).__name__}: " + "; ".join(problems)
    # All problems of all ranks before the first value is sent or written.
    ranks.agree(RuntimeError(text) if problems else None)
    names, missing, extra, decoded = ranks.value_from_first(
        lambda: [names, missing, extra, {key: state_dict[key] for key in others}]
    )
    with _raising_everywhere(model), torch.inference_mode(False), torch.no_grad():
        _scatter_params(ranks, model, state_dict, set(names))
        rest: dict[str, Any] = {}
        for raw, value in template.items():
            key = canonical(raw)
            if key in decoded:
                rest[raw] = decoded[key]
            elif key in names and isinstance(value, Tensor) and not isinstance(value, FlatShard):
                rest[raw] = _broadcast(ranks, value, state_dict.get(key))
        model.load_state_dict(rest, strict=False)
    return IncompatibleKeys(missing, extra)


def _is_other(key: str, expected: Any) -> bool:
    """Return whether a value is neither a parameter nor a buffer."""
    return is_extra_state(key) or not isinstance(expected, Tensor)


def _check(key: str, value: Any, wanted: Tensor) -> list[str]:
    """Return the problems of a value for a parameter or buffer."""
    if not isinstance(value, Tensor) or is_distributed(value):
        return [f"expected '{key}' to be a whole plain tensor, got a {type(value).__name__}"]
    if value.shape != wanted.shape:
        return [f"expected '{key}' of shape {tuple(wanted.shape)}, got {tuple(value.shape)}"]
    return []


def _scatter_params(
    ranks: ModelRanks, model: nn.Module, state_dict: Mapping[str, Any], names: set[str]
) -> None:
    named = ((param, fqn) for fqn, param in params_by_fqn(model).items() if fqn in names)
    for handle, keys in by_handle(named).items():
        write_shard(handle, ())
        given = {index: state_dict[key] for index, key in keys.items() if key in state_dict}
        dtype = handle.shard.values.dtype
        shard = scatter_full(handle, given, list(keys), dtype, groups=ranks.tensor_groups)
        write_shard(handle, ((i, handle.entries[i].slice_of(shard)) for i in keys))


def _broadcast(ranks: ModelRanks, like: Tensor, value: Tensor | None) -> Tensor:
    """Return the first rank's value of a tensor that no unit manages."""
    whole = torch.empty(like.shape, dtype=like.dtype, device=ranks.device)
    if value is not None:
        whole.copy_(value)
    whole = ranks.copy_from_first(whole)
    if is_dtensor(like):
        return distribute(whole, like.device_mesh, like.placements)
    return whole
