"""Optimizers by parameter name: their groups and their state, and how any form of it is loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable_shard.comm import HOST, all_bytes
from composable_shard.flat_param import FlatParamHandle
from composable_shard.optim import find_scalar_keys
from composable_shard.options import StateDictOptions
from composable_shard.state_dict.full_values import Shares, copied, gather_full, scatter_full
from composable_shard.state_dict.model_tensors import (
    ManagedParam,
    ModelRanks,
    by_handle,
    canonical,
    params_by_fqn,
)
from composable_shard.state_dict.packed_values import from_bytes, pack, to_bytes, unpack
from composable_shard.tensor import (
    FlatShard,
    ShardSpec,
    cloned,
    has_fitting_shape,
    is_owned_by_other_rank,
    needs_gather,
    slice_given,
)
from composable_shard.torch_private import is_traceable_wrapper_subclass, load_hooks_of

States = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Member:
    """One parameter of an optimizer."""

    param: Tensor  # the object that the optimizer holds
    fqn: str
    managed: ManagedParam | None = None  # None for a plain parameter


@dataclass(frozen=True)
class Group:
    """One of an optimizer's `param_groups`."""

    optimizer: Optimizer
    options: dict[str, Any]  # everything but its parameters
    members: list[Member]
    fqns: list[str]  # names of its parameters, in the model's order


def view_optimizers(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[Group]:
    """Return the groups of all optimizers, empty ones too, with the parameters' names."""
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
            fqns = [member.fqn for member in found]
            # The optimizer's own order may differ between ranks: `set(params)` has one by address.
            fqns.sort(key=lambda fqn: (order.get(fqn, len(order)), fqn))
            groups.append(Group(optimizer, options, found, fqns))
    return groups


def _members(model: nn.Module) -> dict[int, Member]:
    found = {id(p): Member(p, canonical(name)) for name, p in model.named_parameters()}
    for managed in params_by_fqn(model).values():
        sharded = managed.entry.sharded
        found[id(sharded)] = Member(sharded, managed.names[0], managed)
    return found


def state_of(member: Member, optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state of one parameter.

    Empty for a parameter that another rank owns whole: no step updates Adagrad's state here.
    """
    state = optimizer.state.get(member.param, {})
    if is_owned_by_other_rank(member.param):
        return {}
    for name, value in state.items():
        if not isinstance(value, Tensor | int | float | str | None):
            raise NotImplementedError(
                f"the optimizer state '{name}' of '{member.fqn}' is a {type(value).__name__}, "
                "which belongs to several parameters, like the history of LBFGS. Only tensors and "
                "numbers can be saved by parameter name."
            )
    return dict(state)


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


# Read


def names_by_handle(groups: list[Group]) -> dict[FlatParamHandle, dict[int, str]]:
    """Return the names of the optimizers' managed parameters, by handle and index.

    In an order that is the same on all ranks, which gather and scatter handle by handle.
    """
    managed = {member.fqn: member.managed for group in groups for member in group.members}
    named = ((managed[fqn], fqn) for group in groups for fqn in group.fqns)
    return by_handle((param, fqn) for param, fqn in named if param is not None)


def read_optimizers(
    model: nn.Module, optimizers: Iterable[Optimizer], options: StateDictOptions
) -> dict[str, Any]:
    """Return `{"state": {fqn: {name: value}}, "param_groups": [...]}`; for all ranks together."""
    ranks = ModelRanks(model)
    with ranks.agreed():
        groups = view_optimizers(model, optimizers)
    if options.full_state_dict and options.rank0_only:
        ranks.check_one_is_first()
    with ranks.agreed():
        found = {m.fqn: state_of(m, group.optimizer) for group in groups for m in group.members}
    states = {fqn: found[fqn] for group in groups for fqn in group.fqns if found[fqn]}
    states = _complete(ranks, groups, states, takes_large=options.full_state_dict)
    device = HOST if options.cpu_offload else None
    if options.full_state_dict:
        states = _make_full(ranks, groups, states, device, to_first=options.rank0_only)
        if options.rank0_only and not ranks.is_first:
            return {}
    elif options.cpu_offload:
        states = {
            fqn: {k: v.cpu() if isinstance(v, Tensor) else v for k, v in state.items()}
            for fqn, state in states.items()
        }
    param_groups = [{**copy.deepcopy(group.options), "params": group.fqns} for group in groups]
    return {"state": states, "param_groups": param_groups}


def _complete(
    ranks: ModelRanks, groups: list[Group], states: States, *, takes_large: bool
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
    # A dtype stands for a shard.
    mine = {
        fqn: {k: v.dtype if isinstance(v, FlatShard) else v for k, v in states[fqn].items()}
        for fqn in states.keys() & places.keys()
    }
    with ranks.agreed():
        packed = pack(dict(sorted(mine.items())), {})
    messages = ranks.all_messages(packed)
    if len(messages) == 1:
        return states
    told: list[States] = [unpack(each) for each in messages]
    completed: States = {}
    with ranks.agreed():
        for fqn in [fqn for group in groups for fqn in group.fqns]:
            found = {name: value for each in told for name, value in each.get(fqn, {}).items()}
            found |= states.get(fqn, {})
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
        like = next(each for each in found if each is not None)
        if not isinstance(like, Tensor) or not like.is_meta or None not in found:
            continue  # small, or on every rank
        value = states[fqn][name]
        if takes_large:
            group = places[fqn][0].shard_group
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
            f"the optimizer state '{name}' of '{fqn}' is not on all ranks that hold a shard of the "
            "parameter. Step the optimizer on all ranks."
        )
    memory = torch.empty(0, dtype=dtype, device=handle.local_shard.device)
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
        for (key, dtype), indices in group_kinds(fqns, dtypes).items():
            shard = torch.zeros_like(handle.local_shard, dtype=dtype)
            for index in indices:
                piece = states[fqns[index]][key]._local
                handle.entries[index].slice_of(shard).copy_(piece)
            yield Shares(handle, shard, indices, key)


def group_kinds(
    names: Mapping[int, str], dtypes: Mapping[str, Mapping[str, torch.dtype]]
) -> dict[tuple[str, torch.dtype], list[int]]:
    """Return the indices of a handle's parameters that have each kind of state: (name, dtype).

    From the parameters' names by index, and the dtypes of each one's sharded state by name.
    """
    kinds: dict[tuple[str, torch.dtype], list[int]] = {}
    for index, fqn in names.items():
        for kind in dtypes.get(fqn, {}).items():
            kinds.setdefault(kind, []).append(index)
    return kinds


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
            handle.fix_owners()  # whoever has a parameter has its state
        for optimizer in optimizers:
            _load(optimizer, groups, given)

    return load


def cut_state(model: nn.Module, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> States:
    """Return the state in a dict by name, cut like the optimizer's parameters, as it loads it."""
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
            # A dtype stands for state that is cut like its parameter, and is sent below.
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
