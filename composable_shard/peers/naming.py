"""Give a peer's tensors the names that a model and an optimizer have here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from composable_shard.peers.run import MEMBERS, PeerOptimizer, PeerRun
from composable_shard.peers.tensors import PeerTensor

Rename = Callable[[str], str] | Mapping[str, str]

# Parts of names that wrappers add anywhere.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
_MAX_PREFIXES = 3
# A group's keys that schedulers add to those of its optimizer.
_ADDED = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")


@dataclass(frozen=True)
class OwnGroup:
    """A group of an optimizer here: its parameters' FQNs in its order, and its options."""

    fqns: Sequence[str]
    options: Mapping[str, Any]


def named_as(
    run: PeerRun,
    own: Iterable[str],
    ties: Mapping[str, Sequence[str]],
    optimizers: Mapping[str, Sequence[OwnGroup]],
    rename: Rename | None,
) -> PeerRun:
    """Return a run under the names that are used here.

    Args:
        own: Names in the model's state dict.
        ties: All names of a parameter, by each of them.
        optimizers: Groups of the optimizers that are to be loaded.
        rename: From names in the files to names here. Default: the names without the prefixes of
            wrappers, if that fits better.

    Raises:
        ValueError: If two names become one, or if numbered parameters can't be counted here.
    """
    notes = list(run.notes)
    wanted = set(own)
    change = _function(rename) if rename is not None else _find_change(run.model, wanted, notes)
    model = _renamed(run, change)
    for name in sorted(wanted - model.keys()):
        other = next((each for each in ties.get(name, ()) if each in model), None)
        if other is not None:
            model[name] = model[other]
            notes.append(f"'{name}' is '{other}', one tensor in the model")
    left = list(run.left)
    named = {
        name: _name_optimizer(run, name, optimizers[name], change, ties, left)
        if name in optimizers
        else each
        for name, each in run.optimizers.items()
    }
    return replace(run, model=model, optimizers=named, notes=notes, left=left)


def _function(rename: Rename) -> Callable[[str], str]:
    if not isinstance(rename, Mapping):
        return rename
    mapping = rename
    return lambda name: mapping.get(name, name)


