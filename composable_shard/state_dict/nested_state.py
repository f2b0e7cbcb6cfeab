"""Optimizer state in containers, and state that belongs to no parameter, as flat dicts.

[Note: Flat state]
State of a parameter is gathered, cut and sent value by value. So a value that is a list, a dict or
another container is flattened: its own name stands for the container, as `json_tree` encodes it,
and each tensor in it has a name of its own, which no optimizer uses because it begins with "\\0".

A shard that is cut as another parameter is (of a vector in parts, each part) stands with the state
of that parameter, as one of its shape.

A dict stands for an object with a `state_dict`. [Note: Objects in state]

State under other keys than parameters, and entries of `optimizer.state_dict()` beside "state" and
"param_groups", form the rest. It is flattened in the same way, under the name `REST` in the place
of a parameter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from composable_shard.state_dict import json_tree
from composable_shard.state_dict.first_step import try_first_step
from composable_shard.state_dict.optimizer_groups import Group, Member, States
from composable_shard.state_dict.state_objects import named_tuples_in, told
from composable_shard.tensor import (
    FlatShard,
    ShardSpec,
    is_owned_by_other_rank,
    parts_of,
    wrap,
)

REST = "\0"
_STATE, _ENTRY = "state", "entry"  # of the rest: under other keys of the state, or beside it
_LEAVES = (Tensor, bool, int, float, str, type(None))
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, bytes, bytearray)


class Cuts:
    """The parameters that shards may be cut like.

    Args:
        specs: By FQN.
        takes_others: Whether state may be sharded in the way of another run.
    """

    def __init__(self, specs: Mapping[str, ShardSpec], *, takes_others: bool = False) -> None:
        self.specs = specs
        self._takes_others = takes_others

    @cached_property
    def _fqns(self) -> dict[ShardSpec, str]:
        return {spec: fqn for fqn, spec in self.specs.items()}

    @cached_property
    def _by_range(self) -> dict[tuple[Any, ...], str]:
        ranges = ((_range_of(spec), fqn) for fqn, spec in self.specs.items())
        return {key: fqn for key, fqn in ranges if key is not None}

    def find(self, shard: FlatShard, own: str | None = None) -> str | None:
        """Return the FQN of a parameter whose elements, and no others, a shard has; `own` first."""
        spec = shard._shard_spec
        if own is not None and own in self.specs and _are_cut_alike(spec, self.specs[own]):
            return own
        key = _range_of(spec)
        return self._fqns.get(spec) or (None if key is None else self._by_range.get(key))

    def is_own(self, value: object, fqn: str) -> bool:
        """Return whether state of a parameter is no shard, or is cut as the parameter itself."""
        if not isinstance(value, FlatShard):
            return True
        spec = self.specs.get(fqn)
        if value._shard_spec is spec:  # of most
            return True
        if len(parts_of(value)) > 1:
            return False
        if spec is None:  # a plain parameter, which takes whole values
            return self._takes_others and fqn != REST
        found = self.find(value, fqn)
        is_other = found is None and self._takes_others
        return (found == fqn and value.shape == spec.shape) or is_other

    def others(self, state: Mapping[Any, Any], fqn: str) -> set[Any]:
        """Return the names of those values of a parameter's state that are not its own."""
        spec = self.specs.get(fqn)
        shards = [(k, v) for k, v in state.items() if isinstance(v, FlatShard)]
        return {k for k, v in shards if v._shard_spec is not spec and not self.is_own(v, fqn)}

    def place(self, states: States) -> States:
        """Move the shards in flat state to the parameters that they are cut like.

        Raises:
            NotImplementedError: For a shard of other elements than a parameter's, naming it.
        """
        placed: States = {fqn: {} for fqn in states}
        for fqn, state in states.items():
            others = self.others(state, fqn)
            for name, value in state.items():
                if name not in others:
                    placed[fqn][name] = value
                    continue
                home = self.find(value, fqn)
                if home is None:
                    raise NotImplementedError(
                        f"the optimizer state {shown_name(name, fqn)} of '{fqn}' is a shard of "
                        f"'{value._shard_spec.label}' that is cut as no parameter of the optimizer "
                        "is, so that no other run could cut it. Keep full_tensor() of it."
                    )
                key = f"{REST}{name}{REST}{','.join(map(str, value.shape))}"
                placed.setdefault(home, {})[key] = wrap(value._local, self.specs[home])
        return placed


