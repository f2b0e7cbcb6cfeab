"""A model's state dict that only the first rank has, given to all ranks a unit at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.module import _IncompatibleKeys

from composable_shard.flat_param import FlatParamHandle
from composable_shard.state_dict.full_values import decode, encode, scatter_full
from composable_shard.state_dict.model_state import materialize
from composable_shard.state_dict.names import ModelRanks
from composable_shard.state_dict.optimizer_view import canonical, params_by_fqn
from composable_shard.tensor import FlatShard

__all__ = ["broadcast_model"]


def broadcast_model(
    model: nn.Module, state_dict: Mapping[str, Any], *, is_strict: bool
) -> _IncompatibleKeys:
    """Write the first rank's state dict of whole tensors into the model of every rank.

    Raises:
        RuntimeError: On all ranks alike, if it does not fit; nothing has been changed then.
    """
    ranks, template = ModelRanks(model), model.state_dict()
    ranks.check_can_broadcast()
    expected = {canonical(name): value for name, value in template.items()}
    is_dict = isinstance(state_dict, Mapping)
    state_dict = state_dict if is_dict else {}
    names = [key for key in state_dict if key in expected]
    missing = [key for key in expected if key not in state_dict]
    extra = [key for key in state_dict if key not in expected]
    encoded: dict[str, Any] = {}
    problems = []
    if ranks.is_first:
        problems += ["expected a dict"] * (not is_dict)
        problems += [f"missing {missing}"] * bool(missing and is_strict)
        problems += [f"unexpected {extra}"] * bool(extra and is_strict)
        for key in names:
            problems += _check(key, state_dict[key], expected[key], encoded)
    shown = [handle.name for handle in ranks.handles if handle.is_registered_unsharded]
    if shown:
        problems.append(f"units {shown} show their full parameters: call reshard(module) first")
    text = f"the state dict does not fit {type(model).__name__}: " + "; ".join(problems)
    ranks.agree(RuntimeError(text) if problems else None)
    mine = [names, missing, extra, encoded] if ranks.is_first else None
    told = [message for message in ranks.all_messages(mine) if message is not None]
    names, missing, extra, encoded = told[0]
    with torch.inference_mode(False), torch.no_grad():
        _scatter_params(ranks, model, state_dict, set(names))
        rest: dict[str, Any] = {key: decode(value) for key, value in encoded.items()}
        for raw, value in template.items():
            key = canonical(raw)
            if key in names and isinstance(value, Tensor) and not isinstance(value, FlatShard):
                rest[raw] = _broadcast(ranks, value, state_dict.get(key))
        model.load_state_dict(rest, strict=False)
    return _IncompatibleKeys(missing, extra)


def _check(key: str, value: Any, wanted: Any, encoded: dict[str, Any]) -> list[str]:
    """Return what is wrong with a value; put what is no tensor into `encoded`."""
    if not isinstance(wanted, Tensor):
        try:
            encoded[key] = encode(value)
        except ValueError:
            return [f"'{key}' is a {type(value).__name__}, which can't be sent to other ranks"]
        return []
    if not isinstance(value, Tensor) or isinstance(value, FlatShard | DTensor):
        return [f"expected '{key}' to be a whole plain tensor, got a {type(value).__name__}"]
    if value.shape != wanted.shape:
        return [f"expected '{key}' of shape {tuple(wanted.shape)}, got {tuple(value.shape)}"]
    return []


def _scatter_params(
    ranks: ModelRanks, model: nn.Module, state_dict: Mapping[str, Any], names: set[str]
) -> None:
    places: dict[FlatParamHandle, dict[int, str]] = {}
    for fqn, param in params_by_fqn(model).items():
        if fqn in names:
            places.setdefault(param.handle, {})[param.index] = fqn
    for handle, keys in places.items():
        if handle.local_shard.is_meta:
            materialize(handle)
        handle.adopt_changes()
        given = {index: state_dict[key] for index, key in keys.items() if key in state_dict}
        dtype = handle.local_shard.dtype
        shard = scatter_full(handle, given, list(keys), dtype, meshes=ranks.meshes)
        for index in keys:
            entry = handle.entries[index]
            handle.guard.note_write(entry.label.fqn)
            handle.slice_of(entry, handle.local_shard).copy_(handle.slice_of(entry, shard))


def _broadcast(ranks: ModelRanks, like: Tensor, value: Tensor | None) -> Tensor:
    """Return what the first rank has for a tensor that no unit manages."""
    whole = torch.empty(like.shape, dtype=like.dtype, device=ranks.device)
    if value is not None:
        whole.copy_(value)
    whole = ranks.broadcast(whole)
    if isinstance(like, DTensor):
        # src_data_rank=None: cut locally, as every rank has the same values.
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return whole
