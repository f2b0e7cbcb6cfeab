"""Load optimizer state of any form by parameter name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable_shard.optim import find_scalar_keys
from composable_shard.options import StateDictOptions
from composable_shard.state_dict.gathering import scatter_full
from composable_shard.state_dict.model_tensors import ModelRanks
from composable_shard.state_dict.optimizer_groups import (
    Group,
    Optimizers,
    States,
    as_list,
    group_kinds,
    names_by_handle,
    view_optimizers,
)
from composable_shard.tensor import (
    FlatShard,
    cloned,
    has_fitting_shape,
    is_owned_by_other_rank,
    needs_gather,
    slice_given,
)
from composable_shard.torch_private import (
    is_traceable_wrapper_subclass,
    load_hooks_of,
)


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load optimizer state by parameter name; call it on all ranks.

    The state may come from any layout, world size or plain model, and the optimizers may have none
    yet. Values are whole or sharded in any way. The optimizers' own `load_state_dict` loads them,
    with its casts and hooks. Options of groups (`lr`, ...) come from the saved group with the same
    parameters. State that is not in the dict is dropped. With `broadcast_from_rank0` only the first
    rank passes a dict, of whole tensors.

    Args:
        model: The model that the optimizers were built for.
        optimizers: One or several.
        optim_state_dict: From `get_optimizer_state_dict`, of any run, or from torch's function of
            that name.
        options: Only `strict` and `broadcast_from_rank0` count.

    Raises:
        ValueError: On all ranks, if state is missing, unexpected or wrongly shaped on any rank,
            naming it; no optimizer has been changed then.
    """
    options = StateDictOptions.of(options)
    ModelRanks(model).check_all_broadcast(options.broadcast_from_rank0)
    with torch.no_grad():
        prepare_load(model, as_list(optimizers), optim_state_dict, options)()


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

    def load() -> None:
        for handle in ranks.handles:
            handle.fix_owners()  # a rank that has a parameter has its state
        for optimizer in optimizers:
            _load(optimizer, groups, given)

    return load


def cut_state(model: nn.Module, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> States:
    """Return the state in a dict by name, cut as the optimizer's parameters are."""
    ranks = ModelRanks(model)
    with ranks.agreed():
        given = _Given(view_optimizers(model, [optimizer]), is_given_away=False)
        given.take(state_dict, is_strict=False)
    given.cut(ranks)
    return given.states


def keeps_tensors(optimizer: Optimizer) -> bool:
    """Return whether torch's own code alone loads state, so that it may be filled afterwards."""
    methods = optimizer.load_state_dict, optimizer.__setstate__
    is_torchs = all(method.__module__.startswith("torch.optim.") for method in methods)
    return is_torchs and not any(load_hooks_of(optimizer))


def _load(optimizer: Optimizer, groups: list[Group], given: _Given) -> None:
    """Load through the optimizer's own method, which casts, moves and runs hooks."""
    param_groups: list[dict[str, Any]] = []
    state: dict[int, dict[str, Any]] = {}
    count = 0
    for group, values in zip(groups, given.options, strict=True):
        if group.optimizer is not optimizer:
            continue
        numbers = list(range(count, count + len(group.members)))
        count += len(numbers)
        for number, member in zip(numbers, group.members, strict=True):
            if given.states.get(member.fqn) and not is_owned_by_other_rank(member.param):
                state[number] = given.states[member.fqn]
        param_groups.append({**group.options, **values, "params": numbers})
    optimizer.load_state_dict({"state": state, "param_groups": param_groups})


class _Given:
    """The state to load."""

    def __init__(self, groups: list[Group], *, is_given_away: bool) -> None:
        members = [member for group in groups for member in group.members]
        self._groups = groups
        self._specs = {m.fqn: m.managed.entry.spec for m in members if m.managed is not None}
        self._plain = {m.fqn: m.param for m in members if m.managed is None}
        self._is_given_away = is_given_away
        # By parameter name. State of a parameter's shape has the form in which it was given until
        # `cut` or `spread` makes FlatShards of it.
        self.states: States = {}
        self.options: list[dict[str, Any]] = [{} for _ in groups]  # new options of each group

    def take(self, state_dict: Mapping[str, Any], *, is_strict: bool) -> None:
        """Take the state of the optimizers' parameters; changes no optimizer."""
        keys = list(state_dict) if isinstance(state_dict, Mapping) else []
        if not {"state", "param_groups"}.issubset(keys):
            raise ValueError(
                "expected an optimizer state dict by parameter name, with 'state' and "
                f"'param_groups', got a {type(state_dict).__name__} with the keys {keys[:5]}. "
                "get_optimizer_state_dict makes one, torch's too unless "
                "flatten_optimizer_state_dict=True. If only the first rank has it, pass "
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
                f"the optimizers and the state dict have different parameters: missing {missing}, "
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
        """Cut state of a parameter's shape like the parameter."""
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
            member.fqn: group.optimizer.state.get(member.param, {})
            for group in self._groups
            for member in group.members
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

        def describe() -> list[Any]:
            self._check_is_whole()
            # A dtype stands for state that is cut like its parameter; the values follow below.
            rest = {
                fqn: {k: v.tensor.dtype if isinstance(v, _Whole) else v for k, v in state.items()}
                for fqn, state in self.states.items()
            }
            return [self.options, rest]

        self.options, states = ranks.value_from_first(describe)
        dtypes = {
            fqn: {k: v for k, v in state.items() if isinstance(v, torch.dtype)}
            for fqn, state in states.items()
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


def _quantised_as(own: Any, local: Tensor) -> Tensor:
    """Return values in the form of the optimizer's own state, which may be quantised."""
    like = own._local if isinstance(own, FlatShard) else local
    is_same = type(like) is type(local) or not is_traceable_wrapper_subclass(like)
    return local if is_same else cloned(like).copy_(local)


def _moved_to(own: Any, value: Any) -> Any:
    """Return an option on the device of the optimizer's own option, if both are tensors."""
    is_tensor = isinstance(own, Tensor) and isinstance(value, Tensor)
    return value.to(own.device) if is_tensor else value


class _Whole(NamedTuple):
    """A tensor of a parameter's shape, in any form, to be cut like the parameter."""

    tensor: Tensor
