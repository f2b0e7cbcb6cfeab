"""Optimizer state read by parameter name: sharded on every rank, or whole on the first."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable_shard.comm import HOST, all_bytes
from composable_shard.flat_param import FlatParamHandle
from composable_shard.options import StateDictOptions
from composable_shard.state_dict.full_values import Shares, decode, describe, gather_full
from composable_shard.state_dict.names import ModelRanks
from composable_shard.state_dict.optimizer_view import Group, States, split_state, view_optimizers
from composable_shard.tensor import FlatShard, ShardSpec

__all__ = ["by_handle", "read_optimizers", "view_together"]


_Told = dict[str, dict[str, dict[str, Any]]]  # by name and state, what `describe` says


def by_handle(groups: list[Group]) -> dict[FlatParamHandle, dict[int, str]]:
    """Return the names of the optimizers' managed parameters, by handle and index."""
    found: dict[FlatParamHandle, dict[int, str]] = {}
    for member in [member for group in groups for member in group.members]:
        if member.handle is not None:
            names = dict(zip(member.indices, member.fqns, strict=True))
            found.setdefault(member.handle, {}).update(names)
    return found


def view_together(
    ranks: ModelRanks, model: nn.Module, optimizers: Iterable[Optimizer]
) -> list[Group]:
    """Return the optimizers' groups, or raise on all ranks."""
    with ranks.agreed():
        groups = view_optimizers(model, optimizers)
    return groups


def read_optimizers(
    model: nn.Module, optimizers: Iterable[Optimizer], options: StateDictOptions
) -> dict[str, Any]:
    """Return `{"state": {fqn: {name: value}}, "param_groups": [...]}`; for all ranks together."""
    ranks = ModelRanks(model)
    groups = view_together(ranks, model, optimizers)
    if options.full_state_dict and options.rank0_only:
        ranks.check_one_is_first()
    states: States = {}
    with ranks.agreed():
        for group in groups:
            for member in group.members:
                states |= split_state(member, group.optimizer.state.get(member.param))
    states = {fqn: states[fqn] for group in groups for fqn in group.fqns if fqn in states}
    states = _complete(ranks, groups, states, takes_large=options.full_state_dict)
    device = HOST if options.cpu_offload else None
    if options.full_state_dict:
        states = _make_full(ranks, groups, states, device, to_first=options.rank0_only)
        if options.rank0_only and not ranks.is_first:
            return {}
    elif options.cpu_offload:
        states = {fqn: _map(state, Tensor.cpu) for fqn, state in states.items()}
    param_groups = [{**copy.deepcopy(group.options), "params": group.fqns} for group in groups]
    return {"state": states, "param_groups": param_groups}


def _map(state: dict[str, Any], convert: Any) -> dict[str, Any]:
    return {k: convert(v) if isinstance(v, Tensor) else v for k, v in state.items()}


def _complete(
    ranks: ModelRanks, groups: list[Group], states: States, *, takes_large: bool
) -> States:
    """Add what only other ranks have: the owners of whole parameters.

    Shards are empty then, numbers and small tensors the same; large tensors, which are no shards,
    are fetched on request.
    """
    mine = {
        fqn: {name: describe(value) for name, value in state.items()}
        for fqn, state in states.items()
    }
    messages: list[_Told] = ranks.all_messages(mine)
    if len(messages) == 1:
        return states
    places = {
        fqn: (handle, handle.entries[index].spec)
        for handle, names in by_handle(groups).items()
        for index, fqn in names.items()
    }
    order = [fqn for group in groups for fqn in group.fqns]
    problem: Exception | None = None
    completed: States = {}
    for fqn in [fqn for fqn in order if any(told.get(fqn) for told in messages)]:
        told: dict[str, dict[str, Any]] = {}
        for message in messages:
            told = {**message.get(fqn, {}), **told}
        completed[fqn] = dict(states.get(fqn, {}))
        for name in [name for name in told if name not in completed[fqn]]:
            what = told[name]
            if what["kind"] == "shard":
                problem = problem or _lacks_part(fqn, name, places[fqn][1])
                completed[fqn][name] = _empty_shard(what["dtype"], *places[fqn])
            elif what["kind"] != "tensor" or "bytes" in what:
                completed[fqn][name] = decode(what)
    ranks.agree(problem)
    if takes_large:
        _fetch_large(messages, places, completed)
    return completed


