"""An optimizer by parameter names: its groups, and the state of each parameter, cut and joined."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composable_shard.flat_param import FlatParamHandle
from composable_shard.state_dict.names import ManagedParam, find_params, handles_of
from composable_shard.tensor import FlatShard, is_elsewhere

__all__ = [
    "Group",
    "Member",
    "States",
    "canonical",
    "join_state",
    "params_by_fqn",
    "split_state",
    "view_optimizers",
]


States = dict[str, dict[str, Any]]
_WRAPPER_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class Member:
    """One parameter of an optimizer.

    Attributes:
        param: The object that the optimizer holds.
        fqns: Its name; of a flat parameter the names of all its originals.
        handle: What manages it, None for a plain parameter.
        indices: Of the originals in the handle.
        is_flat: Whether it is a flat parameter.
    """

    param: Tensor
    fqns: tuple[str, ...]
    handle: FlatParamHandle | None = None
    indices: tuple[int, ...] = ()
    is_flat: bool = False


@dataclass(frozen=True)
class Group:
    """One of an optimizer's `param_groups`.

    Attributes:
        optimizer: Whose.
        options: All but its parameters.
        members: Its parameters.
        fqns: Names of the originals; in the model's order where one of them is flat.
    """

    optimizer: Optimizer
    options: dict[str, Any]
    members: list[Member]
    fqns: list[str]


def canonical(name: str) -> str:
    """Return a parameter's name without what compiling and checkpointing wrappers put into it."""
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def params_by_fqn(model: nn.Module) -> dict[str, ManagedParam]:
    """Return every managed parameter by its canonical name, a tied one by each, in order."""
    return {canonical(name): param for name, param in find_params(model).items()}


def view_optimizers(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[Group]:
    """Return the groups of all optimizers, empty ones too, with the parameters' names.

    Raises:
        ValueError: If one holds a parameter that is none of the model's.
    """
    members = _members(model)
    order = {canonical(name): i for i, name in enumerate(model.state_dict())}
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
            fqns = [fqn for member in found for fqn in member.fqns]
            if any(member.is_flat for member in found):
                fqns.sort(key=lambda fqn: order.get(fqn, len(order)))
            groups.append(Group(optimizer, options, found, fqns))
    return groups


def _members(model: nn.Module) -> dict[int, Member]:
    names: dict[tuple[FlatParamHandle, int], str] = {}
    for fqn, param in params_by_fqn(model).items():
        names.setdefault((param.handle, param.index), fqn)
    found = {id(p): Member(p, (canonical(name),)) for name, p in model.named_parameters()}
    for handle in handles_of(model):
        own = [(i, names[handle, i]) for i in range(len(handle.entries)) if (handle, i) in names]
        for index, fqn in own:
            sharded = handle.entries[index].sharded
            found[id(sharded)] = Member(sharded, (fqn,), handle, (index,))
        if handle.flat is not None:
            indices, fqns = zip(*own, strict=True)
            flat = handle.flat.sharded
            found[id(flat)] = Member(flat, fqns, handle, indices, is_flat=True)
    return found


def split_state(member: Member, state: Mapping[str, Any] | None) -> States:
    """Return an optimizer's state of one parameter by name; that of a flat one cut into originals.

    None of a parameter that another rank owns whole: what Adagrad made of it here, no step has
    brought forward.

    Raises:
        NotImplementedError: For state that is no tensor and no number, as LBFGS has, or that can't
            be cut like a flat parameter.
    """
    if not state or is_elsewhere(member.param):
        return {}
    found: States = {fqn: {} for fqn in member.fqns}
    for name, value in state.items():
        if not isinstance(value, Tensor | int | float | str | None):
            raise NotImplementedError(
                f"the optimizer state '{name}' of '{member.fqns[0]}' is a {type(value).__name__}, "
                "which belongs to no parameter alone, as the history of LBFGS. Only tensors and "
                "numbers can be saved by parameter name."
            )
        for fqn, index in zip(member.fqns, member.indices or (0,), strict=True):
            found[fqn][name] = _cut_flat(member, name, value, index) if member.is_flat else value
    return found


def _cut_flat(member: Member, name: str, value: Any, index: int) -> Any:
    handle = member.handle
    assert handle is not None
    assert handle.flat is not None
    if isinstance(value, FlatShard) and value._shard_spec == handle.flat.spec:
        entry, rank = handle.entries[index], handle.shard_group.rank
        start, end = handle.layout.world_range(index, rank)
        base = handle.flat.spec.local_range[0]
        low = min(max(start - base, 0), value._local.numel())
        return FlatShard(value._local[low : low + end - start], entry.spec)
    if isinstance(value, Tensor):
        if value.numel() > 1:
            raise NotImplementedError(
                f"the optimizer state '{name}' of '{handle.flat.label}' has shape "
                f"{tuple(value.shape)}, which can't be cut like the parameter. Call "
                "register_orig_params(module) before building the optimizer."
            )
        return value.clone()
    return value


def join_state(member: Member, states: States) -> dict[str, Any]:
    """Return what an optimizer holds for one parameter, from its state by name; empty without.

    A flat parameter takes zeros for originals that have no state. Of a parameter that one rank owns
    whole, the others hold no state.

    Raises:
        ValueError: If originals of one flat parameter have numbers that differ.
    """
    given = {fqn: states[fqn] for fqn in member.fqns if states.get(fqn)}
    if is_elsewhere(member.param):
        return {}
    if not member.is_flat or not given:
        return dict(given.get(member.fqns[0], {}))
    handle = member.handle
    assert handle is not None
    assert handle.flat is not None
    joined: dict[str, Any] = {}
    for name in dict.fromkeys(name for state in given.values() for name in state):
        values = {fqn: state[name] for fqn, state in given.items() if name in state}
        first = next(iter(values.values()))
        if not isinstance(first, FlatShard):
            _check_equal(name, values)
            joined[name] = first
            continue
        whole = torch.zeros_like(handle.local_shard, dtype=first.dtype)
        for fqn, index in zip(member.fqns, member.indices, strict=True):
            if fqn in values:
                handle.slice_of(handle.entries[index], whole).copy_(values[fqn]._local)
        joined[name] = FlatShard(handle.slice_of(handle.flat, whole), handle.flat.spec)
    return joined


def _check_equal(name: str, values: dict[str, Any]) -> None:
    told = {fqn: v.item() if isinstance(v, Tensor) else v for fqn, v in values.items()}
    if len(set(told.values())) > 1:
        raise ValueError(
            f"expected one '{name}' for the parameters of a flat parameter, which has one for all, "
            f"got {told}. Call register_orig_params(module) before building the optimizer."
        )