def shown_name(name: str, fqn: str) -> str:
    """Return the name of a parameter's flat state as errors say it."""
    return repr(name.strip(REST).partition(REST)[0].removeprefix(f"{fqn}/").strip("/"))


def is_kept_by_all(num_with_state: int, num_params: int) -> bool:
    """Return whether one parameter's state is that of all parameters, as LBFGS's is.

    Of a parameter that one rank owns whole, other ranks then have this state too.
    """
    return num_with_state == 1 and num_params > 1


def _are_cut_alike(one: ShardSpec, two: ShardSpec) -> bool:
    if one == two:
        return True
    shapes = [(each.shape, each.dense_stride, each.tensor_parallel) for each in (one, two)]
    return shapes[0] == shapes[1] and one.numels == two.numels


def _range_of(spec: ShardSpec) -> tuple[Any, ...] | None:
    """Return what is equal for shards of the same elements in different shapes."""
    if spec.tensor_parallel is not None or spec.wrapper[1] is not None or spec.index is None:
        return None
    part = spec.layout, spec.index, spec.start, spec.numel, spec.num_components
    return *part, spec.rank, spec.group_name, spec.is_split


def flatten(state: Mapping[Any, Any], label: str, cuts: Cuts) -> dict[str, Any]:
    """Return state with each container encoded, and the tensors in it by name. [Note: Flat state]

    Raises:
        NotImplementedError: For a value of another class, a named tuple too, naming it.
    """
    flat: dict[str, Any] = {}
    odd: dict[Any, Any] = {}
    others = cuts.others(state, label)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            value = told(value)
            for each in named_tuples_in(value):
                raise NotImplementedError(_problem(name, label, each))
        is_leaf = isinstance(name, str) and isinstance(value, _LEAVES)
        if is_leaf and name not in others:
            flat[name] = value
        else:
            odd[name] = value
    # After the plain values, whose names stay: those of encoded ones begin with `REST`.
    path = REST + (label if label in cuts.specs else "")
    for name, value in odd.items():
        tensors: dict[str, Tensor] = {}
        if not isinstance(value, (*_LEAVES, *_CONTAINERS)):
            raise NotImplementedError(_problem(name, label, value))
        try:
            encoded = json_tree.encode({name: value}, path, tensors)
        except ValueError as error:
            raise NotImplementedError(f"{_problem(name, label, value)} {error}") from error
        flat[f"{REST}{name!r}"] = encoded
        flat |= tensors
    return flat


def _problem(name: object, label: str, value: object) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return (
        f"the optimizer state {name!r} of '{label}' is a {kind}, and no save can hold it: only "
        "tensors, numbers, strings, bytes, None, objects with state_dict() and load_state_dict(), "
        "and dicts, lists, tuples, sets and deques of them can be saved. Choose options of the "
        "optimizer that make no such state, or save the parameters alone: "
        "save_checkpoint(path, model, step=step)."
    )


def unflatten(flat: Mapping[str, Any], tensors: Mapping[str, Any] | None = None) -> dict[Any, Any]:
    """Return the state that `flatten` has flattened; `tensors` are those of the rest's shards."""
    state: dict[Any, Any] = {}
    found = {**flat, **(tensors or {})}
    for name, value in flat.items():
        if not name.startswith(REST):
            state[name] = value
        # Another rank has the large tensors of a parameter that it owns whole.
        elif isinstance(value, dict) and found.keys() >= {*json_tree.tensor_names(value)}:
            state |= json_tree.decode(value, found.__getitem__)
    return state


def flatten_rest(other: Mapping[Any, Any], entries: Mapping[str, Any], cuts: Cuts) -> States:
    """Return the rest, flat, and the shards in it by the FQN of the parameter they are cut like.

    Args:
        other: State under keys that are no parameters.
        entries: What `optimizer.state_dict()` has beside "state" and "param_groups".
        cuts: The optimizer's parameters.
    """
    if not other and not entries:
        return {}
    flat = flatten({_STATE: {**other}, _ENTRY: {**entries}}, "all parameters", cuts)
    return cuts.place({REST: flat})