def _lacks_part(fqn: str, name: str, spec: ShardSpec) -> Exception | None:
    start, end = spec.local_range
    if start == end:
        return None
    return RuntimeError(
        f"the optimizer state '{name}' of '{fqn}' is not on all ranks that hold a part of the "
        "parameter. Step the optimizer alike on all ranks."
    )


def _empty_shard(dtype: str, handle: FlatParamHandle, spec: ShardSpec) -> FlatShard:
    memory = torch.empty(0, dtype=getattr(torch, dtype), device=handle.local_shard.device)
    return FlatShard(memory, spec)


def _fetch_large(
    messages: list[_Told],
    places: dict[str, tuple[FlatParamHandle, ShardSpec]],
    states: States,
) -> None:
    """Give all ranks the large tensors that only some ranks have."""
    large = {
        (fqn, name): what
        for told in messages
        for fqn, state in told.items()
        for name, what in state.items()
        if what["kind"] == "tensor" and "bytes" not in what
    }
    for (fqn, name), what in sorted(large.items()):
        if all(name in told.get(fqn, {}) for told in messages) or fqn not in places:
            continue
        group = places[fqn][0].shard_group
        value: Tensor | None = states[fqn].get(name)
        data = b"" if value is None else bytes(_as_bytes(value).tolist())
        found = all_bytes(group.group, group.device, data)
        if value is None:
            payload = bytearray(next(part for part in found if part))
            flat = torch.frombuffer(payload, dtype=getattr(torch, what["dtype"]))
            states[fqn][name] = flat.clone().view(what["shape"]).to(group.device)


def _as_bytes(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _make_full(
    ranks: ModelRanks,
    groups: list[Group],
    states: States,
    device: torch.device | None,
    *,
    to_first: bool,
) -> States:
    full = {fqn: dict(state) for fqn, state in states.items()}
    names = by_handle(groups)
    for shares, values in gather_full(_shares(names, states), to_first=to_first, device=device):
        for index, value in values.items():
            full[names[shares.handle][index]][shares.kind] = value
    if to_first and not ranks.is_first:
        return {}
    return {
        fqn: {
            # Not the optimizer's own `step`, which goes on counting.
            name: _copied(value, device) if value is states[fqn].get(name) else value
            for name, value in state.items()
        }
        for fqn, state in full.items()
    }


def _shares(names: dict[FlatParamHandle, dict[int, str]], states: States) -> Iterator[Shares]:
    """Yield each kind of state of each handle, joined as the handle's parameters are."""
    for handle, fqns in names.items():
        for key, dtype in _shard_kinds(fqns, states):
            indices = [i for i, fqn in fqns.items() if _is_kind(states.get(fqn), key, dtype)]
            shard = torch.zeros_like(handle.local_shard, dtype=dtype)
            for index in indices:
                piece = states[fqns[index]][key]._local
                handle.slice_of(handle.entries[index], shard).copy_(piece)
            yield Shares(handle, shard, indices, key)


def _copied(value: Any, device: torch.device | None) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not isinstance(value, Tensor):
        return value
    return value.to(value.device if device is None else device, copy=True)


def _shard_kinds(names: dict[int, str], states: States) -> list[tuple[str, torch.dtype]]:
    """Return the states of a handle's parameters that are shards, each with its dtype, in order."""
    kinds = {
        (key, value.dtype): None
        for fqn in names.values()
        for key, value in states.get(fqn, {}).items()
        if isinstance(value, FlatShard)
    }
    return list(kinds)


def _is_kind(state: dict[str, Any] | None, key: str, dtype: torch.dtype) -> bool:
    value = None if state is None else state.get(key)
    return isinstance(value, FlatShard) and value.dtype == dtype
