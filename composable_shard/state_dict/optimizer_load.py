"""Optimizer state by parameter name put into optimizers, whatever form it has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable_shard.optim import find_scalar_keys
from composable_shard.options import StateDictOptions
from composable_shard.state_dict.full_values import decode, describe, encode, scatter_full
from composable_shard.state_dict.model_tensors import ModelRanks
from composable_shard.state_dict.optimizer_state import (
    Group,
    States,
    group_kinds,
    join_state,
    names_by_handle,
    view_together,
)
from composable_shard.tensor import (
    FlatShard,
    ShardSpec,
    has_fitting_shape,
    needs_gather,
    slice_given,
)

__all__ = ["prepare_load"]


_KEPT_OPTIONS = ("params", "param_names")


def prepare_load(
    model: nn.Module,
    optimizers: Iterable[Optimizer],
    state_dict: Mapping[str, Any],
    options: StateDictOptions,
    *,
    is_given_away: bool = False,
) -> Callable[[], None]:
    """Check and cut state by name; return what puts it into the optimizers without communication.

    Args:
        model: The model that the optimizers were built for.
        optimizers: They may be fresh.
        state_dict: By parameter name.
        options: `strict` and `broadcast_from_rank0` count.
        is_given_away: Whether optimizers may go on with the very tensors of the dict.
    """
    optimizers, ranks = list(optimizers), ModelRanks(model)
    groups = view_together(ranks, model, optimizers)
    specs = {
        fqn: handle.entries[index].spec
        for handle, names in names_by_handle(groups).items()
        for index, fqn in names.items()
    }
    given = _Given(groups, specs, is_given_away=is_given_away)
    with ranks.agreed():
        if not options.broadcast_from_rank0 or ranks.is_first:
            given.take(state_dict, is_strict=options.strict)
    if options.broadcast_from_rank0:
        ranks.check_can_broadcast()
        given.spread(ranks)
    else:
        given.cut(ranks)
    with ranks.agreed():
        joined = [[join_state(m, given.states) for m in group.members] for group in groups]

    def load() -> None:
        for handle in ranks.handles:
            handle.has_fixed_owners = True  # whoever has a parameter has its state
        for optimizer in optimizers:
            _load(optimizer, groups, joined, given.options)

    return load


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
    """State that was given by name, on its way into the groups of optimizers.

    Attributes:
        states: What is there, by parameter name; what has a parameter's shape in any form at
            first, and as FlatShards like the parameters' after `cut` or `spread`.
        options: For each group, what its options shall be.
    """

    def __init__(
        self, groups: list[Group], specs: dict[str, ShardSpec], *, is_given_away: bool
    ) -> None:
        self._groups = groups
        self._specs = specs
        self._plain = {
            member.fqns[0]: member.param
            for group in groups
            for member in group.members
            if member.handle is None
        }
        self._is_given_away = is_given_away
        self.states: States = {}
        self.options: list[dict[str, Any]] = [{} for _ in groups]

    def take(self, state_dict: Mapping[str, Any], *, is_strict: bool) -> None:
        """Take what concerns the optimizers' parameters; changes no optimizer.

        Raises:
            ValueError: If the dict is none of this kind, or names or shapes do not fit.
        """
        if (
            not isinstance(state_dict, Mapping)
            or not {"state", "param_groups"} <= state_dict.keys()
        ):
            raise ValueError(
                "expected an optimizer state dict by parameter name, with 'state' and "
                f"'param_groups', got {_outline(state_dict)}. get_optimizer_state_dict makes one."
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
        return {key: value for key, value in source.items() if key not in _KEPT_OPTIONS}

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
                if is_alike and not _fits(value, spec, shapes[fqn]):
                    raise ValueError(
                        f"expected the state '{name}' of '{fqn}' to have shape "
                        f"{tuple(shapes[fqn])}, got {tuple(value.shape)}"
                    )
                is_alike |= value.shape == shapes[fqn] and name not in scalars
                if is_alike and spec is not None:
                    state[name] = _Whole(value)

    def _is_scattered(self, fqn: str, value: Any) -> bool:
        """Return whether a value must be gathered before this rank can take its part."""
        if isinstance(value, _Whole):
            return needs_gather(value.tensor, self._specs[fqn])
        is_plain = not isinstance(self._plain.get(fqn), DTensor)
        return is_plain and isinstance(value, FlatShard | DTensor)

    def cut(self, ranks: ModelRanks) -> None:
        """Cut what has a parameter's shape like the parameter.

        Raises:
            RuntimeError: On all ranks alike, if they gave values that lie in different ways.
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
                f"the ranks gave optimizer state that lies on them in different ways: {odd}. Load "
                "the same kind of state dict on every rank."
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
                    state[name] = self._shard_of(value.tensor, self._specs[fqn], own)
                elif self._is_scattered(fqn, value):
                    state[name] = value.full_tensor()
                elif isinstance(value, Tensor):
                    state[name] = value if value is own else self._owned(value)

    def _shard_of(self, value: Tensor, spec: ShardSpec, own: object) -> Tensor:
        if value is own:
            return value  # its own, as torch.distributed.checkpoint has filled it
        return FlatShard(self._owned(slice_given(value, spec)), spec)

    def _owned(self, value: Tensor) -> Tensor:
        return value if self._is_given_away else value.clone()

    def spread(self, ranks: ModelRanks) -> None:
        """Give every rank its part of what the first rank has taken, a handle at a time."""
        mine: Any = None
        with ranks.agreed():
            if ranks.is_first:
                self._check_is_whole()
                mine = [[encode_options(o) for o in self.options], self._describe()]
        messages = [message for message in ranks.all_messages(mine) if message is not None]
        options, told = messages[0]
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
                shard = scatter_full(handle, given, indices, dtype, meshes=ranks.meshes)
                for index in indices:
                    entry = handle.entries[index]
                    piece = handle.slice_of(entry, shard).clone()
                    states[names[index]][key] = FlatShard(piece, entry.spec)
        self.states = states

    def _check_is_whole(self) -> None:
        for fqn, state in self.states.items():
            for name, value in state.items():
                tensor = value.tensor if isinstance(value, _Whole) else value
                if isinstance(tensor, FlatShard | DTensor):
                    raise ValueError(
                        f"expected the state '{name}' of '{fqn}' to be a whole plain tensor, got a "
                        f"{type(tensor).__name__}, which the first rank has only a part of. Pass "
                        "StateDictOptions() and give every rank its part."
                    )

    def _send(self, ranks: ModelRanks, fqn: str, name: str, what: dict[str, Any]) -> Any:
        value = decode(what)
        if what["kind"] != "tensor" or "bytes" in what:
            return value
        if ranks.is_first:
            value.copy_(self.states[fqn][name])
        return ranks.broadcast(value)

    def _describe(self) -> dict[str, dict[str, Any]]:
        return {
            fqn: {
                name: {"kind": "shard", "dtype": str(value.tensor.dtype).removeprefix("torch.")}
                if isinstance(value, _Whole)
                else describe(value)
                for name, value in state.items()
            }
            for fqn, state in self.states.items()
        }


def _fits(value: Tensor, spec: ShardSpec | None, shape: torch.Size) -> bool:
    return value.shape == shape if spec is None else has_fitting_shape(value, spec)


class _Whole:
    """A tensor of a parameter's shape, in any form, which is to be cut like the parameter."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def encode_options(options: dict[str, Any]) -> dict[str, Any]:
    return {key: encode(value) for key, value in options.items()}


def _outline(found: Any) -> str:
    if isinstance(found, Mapping):
        return f"a dict with the keys {list(found)[:5]}"
    return f"a {type(found).__name__}"
