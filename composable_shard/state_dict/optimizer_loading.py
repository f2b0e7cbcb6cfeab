"""Load optimizer state of any form by parameter name."""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composable_shard.dtensors import is_dtensor
from composable_shard.optim import find_scalar_keys, made_state
from composable_shard.options import StateDictOptions
from composable_shard.state_dict.gathering import scatter_full
from composable_shard.state_dict.model_tensors import ModelRanks, canonical
from composable_shard.state_dict.nested_state import (
    REST,
    Cuts,
    flatten,
    flatten_rest,
    is_kept_by_all,
    own_entries,
    shown_name,
    unflatten_rest,
)
from composable_shard.state_dict.optimizer_groups import (
    Group,
    Member,
    Optimizers,
    States,
    as_list,
    group_kinds,
    names_by_handle,
    view_optimizers,
)
from composable_shard.state_dict.state_objects import (
    missing_objects,
    stands_for_objects,
    with_objects,
)
from composable_shard.tensor import (
    FlatShard,
    cloned,
    has_fitting_shape,
    is_distributed,
    is_owned_by_other_rank,
    local_part,
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
            that name; or a plain `optimizer.state_dict()`, of DDP too, of an optimizer whose
            groups have the same parameters in the same order.
        options: Only `strict` and `broadcast_from_rank0` count.

    Raises:
        ValueError: On all ranks, if state is missing, unexpected or wrongly shaped on any rank,
            naming it; no optimizer has been changed then.
    """
    options = StateDictOptions.of(options)
    ModelRanks(model).check_all_broadcast(options.broadcast_from_rank0)
    with torch.no_grad():
        prepare_load(model, as_list(optimizers), optim_state_dict, options)()


# State of parameters, state under other keys, and entries of the state dict beside the state
_Loaded = tuple[States, dict[Any, Any], dict[str, Any]]
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
    with ranks.agreed():
        nested = [given.unflatten(optimizer) for optimizer in optimizers]
    held = [given.hold_objects(ranks, *pair) for pair in zip(optimizers, nested, strict=True)]

    def load() -> None:
        for handle in ranks.handles:
            handle.fix_owners()  # a rank that has a parameter has its state
        for optimizer, states, objects in zip(optimizers, nested, held, strict=True):
            _load(optimizer, groups, given.options, with_objects(states, objects))

    return load


def cut_state(model: nn.Module, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> States:
    """Return the state in a dict by name, cut as the optimizer's parameters are."""
    ranks = ModelRanks(model)
    with ranks.agreed():
        given = _Given(view_optimizers(model, [optimizer]), is_given_away=False)
        given.take(state_dict, is_strict=False)
    given.cut(ranks)
    states = given.unflatten(optimizer)
    nested, other, _ = with_objects(states, given.hold_objects(ranks, optimizer, states))
    return {**nested, **other}


def keeps_tensors(optimizer: Optimizer) -> bool:
    """Return whether torch's own code alone loads state, so that it may be filled afterwards."""
    methods = optimizer.load_state_dict, optimizer.state_dict, optimizer.__setstate__
    is_torchs = all(method.__module__.startswith("torch.optim.") for method in methods)
    return is_torchs and not any(load_hooks_of(optimizer))


def _load(
    optimizer: Optimizer,
    groups: list[Group],
    options: list[dict[str, Any]],
    states: _Loaded,
) -> None:
    """Load through the optimizer's own method, which casts, moves and runs hooks."""
    param_groups: list[dict[str, Any]] = []
    nested, other, entries = states
    state: dict[Any, Any] = {}
    members = [m for group in groups if group.optimizer is optimizer for m in group.members]
    takers = {member.fqn for member in _takers(members, nested)}
    count = 0
    for group, values in zip(groups, options, strict=True):
        if group.optimizer is not optimizer:
            continue
        numbers = list(range(count, count + len(group.members)))
        count += len(numbers)
        for number, member in zip(numbers, group.members, strict=True):
            if nested.get(member.fqn) and member.fqn in takers:
                state[number] = nested[member.fqn]
        param_groups.append({**group.options, **values, "params": numbers})
    if entries and "state" not in own_entries(optimizer):  # it wraps another one
        optimizer.load_state_dict({**entries})
        return
    state |= other
    optimizer.load_state_dict({"state": state, "param_groups": param_groups, **entries})
    is_torchs = type(optimizer).step.__module__.startswith("torch.optim.")
    for number, member in enumerate(members):
        loaded, wanted = optimizer.state.get(member.param, {}), state.get(number, {})
        for name in loaded.keys() & wanted.keys():
            loaded[name] = _as_saved(loaded[name], wanted[name], is_cast=not is_torchs)


def _takers(members: Iterable[Member], nested: States) -> list[Member]:
    """Return the parameters of which this rank has state."""
    members = list(members)
    is_everyones = is_kept_by_all(len(nested), len(members))
    return [m for m in members if is_everyones or not is_owned_by_other_rank(m.param)]


def _held_state(optimizer: Optimizer, members: Iterable[Member]) -> _Loaded:
    """Return the state that an optimizer has now, in the form of state to load."""
    own = {member.fqn: optimizer.state.get(member.param, {}) for member in members}
    other = {k: v for k, v in optimizer.state.items() if not isinstance(k, Tensor)}
    return own, other, {**own_entries(optimizer)}


def _as_saved(found: Any, saved: Any, *, is_cast: bool) -> Any:
    """Return a loaded value as it was saved, where `Optimizer.load_state_dict` has changed it.

    It makes deques without their limit, and texts of generators. It casts to the parameter's dtype,
    which is that of state in torch's optimizers alone: with `is_cast`, the saved dtype comes back.
    Values that the optimizer has changed in its own way stay.
    """
    if type(found) is not type(saved):
        return found
    if isinstance(saved, str):
        return saved if found.startswith("<generator object") else found
    if isinstance(saved, dict):
        for key in found.keys() & saved.keys():
            found[key] = _as_saved(found[key], saved[key], is_cast=is_cast)
    # By exact class: a named tuple takes its items one by one, and is left as it was loaded.
    elif type(saved) in (list, tuple, deque) and len(found) == len(saved):
        pairs = zip(found, saved, strict=True)
        items = [_as_saved(one, two, is_cast=is_cast) for one, two in pairs]
        return deque(items, saved.maxlen) if isinstance(saved, deque) else type(saved)(items)
    elif is_cast and isinstance(saved, Tensor):
        return _with_dtype(found, saved)
    return found


def _with_dtype(found: Tensor, saved: Tensor) -> Tensor:
    """Return the saved values on the loaded tensor's device, if a cast alone has changed them."""
    if found.dtype != saved.dtype and found.shape == saved.shape:
        cast = saved.to(device=found.device)
        one, two = local_part(cast.to(found.dtype)), local_part(found)
        if one.shape == two.shape and torch.equal(one, two):
            return cast
    return found


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
        self._has_objects = False  # on any rank. [Note: Objects in state]

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
        if numbers := self._names_by_number(state_dict):
            state_dict = _renamed(state_dict, numbers)
        saved = state_dict["param_groups"]
        homes = {fqn: number for number, group in enumerate(saved) for fqn in group["params"]}
        wanted = [fqn for group in self._groups for fqn in group.fqns]
        missing = [fqn for fqn in wanted if fqn not in homes]
        known = set(wanted)
        # A key that has no dots, and is no parameter, is state that belongs to none.
        names = [*homes, *(key for key in state_dict["state"] if "." in str(key))]
        extra = [fqn for fqn in dict.fromkeys(names) if fqn not in known]
        if is_strict and (missing or extra):
            raise ValueError(
                f"the optimizers and the state dict have different parameters: missing {missing}, "
                f"unexpected {extra}. Pass StateDictOptions(strict=False) to ignore this."
            )
        self.options = [self._options_of(i, homes, saved) for i in range(len(self._groups))]
        cuts = Cuts(self._specs, takes_others=True)
        self.states = cuts.place(
            {
                fqn: flatten(state_dict["state"][fqn], fqn, cuts)
                for fqn in wanted
                if state_dict["state"].get(fqn)
            }
        )
        other = {
            key: value
            for key, value in state_dict["state"].items()
            if key not in homes and "." not in str(key)
        }
        entries = {k: v for k, v in state_dict.items() if k not in ("state", "param_groups")}
        for fqn, state in flatten_rest(other, entries, cuts).items():
            self.states.setdefault(fqn, {}).update(state)
        self._check_shapes()

    def _names_by_number(self, state_dict: Mapping[str, Any]) -> dict[Any, str]:
        """Return FQNs by the numbers, or other names, of a plain `optimizer.state_dict()`.

        DDP puts `module.` before names. Empty if the names are these optimizers' already.
        """
        saved = state_dict["param_groups"]
        keys = [key for group in saved for key in group["params"]]
        known = {fqn for group in self._groups for fqn in group.fqns}
        if not any(isinstance(key, int) for key in keys):
            names = {key: key.removeprefix("module.") for key in keys if isinstance(key, str)}
            has_prefix = any(name in known and key not in known for key, name in names.items())
            self._check_has_some(names.values(), known)
            return names if has_prefix else {}
        given = [(len(g["params"]), g.get("param_names")) for g in saved]
        if all(names is not None and len(names) == number for number, names in given):
            pairs = [
                pair for g in saved for pair in zip(g["param_names"], g["params"], strict=True)
            ]
            found = {number: canonical(name.removeprefix("module.")) for name, number in pairs}
            self._check_has_some(found.values(), known)
            return found
        own = [[member.fqn for member in group.members] for group in self._groups]
        if [len(fqns) for fqns in own] != [number for number, _ in given]:
            raise ValueError(
                f"expected {[len(fqns) for fqns in own]} parameters in the groups of an optimizer "
                f"state dict by number, got {[number for number, _ in given]}. Build the optimizer "
                "as the one that was saved, or pass a dict of get_optimizer_state_dict."
            )
        numbers = (key for group in saved for key in group["params"])
        return dict(zip(numbers, (fqn for fqns in own for fqn in fqns), strict=True))

    def _check_has_some(self, names: Iterable[str], known: Collection[str]) -> None:
        names = [*names]
        if names and known and not set(known).intersection(names):
            warnings.warn(
                f"no parameter of the optimizer state dict is one of the optimizer: it has "
                f"{sorted(names)[:3]}, and the optimizer has {sorted(known)[:3]}. No state is "
                "loaded. Rename the keys of the dict.",
                UserWarning,
                stacklevel=2,
            )

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
            if fqn != REST
            for name, value in state.items()
            if isinstance(value, Tensor)
        ]
        scalars = find_scalar_keys(tensors)
        alike = Counter(name for name, shape, wanted in tensors if shape == wanted)
        # Square parameters may have state of their shape by chance.
        all_names = Counter(name for name, _, _ in tensors)
        elementwise = {name for name, number in alike.items() if 2 * number > all_names[name]}
        for fqn, state in self.states.items():
            spec = self._specs.get(fqn)
            for name, value in state.items():
                if not isinstance(value, Tensor) or fqn == REST:
                    continue
                is_alike = is_distributed(value)
                # Prodigy has one number for a parameter of zeros.
                is_alike |= name in elementwise and value.dim() > 0
                fits = has_fitting_shape(value, spec) if spec else value.shape == shapes[fqn]
                if is_alike and not fits:
                    raise ValueError(
                        f"expected the state {shown_name(name, fqn)} of '{fqn}' to have shape "
                        f"{tuple(shapes[fqn])}, got {tuple(value.shape)}"
                    )
                is_alike |= value.shape == shapes[fqn] and name not in scalars
                if is_alike and spec is not None:
                    state[name] = _Whole(value)

    def _is_scattered(self, fqn: str, value: Any) -> bool:
        """Return whether a value must be gathered before this rank can cut it."""
        if isinstance(value, _Whole):
            return needs_gather(value.tensor, self._specs[fqn])
        is_plain = not is_dtensor(self._plain.get(fqn))
        return is_plain and is_distributed(value)

    def cut(self, ranks: ModelRanks) -> None:
        """Cut state of a parameter's shape like the parameter."""
        gathered = [
            f"{fqn}.{name}"
            for fqn, state in self.states.items()
            for name, value in state.items()
            if self._is_scattered(fqn, value)
        ]
        has_objects = any(map(stands_for_objects, self.states.values()))
        told = ranks.all_messages([gathered, has_objects])
        self._has_objects = any(each[1] for each in told)
        if any(each[0] != gathered for each in told):
            odd = sorted({name for names, _ in told for name in names})
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
                own = current.get(fqn, {}).get(name)
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

    def unflatten(self, optimizer: Optimizer) -> _Loaded:
        """Return the state of parameters, of other keys, and the entries beside the state."""
        fqns = {fqn for group in self._groups if group.optimizer is optimizer for fqn in group.fqns}
        found = unflatten_rest(self.states)
        return {fqn: state for fqn, state in found[0].items() if fqn in fqns}, *found[1:]

    def hold_objects(self, ranks: ModelRanks, optimizer: Optimizer, states: _Loaded) -> list[Any]:
        """Return states, in the form of `states`, that have the objects which are to take theirs.

        [Note: Objects in state] The step that makes them is one of all ranks.

        Raises:
            ValueError: On all ranks, if there is no such object on one, naming its state.
        """
        if not self._has_objects:
            return []
        members = [m for g in self._groups if g.optimizer is optimizer for m in g.members]
        takers = _takers(members, states[0])
        wanted = {m.fqn: states[0].get(m.fqn, {}) for m in takers}, *states[1:]
        held = [_held_state(optimizer, takers)]
        is_made = any(ranks.all_messages(bool(missing_objects(wanted, held))))
        with ranks.agreed(), made_state(optimizer) if is_made else nullcontext():
            held.append(_held_state(optimizer, takers))
        with ranks.agreed():
            if missing := missing_objects(wanted, held):
                raise ValueError(
                    f"expected an optimizer whose state has a {missing[0]}, whose state is to be "
                    f"loaded, and a first step of this {type(optimizer).__name__} makes none "
                    "there. Build the optimizer that was saved, or take a step first."
                )
        return held

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
        self._has_objects = any(map(stands_for_objects, states.values()))

    def _check_is_whole(self) -> None:
        for fqn, state in self.states.items():
            for name, value in state.items():
                tensor = value.tensor if isinstance(value, _Whole) else value
                if is_distributed(tensor):
                    raise ValueError(
                        f"expected the state {shown_name(name, fqn)} of '{fqn}' to be a whole "
                        f"plain tensor, got a {type(tensor).__name__}, whose shards other ranks "
                        "hold. Pass StateDictOptions() and give every rank its shard."
                    )


def _renamed(state_dict: Mapping[str, Any], names: Mapping[Any, str]) -> dict[str, Any]:
    """Return an optimizer state dict by other names."""
    groups = [
        {**group, "params": [names.get(key, key) for key in group["params"]]}
        for group in state_dict["param_groups"]
    ]
    state = {names.get(key, key): value for key, value in state_dict["state"].items()}
    return {**state_dict, "state": state, "param_groups": groups}


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
