"""State dicts of optimizers by parameter name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composable_shard.comm import HOST, all_bytes
from composable_shard.flat_param import FlatParamHandle
from composable_shard.optim import has_stepped, made_state
from composable_shard.options import StateDictOptions
from composable_shard.runtime import check_whole
from composable_shard.state_dict import json_tree
from composable_shard.state_dict.gathering import (
    Shares,
    copied,
    gather_full,
)
from composable_shard.state_dict.model_tensors import ModelRanks, ParamNames
from composable_shard.state_dict.nested_state import (
    REST,
    read_states,
    shown_name,
    unflatten_rest,
)
from composable_shard.state_dict.optimizer_groups import (
    Group,
    Optimizers,
    States,
    as_list,
    group_kinds,
    names_by_handle,
    view_named,
    view_optimizers,
)
from composable_shard.state_dict.packed_values import from_bytes, pack, to_bytes, unpack
from composable_shard.tensor import (
    FlatShard,
    ShardSpec,
)

_MAX_DEPTH = 100  # of containers that ranks have different parts of


@torch.no_grad()
def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Return the state of optimizers by parameter name; call it on all ranks.

    The form is `{"state": {fqn: {name: value}}, "param_groups": [{..., "params": [fqn, ...]}]}`, as
    for a plain optimizer of the full model. State of a parameter's shape is a FlatShard that shares
    memory with the optimizer's. With `full_state_dict` it is a whole plain tensor, for one
    all-gather for each flat parameter and kind of state. Parameters without state are left out. One
    all-gather of 31 bytes for each process group compares the ranks.

    Args:
        model: The model that the optimizers were built for.
        optimizers: One, or several whose state is joined.
        options: Which values to return, and where.

    Returns:
        The state dict; empty on all ranks but the first with `full_state_dict` and `rank0_only`.

    Raises:
        ValueError: If an optimizer holds parameters that are not the model's.
        NotImplementedError: For state that is an object of a class of the optimizer's package.
        RuntimeError: If a rank lacks the state of a parameter of which it holds a shard, or if no
            unit manages a trainable parameter, as `get_model_state_dict`; if a unit shows a flat
            parameter.
    """
    options = StateDictOptions.of(options)
    check_whole(model)
    ranks = ModelRanks(model)
    with ExitStack() as stack:
        if options.init_optimizer_state:
            told = ranks.all_messages([has_stepped(each) for each in as_list(optimizers)])
            for number, optimizer in enumerate(as_list(optimizers)):
                if not any(each[number] for each in told):
                    stack.enter_context(made_state(optimizer))
        if options.full_state_dict and options.rank0_only:
            ranks.check_one_is_first()
        reading = _Reading(partial(view_optimizers, model, as_list(optimizers)))
        return reading.finish(ranks, ranks.told_by_all(reading.read), options)


@torch.no_grad()
def read_named_states(
    ranks: ModelRanks,
    names: ParamNames,
    in_order: Collection[str],
    optimizers: Mapping[str, Optimizer],
) -> dict[str, dict[str, Any]]:
    """Return each optimizer's state, in shards, as `get_optimizer_state_dict` does.

    One all-gather of 31 bytes for each process group, for all of them.

    Args:
        ranks: Of the model, whose state dict has been made: so it was checked.
        names: Of its parameters.
        in_order: Names of the state dict.
        optimizers: Of its parameters, by name.

    Raises:
        ValueError: If the ranks that share the model have optimizers of other names.
    """
    views = {name: partial(view_named, names, in_order, [x]) for name, x in optimizers.items()}
    # Sorted, so that ranks with another order tell the same, and communicate in one order.
    readings = {name: _Reading(views[name]) for name in sorted(views)}
    told = ranks.told_by_all(lambda: {name: each.read() for name, each in readings.items()})
    check_optimizers(told)
    found = {
        name: each.finish(ranks, [messages[name] for messages in told], StateDictOptions())
        for name, each in readings.items()
    }
    return {name: found[name] for name in optimizers}


def check_optimizers(told: Iterable[Iterable[str]]) -> None:
    """Check that ranks have told the same names of optimizers."""
    names = [sorted(each) for each in told]
    if any(each != names[0] for each in names):
        raise ValueError(f"the ranks of one model passed different optimizers: {names}")


class _Reading:
    """The state of some optimizers, which this rank has read, and other ranks too."""

    def __init__(self, view: Callable[[], list[Group]]) -> None:
        self._view = view
        self._groups: list[Group] = []
        self._states: States = {}

    def read(self) -> list[Any]:
        """Read this rank's; return what the ranks compare."""
        self._groups = self._view()
        found = read_states(self._groups)
        order = [fqn for group in self._groups for fqn in group.fqns] + [REST]
        self._states = {fqn: found[fqn] for fqn in order if found.get(fqn)}
        return _pack_kinds(self._groups, self._states)

    def finish(
        self, ranks: ModelRanks, messages: list[Any], options: StateDictOptions
    ) -> dict[str, Any]:
        """Return the state dict, given what all ranks have returned from `read`."""
        groups, states = self._groups, self._states
        if any(each != messages[0] for each in messages):
            told: list[States] = [unpack(each) for each in messages]
            states = _complete(ranks, groups, states, told, takes_large=options.full_state_dict)
        device = HOST if options.cpu_offload else None
        if options.full_state_dict:
            states = _make_full(ranks, groups, states, device, to_first=options.rank0_only)
            # Not earlier: all ranks take part in the collectives above.
            if options.rank0_only and not ranks.is_first:
                return {}
        elif options.cpu_offload:
            states = {
                fqn: {k: v.cpu() if isinstance(v, Tensor) else v for k, v in state.items()}
                for fqn, state in states.items()
            }
        param_groups = [{**copy.deepcopy(x.options), "params": x.fqns} for x in groups]
        nested, other, entries = unflatten_rest(states)
        return {"state": {**nested, **other}, "param_groups": param_groups, **entries}


