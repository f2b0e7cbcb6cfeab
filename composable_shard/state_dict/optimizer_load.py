"""Load optimizer state by parameter name, in any form, into optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable_shard.optim import find_scalar_keys
from composable_shard.options import StateDictOptions
from composable_shard.state_dict.full_values import decode, describe_shard, encode, scatter_full
from composable_shard.state_dict.model_tensors import ModelRanks
from composable_shard.state_dict.optimizer_state import (
    Group,
    States,
    group_kinds,
    join_state,
    names_by_handle,
    view_optimizers,
)
from composable_shard.state_dict.torch_calls import is_flat, unflatten
from composable_shard.tensor import (
    FlatShard,
    cloned,
    has_fitting_shape,
    needs_gather,
    slice_given,
)
from composable_shard.torch_private import is_traceable_wrapper_subclass, load_hooks_of

_KEPT_OPTIONS = ("params", "param_names")


def prepare_load(
    model: nn.Module,
    optimizers: Iterable[Optimizer],
    state_dict: Mapping[str, Any],
    options: StateDictOptions,
    *,
    is_given_away: bool = False,
) -> Callable[[], None]:
    """Check the state and cut it; return a function that loads it without communication.

    Args:
        model: The model that the optimizers were built for.
        optimizers: May have no state yet.
        state_dict: As `get_optimizer_state_dict` returns it.
        options: Only `strict` and `broadcast_from_rank0` count.
        is_given_away: Whether the optimizers may keep the dict's own tensors.
    """
    optimizers, ranks = list(optimizers), ModelRanks(model)
    with ranks.agreed():
        groups = view_optimizers(model, optimizers)
    given = _Given(groups, is_given_away=is_given_away)
    with ranks.agreed():
        if not options.broadcast_from_rank0 or ranks.is_first:
            given.take(state_dict, is_strict=options.strict)
    if options.broadcast_from_rank0:
        ranks.check_can_broadcast()
        given.spread(ranks)
    else:
        given.cut(ranks)
    with ranks.agreed():
        joined = [
            [
                join_state(m, given.states, group.optimizer.state.get(m.param, {}))
                for m in group.members
            ]
            for group in groups
        ]

    def load() -> None:
        for handle in ranks.handles:
            handle.fix_owners()  # whoever has a parameter has its state
        for optimizer in optimizers:
            _load(optimizer, groups, joined, given.options)

    return load


def keeps_tensors(optimizer: Optimizer) -> bool:
    """Return whether torch's own code alone loads state, so that it may be filled afterwards."""
    methods = optimizer.load_state_dict, optimizer.__setstate__
    is_torchs = all(method.__module__.startswith("torch.optim.") for method in methods)
    return is_torchs and not any(load_hooks_of(optimizer))


def _load(
    optimizer: Optimizer,
    groups: list[Group],
    joined: list[list[dict[str, Any]]],
    options: list[dict[str, Any]],
) -> None:
    """Load through the optimizer's own method, which casts, moves and runs hooks."""
    param_groups: list[dict[str, Any]] = []
    state: dict[int, dict[str, Any]] = {}
    count = 0
    for group, states, values in zip(groups, joined, options, strict=True):
        if group.optimizer is not optimizer:
            continue
        numbers = list(range(count, count + len(states)))
        count += len(states)
        state |= {number: each for number, each in zip(numbers, states, strict=True) if each}
        param_groups.append({**group.options, **values, "params": numbers})
    optimizer.load_state_dict({"state": state, "param_groups": param_groups})