def _renamed(run: PeerRun, change: Callable[[str], str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, value in run.model.items():
        target = change(name)
        if not isinstance(target, str):
            raise ValueError(f"expected rename to return a name for '{name}', got {target!r}")
        if target in found:
            raise ValueError(f"'{name}' and '{sources[target]}' would both be named '{target}'")
        found[target], sources[target] = value, name
    return found


def _find_change(stored: Iterable[str], wanted: set[str], notes: list[str]) -> Callable[[str], str]:
    """Return which prefixes to drop so that most names are the model's; note it."""
    names = list(stored)
    best: tuple[int, str, bool] = (len(wanted.intersection(names)), "", False)
    for drops in (False, True):
        current = [_unwrapped(name) for name in names] if drops else names
        prefix = ""
        for _ in range(_MAX_PREFIXES + 1):
            number = len(wanted.intersection(name.removeprefix(prefix) for name in current))
            # Not `>=`: of equal numbers the smallest change of names stays.
            if number > best[0]:
                best = number, prefix, drops
            more = _common_prefix([name.removeprefix(prefix) for name in current])
            if not more:
                break
            prefix += more
    _, prefix, drops = best
    if drops:
        found = [each for each in _WRAPPERS if any(each in name for name in names)]
        notes.append(f"names without {found}, which wrappers added")
    if prefix:
        notes.append(f"names without the prefix '{prefix}'")
    return lambda name: (_unwrapped(name) if drops else name).removeprefix(prefix)


def _unwrapped(name: str) -> str:
    for each in _WRAPPERS:
        name = name.replace(each, "")
    return name


def _common_prefix(names: list[str]) -> str:
    """Return the first part of all names, if they have the same one, as 'module.'."""
    first = names[0].partition(".")[0] + "." if names else ""
    is_common = all(name.startswith(first) for name in names)
    return first if is_common and len(names) > 1 else ""


def _name_optimizer(
    run: PeerRun,
    name: str,
    groups: Sequence[OwnGroup],
    change: Callable[[str], str],
    ties: Mapping[str, Sequence[str]],
    left: list[str],
) -> PeerOptimizer:
    found = run.optimizers[name]
    counts = [len(group["params"]) for group in found.groups]
    own_counts = [len(group.fqns) for group in groups]
    is_counted = found.is_numbered
    if (found.has_groups and len(counts) != len(own_counts)) or (
        is_counted and counts != own_counts
    ):
        raise ValueError(
            f"the optimizer in {run.path} ({run.kind}) has {_told(counts)}, and the one here has "
            f"{_told(own_counts)}. Build the optimizer with the groups, and in them the parameters "
            "in the order, of the run that saved it."
        )
    known = {fqn for group in groups for fqn in group.fqns}
    names: dict[Any, str] = {}
    for number, group in enumerate(found.groups):
        for index, key in enumerate(group["params"]):
            if is_counted:
                names[key] = groups[number].fqns[index]
                continue
            target = change(str(key))
            tied = next((each for each in ties.get(target, ()) if each in known), target)
            names[key] = target if target in known else tied
    options = {key for group in groups for key in group.options} | set(_ADDED)
    dropped = {key for group in found.groups for key in group if key not in {*options, *MEMBERS}}
    left += [f"option '{key}' of the optimizer's groups" for key in sorted(dropped)]
    renamed = [
        {
            **{key: value for key, value in group.items() if key in options},
            "params": [names[key] for key in group["params"]],
        }
        for group in found.groups
    ]
    unknown = [key for key in found.state if key not in names]
    left += [f"the optimizer's state of {key!r}, which is in no group" for key in unknown]
    state = {names[key]: values for key, values in found.state.items() if key in names}
    return replace(found, groups=renamed, state=state)


def _told(counts: Sequence[int]) -> str:
    numbers = " and ".join(map(str, counts))
    return f"{len(counts)} group" + "s" * (len(counts) != 1) + f" of {numbers} parameters"


def named_by_order(run: PeerRun) -> PeerRun:
    """Return a run whose numbered parameters have names, without a model that would say them.

    Raises:
        ValueError: If the order of the model's tensors leaves a choice.
    """
    optimizers = {
        name: _by_order(run, each) if each.is_numbered else each
        for name, each in run.optimizers.items()
    }
    return replace(run, optimizers=optimizers)


def _by_order(run: PeerRun, found: PeerOptimizer) -> PeerOptimizer:
    tensors: dict[Any, tuple[str, tuple[int, ...]]] = {}
    for name, value in run.model.items():
        if isinstance(value, PeerTensor) and value.dtype.is_floating_point:
            tensors.setdefault(value.spans or name, (name, tuple(value.shape)))
    candidates = list(tensors.values())
    numbers = [key for group in found.groups for key in group["params"]]
    names: dict[Any, str] = {}
    # One group has the order of the model. Several have an order of their own, in which shapes
    # alone say what belongs together, and only where all of a shape are in one group.
    if len(found.groups) == 1 and len(numbers) == len(candidates):
        names = {key: name for key, (name, _) in zip(numbers, candidates, strict=True)}
    else:
        shapes = {key: _shape_of(found.state.get(key, {})) for key in numbers}
        homes: dict[Any, set[int]] = {}
        for index, group in enumerate(found.groups):
            for key in group["params"]:
                homes.setdefault(shapes[key], set()).add(index)
        for shape, indices in homes.items():
            same = [name for name, each in candidates if each == shape]
            keys = [key for key in numbers if shapes[key] == shape]
            if shape is None or len(indices) > 1 or len(same) != len(keys):
                raise ValueError(
                    f"{run.path} counts the optimizer's parameters, and those of shape {shape} may "
                    f"be any of {same[:8]}. Load it with load_checkpoint, a model and an "
                    "optimizer, and save that."
                )
            names |= dict(zip(keys, same, strict=True))
    groups = [{**g, "params": [names[key] for key in g["params"]]} for g in found.groups]
    state = {names[key]: values for key, values in found.state.items() if key in names}
    return replace(found, groups=groups, state=state)


def _shape_of(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of a parameter from its state; None without one."""
    shapes = {tuple(v.shape) for v in state.values() if isinstance(v, PeerTensor) and v.shape}
    return shapes.pop() if len(shapes) == 1 else None