def _pack_kinds(groups: list[Group], states: States) -> list[Any]:
    """Return a message about the state of managed parameters; a dtype stands for a shard."""
    managed = {m.fqn for group in groups for m in group.members if m.managed is not None} | {REST}
    told = {
        fqn: {k: v.dtype if isinstance(v, FlatShard) else v for k, v in states[fqn].items()}
        for fqn in sorted(managed & states.keys())
    }
    return pack(told, {})


def _complete(
    ranks: ModelRanks,
    groups: list[Group],
    states: States,
    told: list[States],
    *,
    takes_large: bool,
) -> States:
    """Add state that only other ranks have, for parameters that one rank owns whole.

    Shards are empty, numbers and small tensors are copied, and other large tensors are fetched if
    `takes_large`.
    """
    places = {
        fqn: (handle, handle.entries[index].spec)
        for handle, names in names_by_handle(groups).items()
        for index, fqn in names.items()
    }
    completed: States = {}
    with ranks.agreed():
        for fqn in [fqn for group in groups for fqn in group.fqns] + [REST]:
            found: dict[str, Any] = {}
            for each in [states, *told]:
                for name, value in each.get(fqn, {}).items():
                    # Containers of the rest may have state of parameters that other ranks own.
                    is_joined = fqn == REST and name in found
                    found.setdefault(name, value)
                    if is_joined:
                        found[name] = json_tree.merge(found[name], value, _MAX_DEPTH)
            for name, value in found.items():
                if isinstance(value, torch.dtype):
                    found[name] = _empty_shard(fqn, name, value, *places[fqn])
            if found:
                completed[fqn] = found
    _fetch_large(told, places, completed, takes_large=takes_large)
    return completed


def _fetch_large(
    told: list[States],
    places: dict[str, tuple[FlatParamHandle, ShardSpec]],
    states: States,
    *,
    takes_large: bool,
) -> None:
    """Give all ranks the large tensors that only some ranks have, or leave them out."""
    names = sorted({(fqn, name) for each in told for fqn, state in each.items() for name in state})
    for fqn, name in names:
        found = [each.get(fqn, {}).get(name) for each in told]
        like = next((each for each in found if each is not None), None)
        if not isinstance(like, Tensor) or not like.is_meta or None not in found:
            continue  # small, or on every rank
        value = states[fqn][name]
        if takes_large:
            place = next(iter(places.values())) if fqn == REST else places[fqn]
            group = place[0].shard_group
            data = all_bytes(group.group, group.device, b"" if value.is_meta else to_bytes(value))
            if value.is_meta:
                value = from_bytes(next(filter(None, data)), like).to(group.device)
            states[fqn][name] = value
        elif value.is_meta:
            del states[fqn][name]


def _empty_shard(
    fqn: str, name: str, dtype: torch.dtype, handle: FlatParamHandle, spec: ShardSpec
) -> FlatShard:
    start, end = spec.local_range
    if start < end:
        raise RuntimeError(
            f"the optimizer state {shown_name(name, fqn)} of '{fqn}' is not on all ranks that "
            "hold a shard of the parameter. Step the optimizer on all ranks."
        )
    memory = torch.empty(0, dtype=dtype, device=handle.shard.values.device)
    return FlatShard(memory, spec)


def _make_full(
    ranks: ModelRanks,
    groups: list[Group],
    states: States,
    device: torch.device | None,
    *,
    to_first: bool,
) -> States:
    full = {fqn: dict(state) for fqn, state in states.items()}
    names = names_by_handle(groups)
    for shares, values in gather_full(_shares(names, states), to_first=to_first, device=device):
        for index, value in values.items():
            full[names[shares.handle][index]][shares.kind] = value
    if to_first and not ranks.is_first:
        return {}
    return {
        fqn: {
            # A copy of the optimizer's own `step`, which later steps change.
            name: copied(value, device) if value is states[fqn].get(name) else value
            for name, value in state.items()
        }
        for fqn, state in full.items()
    }


def _shares(names: dict[FlatParamHandle, dict[int, str]], states: States) -> Iterator[Shares]:
    """Yield each kind of state of each handle as one shard in the handle's layout."""
    dtypes = {
        fqn: {key: value.dtype for key, value in state.items() if isinstance(value, FlatShard)}
        for fqn, state in states.items()
    }
    for handle, fqns in names.items():
        kinds = group_kinds(fqns, dtypes)
        # Ranks may have made the state of different parameters, in another order.
        for key, dtype in sorted(kinds, key=str):
            indices = sorted(kinds[key, dtype])
            shard = torch.zeros_like(handle.shard.values, dtype=dtype)
            for index in indices:
                piece = states[fqns[index]][key]._local
                handle.entries[index].slice_of(shard).copy_(piece)
            yield Shares(handle, shard, indices, key)