class _Given:
    """The state to load.

    Attributes:
        states: By parameter name. State of a parameter's shape has the form in which it was given
            until `cut` or `spread` makes FlatShards of it.
        options: New options of each group.
    """

    def __init__(self, groups: list[Group], *, is_given_away: bool) -> None:
        members = [member for group in groups for member in group.members]
        self._groups = groups
        self._specs = {fqn: spec for m in members for fqn, spec in m.specs.items()}
        self._plain = {m.fqns[0]: m.param for m in members if m.handle is None}
        self._is_given_away = is_given_away
        self.states: States = {}
        self.options: list[dict[str, Any]] = [{} for _ in groups]

    def take(self, state_dict: Mapping[str, Any], *, is_strict: bool) -> None:
        """Take the state of the optimizers' parameters; changes no optimizer.

        Raises:
            ValueError: If it is no optimizer state dict, or if names or shapes do not fit.
        """
        if is_flat(state_dict):
            state_dict = unflatten(state_dict)
        keys = list(state_dict) if isinstance(state_dict, Mapping) else []
        if not {"state", "param_groups"}.issubset(keys):
            raise ValueError(
                "expected an optimizer state dict by parameter name, with 'state' and "
                f"'param_groups', got a {type(state_dict).__name__} with the keys {keys[:5]}. "
                "get_optimizer_state_dict makes one. If only the first rank has it, pass "
                "options=StateDictOptions(broadcast_from_rank0=True) on all ranks."
            )
        saved = state_dict["param_groups"]
        homes = {fqn: number for number, group in enumerate(saved) for fqn in group["params"]}
        wanted = [fqn for group in self._groups for fqn in group.fqns]
        missing = [fqn for fqn in wanted if fqn not in homes]
        known = set(wanted)
        extra = [fqn for fqn in dict.fromkeys([*homes, *state_dict["state"]]) if fqn not in known]
        if is_strict and (missing or extra):
            raise ValueError(
                f"the optimizers' parameters are not those of the state dict: missing {missing}, "
                f"unexpected {extra}. Pass StateDictOptions(strict=False) to ignore this."
            )
        self.options = [self._options_of(i, homes, saved) for i in range(len(self._groups))]
        self.states = {
            fqn: dict(state_dict["state"][fqn]) for fqn in wanted if state_dict["state"].get(fqn)
        }
        self._check_shapes()

    def _options_of(
        self, number: int, homes: dict[str, int], saved: list[dict[str, Any]]
    ) -> dict[str, Any]:
        group = self._groups[number]
        found = {homes[fqn]: fqn for fqn in group.fqns if fqn in homes}
        if len(found) > 1:
            raise ValueError(
                f"the parameters of one group of the optimizer, {list(found.values())} among them, "
                "are in different groups of the state dict. Build the optimizer with groups like "
                "those that were saved."
            )
        is_empty_there = number < len(saved) and not saved[number]["params"]
        if not found and not (is_empty_there and not group.members):
            return {}
        source = saved[next(iter(found), number)]
        return {
            key: _moved_to(group.options.get(key), value)
            for key, value in source.items()
            if key not in _KEPT_OPTIONS
        }

    def _check_shapes(self) -> None:
        shapes = {fqn: param.shape for fqn, param in self._plain.items()}
        shapes |= {fqn: spec.shape for fqn, spec in self._specs.items()}
        tensors = [
            (name, value.shape, shapes[fqn])
            for fqn, state in self.states.items()
            for name, value in state.items()
            if isinstance(value, Tensor)
        ]
        scalars = find_scalar_keys(tensors)
        elementwise = {
            name for name, shape, wanted in tensors if shape == wanted and wanted.numel() != 1
        }
        for fqn, state in self.states.items():
            spec = self._specs.get(fqn)
            for name, value in state.items():
                if not isinstance(value, Tensor):
                    continue
                is_alike = isinstance(value, FlatShard | DTensor) or name in elementwise
                fits = has_fitting_shape(value, spec) if spec else value.shape == shapes[fqn]
                if is_alike and not fits:
                    raise ValueError(
                        f"expected the state '{name}' of '{fqn}' to have shape "
                        f"{tuple(shapes[fqn])}, got {tuple(value.shape)}"
                    )
                is_alike |= value.shape == shapes[fqn] and name not in scalars
                if is_alike and spec is not None:
                    state[name] = _Whole(value)

    def _is_scattered(self, fqn: str, value: Any) -> bool:
        """Return whether a value must be gathered before this rank can cut it."""
        if isinstance(value, _Whole):
            return needs_gather(value.tensor, self._specs[fqn])
        is_plain = not isinstance(self._plain.get(fqn), DTensor)
        return is_plain and isinstance(value, FlatShard | DTensor)

    def cut(self, ranks: ModelRanks) -> None:
        """Cut state of a parameter's shape like the parameter.

        Raises:
            RuntimeError: On all ranks, if ranks gave values that are sharded differently.
        """
        gathered = [
            f"{fqn}.{name}"
            for fqn, state in self.states.items()
            for name, value in state.items()
            if self._is_scattered(fqn, value)
        ]
        told = ranks.all_messages(gathered)
        if len(told) > 1:
            odd = sorted({name for names in told for name in names})
            raise RuntimeError(
                f"the ranks gave optimizer state that is sharded differently: {odd}. Load the same "
                "kind of state dict on every rank."
            )
        current = {
            fqn: group.optimizer.state.get(member.param, {})
            for group in self._groups
            for member in group.members
            for fqn in member.fqns
        }
        for fqn, state in self.states.items():
            for name, value in state.items():
                own = current[fqn].get(name)
                if isinstance(value, _Whole):
                    # torch.distributed.checkpoint fills the optimizer's own tensors.
                    if (tensor := value.tensor) is not own:
                        spec = self._specs[fqn]
                        local = self._owned(slice_given(tensor, spec))
                        tensor = FlatShard(_quantised_as(own, local), spec)
                    state[name] = tensor
                elif self._is_scattered(fqn, value):
                    state[name] = value.full_tensor()
                elif isinstance(value, Tensor):
                    state[name] = value if value is own else self._owned(value)

    def _owned(self, value: Tensor) -> Tensor:
        return value if self._is_given_away else cloned(value)

    def spread(self, ranks: ModelRanks) -> None:
        """Give every rank its shards of the first rank's state, one handle at a time."""
        mine: Any = None
        with ranks.agreed():
            if ranks.is_first:
                self._check_is_whole()
                options = [{k: encode(v) for k, v in each.items()} for each in self.options]
                told = {
                    fqn: {name: _describe(value) for name, value in state.items()}
                    for fqn, state in self.states.items()
                }
                mine = [options, told]
        options, told = next(each for each in ranks.all_messages(mine) if each is not None)
        self.options = [{key: decode(value) for key, value in each.items()} for each in options]
        # All names, for their order.
        states: States = {fqn: dict.fromkeys(state) for fqn, state in told.items()}
        for fqn, state in told.items():
            for name, what in state.items():
                if what["kind"] != "shard":
                    states[fqn][name] = self._send(ranks, fqn, name, what)
        dtypes = {
            fqn: {k: getattr(torch, w["dtype"]) for k, w in state.items() if w["kind"] == "shard"}
            for fqn, state in told.items()
        }
        for handle, names in names_by_handle(self._groups).items():
            for (key, dtype), indices in group_kinds(names, dtypes).items():
                given = {i: self.states[names[i]][key].tensor for i in indices if ranks.is_first}
                shard = scatter_full(handle, given, indices, dtype, groups=ranks.tensor_groups)
                for index in indices:
                    entry = handle.entries[index]
                    piece = entry.slice_of(shard).clone()
                    states[names[index]][key] = FlatShard(piece, entry.spec)
        self.states = states

    def _check_is_whole(self) -> None:
        for fqn, state in self.states.items():
            for name, value in state.items():
                tensor = value.tensor if isinstance(value, _Whole) else value
                if isinstance(tensor, FlatShard | DTensor):
                    raise ValueError(
                        f"expected the state '{name}' of '{fqn}' to be a whole plain tensor, got a "
                        f"{type(tensor).__name__}, whose shards other ranks hold. Pass "
                        "StateDictOptions() and give every rank its shard."
                    )

    def _send(self, ranks: ModelRanks, fqn: str, name: str, what: dict[str, Any]) -> Any:
        value = decode(what)
        if what["kind"] != "tensor" or "bytes" in what:
            return value
        if ranks.is_first:
            value.copy_(self.states[fqn][name])
        return ranks.copy_from_first(value)


def _quantised_as(own: Any, local: Tensor) -> Tensor:
    """Return values in the form of an optimizer's own, which may be quantised."""
    like = own._local if isinstance(own, FlatShard) else local
    is_same = type(like) is type(local) or not is_traceable_wrapper_subclass(like)
    return local if is_same else cloned(like).copy_(local)


def _moved_to(own: Any, value: Any) -> Any:
    """Return an option on the device of the optimizer's own, where both are tensors."""
    is_tensor = isinstance(own, Tensor) and isinstance(value, Tensor)
    return value.to(own.device) if is_tensor else value


class _Whole(NamedTuple):
    """A tensor of a parameter's shape, in any form, to be cut like the parameter."""

    tensor: Tensor


def _describe(value: Any) -> dict[str, Any]:
    return describe_shard(value.tensor) if isinstance(value, _Whole) else encode(value)