def unflatten_rest(states: States) -> tuple[States, dict[Any, Any], dict[str, Any]]:
    """Return the state of parameters, the state under other keys, and the entries beside it."""
    shards: dict[str, Any] = {}
    for state in states.values():
        for key, value in state.items():
            if key.startswith(REST + REST):
                name, _, shape = key[1:].rpartition(REST)
                shards[name] = value.reshape([int(size) for size in shape.split(",") if size])
    nested = {
        fqn: unflatten({k: v for k, v in state.items() if not k.startswith(REST + REST)}, shards)
        for fqn, state in states.items()
        if fqn != REST
    }
    rest = unflatten(states.get(REST, {}), shards)
    return {k: v for k, v in nested.items() if v}, rest.get(_STATE, {}), rest.get(_ENTRY, {})


def read_states(groups: Iterable[Group]) -> States:
    """Return the state of optimizers, flat, as their own `state_dict()` returns it.

    Without state of a parameter that another rank owns whole: no step updates Adagrad's state here.
    """
    groups = list(groups)
    found: States = {}
    managed = (m for group in groups for m in group.members if m.managed is not None)
    cuts = Cuts({m.fqn: m.managed.entry.spec for m in managed if m.managed is not None})
    for optimizer in dict.fromkeys(group.optimizer for group in groups):
        members = [m for group in groups if group.optimizer is optimizer for m in group.members]
        own, other, entries = _split(optimizer, members)
        is_everyones = is_kept_by_all(sum(map(bool, own.values())), len(own))
        flat = {
            member.fqn: flatten(own[member.fqn], member.fqn, cuts)
            for member in members
            if is_everyones or not is_owned_by_other_rank(member.param)
        }
        for states in (cuts.place(flat), flatten_rest(other, entries, cuts)):
            for name, state in states.items():
                if name == REST and name in found:
                    raise ValueError(
                        "several optimizers have state that belongs to no parameter, and one state "
                        "dict can't hold it by name. Get the state of each optimizer by itself."
                    )
                found.setdefault(name, {}).update(state)
    return found


def own_entries(optimizer: Optimizer) -> Mapping[str, Any]:
    """Return `optimizer.state_dict()`."""
    known = {id(param) for group in optimizer.param_groups for param in group["params"]}
    # Reading `optimizer.state[param]` makes an empty entry, which torch's method can't name.
    for key in [k for k, v in optimizer.state.items() if isinstance(k, Tensor) and not v]:
        if id(key) not in known:
            del optimizer.state[key]
    state: Mapping[str, Any] = optimizer.state_dict()
    return state


def why_unsaved(optimizer: Optimizer) -> str:
    """Return why no save can hold the state of an optimizer, or whether that is not known.

    Empty if one can. Before the first step: what a trial makes. [Note: Trial step]
    """
    states: Mapping[Any, Any] = optimizer.state
    if not states and not type(optimizer).step.__module__.startswith("torch.optim."):
        kind = type(optimizer).__name__
        try:
            states = try_first_step(optimizer)
        except Exception as error:  # of any kind: the code is the program's
            return (
                f"whether a save can hold the state of {kind} is not known before its first step, "
                f"which was tried on small plain parameters: {type(error).__name__}: {error}. "
                "Take one step, and describe again."
            )
    cuts = Cuts({}, takes_others=True)
    for key, state in states.items():
        label = str(key._shard_spec.label) if isinstance(key, FlatShard) else "all parameters"
        try:
            flatten(state if isinstance(state, dict) else {key: state}, label, cuts)
        except NotImplementedError as error:
            return str(error)
    return ""


def _split(
    optimizer: Optimizer, members: list[Member]
) -> tuple[States, dict[Any, Any], dict[str, Any]]:
    """Return an optimizer's state by FQN, under other keys, and its entries beside the state."""
    said = own_entries(optimizer)
    entries = {key: value for key, value in said.items() if key not in ("state", "param_groups")}
    own: States = {member.fqn: {} for member in members}
    if "state" not in said:  # a class that wraps an optimizer, and has it among its entries
        return own, {}, entries
    numbers = [number for group in said["param_groups"] for number in group["params"]]
    fqns = {number: m.fqn for number, m in zip(numbers, members, strict=True)}
    other: dict[Any, Any] = {}
    for key, value in said["state"].items():
        if key in fqns:
            own[fqns[key]] = value
        elif isinstance(key, str):
            other[key] = value
        elif value:
            raise NotImplementedError(
                f"the optimizer has state under {key!r}, which is neither a parameter of its "
                "groups nor a text: no other run could find it. Save the parameters alone, or key "
                "the state by parameters."
            )
    return own, other, entries
