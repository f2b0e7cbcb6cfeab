"""The groups of optimizers, and their state, by parameter name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composable_shard.flat_param import FlatParamHandle
from composable_shard.state_dict.model_tensors import (
    ManagedParam,
    ParamNames,
    by_handle,
    canonical,
)
from composable_shard.tensor import is_owned_by_other_rank

Optimizers = Optimizer | Iterable[Optimizer]
States = dict[str, dict[str, Any]]


class Member(NamedTuple):
    """One parameter of an optimizer."""

    param: Tensor  # the object that the optimizer holds
    fqn: str
    managed: ManagedParam | None = None  # None for a plain parameter


class Group(NamedTuple):
    """One of an optimizer's `param_groups`."""

    optimizer: Optimizer
    options: dict[str, Any]  # everything but its parameters
    members: list[Member]
    fqns: list[str]  # names of its parameters, in the model's order


def as_list(optimizers: Optimizers) -> list[Optimizer]:
    """Return one optimizer, or several, as a list."""
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def view_optimizers(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[Group]:
    """Return the groups of all optimizers, empty ones too, with the parameters' names."""
    return view_named(ParamNames.of(model), map(canonical, model.state_dict()), optimizers)


def view_named(
    names: ParamNames, in_order: Iterable[str], optimizers: Iterable[Optimizer]
) -> list[Group]:
    """Return the groups of all optimizers of a model whose names are known.

    Args:
        names: Of the model's parameters.
        in_order: Names of its state dict.
        optimizers: Of its parameters.
    """
    members = _members(names)
    order = {name: i for i, name in enumerate(in_order)}
    groups = []
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            options = {key: value for key, value in group.items() if key != "params"}
            unknown = [i for i, param in enumerate(group["params"]) if id(param) not in members]
            if unknown:
                raise ValueError(
                    f"expected an optimizer over the model's parameters, and the parameters "
                    f"{unknown} of its group {number} are not among them. Pass the model that it "
                    "was built for, and build it from model.parameters()."
                )
            found = [members[id(param)] for param in group["params"]]
            fqns = [member.fqn for member in found]
            # The optimizer's own order may differ between ranks: `set(params)` has one by address.
            fqns.sort(key=lambda fqn: (order.get(fqn, len(order)), fqn))
            groups.append(Group(optimizer, options, found, fqns))
    return groups


def _members(names: ParamNames) -> dict[int, Member]:
    found = {id(param): Member(param, fqn) for fqn, param in names.registered.items()}
    for managed in names.managed.values():
        sharded = managed.entry.sharded
        found[id(sharded)] = Member(sharded, managed.names[0], managed)
    return found


def state_of(member: Member, optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state of one parameter.

    Empty for a parameter that another rank owns whole: no step updates Adagrad's state here.
    """
    state = optimizer.state.get(member.param, {})
    return {} if is_owned_by_other_rank(member.param) else dict(state)


def own_tensors(groups: Iterable[Group]) -> States:
    """Return the tensors of optimizers' state by name."""
    return {
        member.fqn: {
            name: value
            for name, value in state_of(member, group.optimizer).items()
            if isinstance(value, Tensor)
        }
        for group in groups
        for member in group.members
    }


def names_by_handle(groups: list[Group]) -> dict[FlatParamHandle, dict[int, str]]:
    """Return the names of the optimizers' managed parameters, by handle and index.

    The order is the same on all ranks, which gather and scatter handle by handle.
    """
    managed = {member.fqn: member.managed for group in groups for member in group.members}
    named = ((managed[fqn], fqn) for group in groups for fqn in group.fqns)
    return by_handle((param, fqn) for param, fqn in named if param is not None)


def group_kinds(
    names: Mapping[int, str], dtypes: Mapping[str, Mapping[str, torch.dtype]]
) -> dict[tuple[str, torch.dtype], list[int]]:
    """Return the indices of a handle's parameters that have each kind of state: (name, dtype).

    Takes the parameters' names by index, and the dtypes of each parameter's sharded state by
    name.
    """
    kinds: dict[tuple[str, torch.dtype], list[int]] = {}
    for index, fqn in names.items():
        for kind in dtypes.get(fqn, {}).items():
            kinds.setdefault(kind, []).append(index)
    return kinds
