"""The other parts of a run: schedulers, scalers, random number generators.

[Note: Wrapped state]
Quantised optimizer state is a tensor subclass that wraps other tensors (codes, scales, lookup
tables). Only the class knows their layouts. So each rank's part is saved separately: its region,
the name of its class, and all tensors in it. A rank that loads the same region gets every bit back.
For another region the class converts the parts into plain values; these are not the saved bits, so
this needs `strict=False`. Shards that are too small to be quantised are saved in the same way,
because another rank's shard may be quantised. The program must have allowed the class by
`torch.serialization.add_safe_globals`.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from composable_shard.checkpoint.file_format import METADATA
from composable_shard.checkpoint.reader import TensorReader, shaped_like
from composable_shard.comm import HostGroup, Messages
from composable_shard.layout import Region
from composable_shard.state_dict import json_tree
from composable_shard.tensor import FlatShard, find_places, local_part, region_of
from composable_shard.torch_private import is_traceable_wrapper_subclass, schedulers_in

OneOrMore = Any  # an object, or a list or dict of objects
Change = tuple[Callable[[Any], object], Any]  # a load function, and the state that it loads


def as_dict(objects: OneOrMore) -> dict[str, Any]:
    """Return one object, or several, by name."""
    if objects is None:
        return {}
    if isinstance(objects, Mapping):
        if len({str(name) for name in objects}) < len(objects):
            raise ValueError(f"expected names that differ as text, got {list(objects)}")
        return {str(name): each for name, each in objects.items()}
    if isinstance(objects, Sequence):
        return {str(number): each for number, each in enumerate(objects)}
    return {"": objects}


def find_stored(reader: TensorReader, kind: str) -> dict[str, Any]:
    """Return the encoded states of all objects of a kind, by name."""
    stored = reader.metadata.tree.get(kind)
    if not isinstance(stored, dict):
        raise ValueError(f"{reader.folder / METADATA} is damaged: it has no '{kind}'")
    return stored


def check_names(
    group: HostGroup, reader: TensorReader, wanted: Mapping[str, Iterable[str]]
) -> None:
    """Check that a checkpoint has what each rank wants, and that some rank wants each part of it.

    Kinds that no rank wants are not checked. Ranks may want different parts: pipeline stages have
    optimizers of their own.
    """
    own = {kind: sorted(names) for kind, names in wanted.items()}

    def check(told: Messages) -> None:
        for kind in own:
            stored = find_stored(reader, kind)
            everyones = {name for each, _ in told for name in each[kind]}
            if everyones and everyones != stored.keys():
                raise ValueError(
                    f"expected the same {kind}s as in {reader.folder}, which has "
                    f"{_named(kind, stored)}; got {_named(kind, everyones)}"
                )

    group.join(own, check)


def stage_objects(
    reader: TensorReader, objects: Mapping[str, dict[str, Any]], *, is_strict: bool
) -> list[Change]:
    """Return functions that load the new states of schedulers and scalers, with the states.

    Args:
        objects: By kind, "scheduler" or "scaler", and name.
    """
    staged = []
    for kind, named in objects.items():
        staged += _stage_kind(reader, kind, named, is_strict=is_strict)
    return staged


def _stage_kind(
    reader: TensorReader, kind: str, objects: dict[str, Any], *, is_strict: bool
) -> list[Change]:
    saved = reader.metadata.tree.get(kind)
    if kind == "scaler" and bool(objects) != bool(saved):
        text = (
            f"{reader.folder} has no state of a scaler: it begins anew"
            if objects
            else f"{reader.folder} has the state of a scaler, and none was passed: it is not loaded"
        )
        warnings.warn(text, UserWarning, stacklevel=4)
        return []
    # Checks alone: the changes are returned, and made where all kinds on all ranks passed theirs.
    stored = find_stored(reader, kind)
    if not stored.keys() >= objects.keys():
        raise ValueError(
            f"expected a {kind} of {reader.folder}, which has {_named(kind, stored)}; got "
            f"{_named(kind, objects)}. Pass what was saved, in a list or dict of the same names."
        )
    states = {name: json_tree.decode(stored[name], reader.read_whole) for name in objects}
    for name in [name for name, each in objects.items() if _is_off(each, states[name])]:
        text = f"{reader.folder} has the state of a scaler that was off, and the one here is on"
        if is_strict:
            raise ValueError(
                f"{text}. Pass no scaler, or strict=False: it begins with the scale that it has."
            )
        warnings.warn(f"{text}: it begins anew", UserWarning, stacklevel=4)
        del states[name]
    kinds = reader.metadata.tree.get("scheduler_kinds", {})
    for name, each in objects.items() if is_strict else ():
        if isinstance(each, LRScheduler):
            problem = _scheduler_problem(each, states[name], kinds.get(name))
            if problem:
                raise ValueError(
                    f"the state of a {kind} in {reader.folder} {problem}. Build the {kind} that "
                    "was saved, or pass strict=False."
                )
    return [(objects[name].load_state_dict, state) for name, state in states.items()]


def _is_off(scaler: Any, state: Any) -> bool:
    """Return whether an enabled `GradScaler` would refuse a state: that of a disabled one."""
    return isinstance(scaler, GradScaler) and scaler.is_enabled() and not state


def _named(kind: str, names: Iterable[str]) -> str:
    """Return how many objects of a kind there are, with the names of those that have one."""
    found = sorted(names)
    number = f"{len(found) or 'no'} {kind}" + "s" * (len(found) != 1)
    return number + (f" called {', '.join(map(repr, found))}" if any(found) else "")


def _scheduler_problem(scheduler: LRScheduler, state: dict[str, Any], kind: str | None) -> str:
    """Return why a scheduler can't take a state, or an empty text."""
    own, own_kind = scheduler.state_dict(), kind_of(scheduler)
    more, less = sorted(state.keys() - own.keys()), sorted(own.keys() - state.keys())
    if more or less or (kind is not None and kind != own_kind):
        saved = f" but of a {kind}" if kind else f": it has {more} and lacks {less}"
        return f"is not that of a {own_kind}{saved}"
    sizes = _num_groups(state), _num_groups(own)
    if sizes[0] == sizes[1]:
        return ""
    return f"is for {sizes[0]} parameter groups, and the optimizer here has {sizes[1]}"


def optimizer_kinds(optimizers: dict[str, Optimizer]) -> dict[str, list[Any]]:
    """Return the name of each optimizer's class, and the names of its options."""
    return {n: [type(each).__name__, sorted(each.defaults)] for n, each in optimizers.items()}


def check_kinds(reader: TensorReader, optimizers: dict[str, Optimizer]) -> None:
    """Check that optimizers are of the classes that were saved, or have the same options."""
    saved = reader.metadata.tree.get("optimizer_kinds", {})
    for name, (kind, options) in optimizer_kinds(optimizers).items():
        saved_kind, saved_options = saved.get(name, [kind, options])
        if saved_kind != kind and saved_options != options:
            raise ValueError(
                f"the state of an optimizer in {reader.folder} is of class {saved_kind}, and "
                f"{kind} was passed. Build the optimizer that was saved, or pass strict=False."
            )


def kind_of(scheduler: Any) -> str:
    """Return the name of a scheduler's class, and the names of the schedulers inside it."""
    parts = ", ".join(map(kind_of, schedulers_in(scheduler)))
    return type(scheduler).__name__ + (f" of ({parts})" if parts else "")


def _num_groups(state: Any) -> list[int]:
    """Return the numbers of parameter groups of a scheduler and of the schedulers inside it."""
    if isinstance(state, dict):
        own = [len(rates)] if isinstance(rates := state.get("base_lrs"), list) else []
        return own + [number for part in state.values() for number in _num_groups(part)]
    parts = state if isinstance(state, list) else []
    return [number for part in parts for number in _num_groups(part)]


# Random number generators


def rng_name(rank: int) -> str:
    """Return the name of the tensor with the states of a rank's generators."""
    return f"rng/{rank}"


def get_rng_state() -> dict[str, Any]:
    """Return the states of Python, of torch, of its accelerator, and of numpy if it is loaded."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (device := _accelerator()) is not None:
        state["accelerator"] = device.get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (str(kind), keys.tolist(), *rest)
    for name in state.keys() & {"torch", "accelerator"}:
        state[name] = bytes(state[name].cpu().tolist())
    return state


def check_rng_state(state: dict[str, Any]) -> None:
    """Check that the generators accept the states; changes nothing."""
    try:
        random.Random().setstate(state["python"])
        torch.Generator().set_state(_to_tensor(state["torch"]))
        if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.RandomState().set_state(state["numpy"])
    except Exception as error:
        raise ValueError(f"no state of a random number generator: {error}") from error


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the states of generators; a generator without one stays unchanged."""
    random.setstate(state["python"])
    torch.set_rng_state(_to_tensor(state["torch"]))
    if "accelerator" in state and (device := _accelerator()) is not None:
        device.set_rng_state(_to_tensor(state["accelerator"]))
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(state["numpy"])


def _accelerator() -> Any:
    kind = torch.accelerator.current_accelerator(check_available=True)
    return None if kind is None else torch.get_device_module(kind)


def _to_tensor(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def wraps_state(optimizer: Optimizer) -> bool:
    """Return whether an optimizer makes its state as torchao's do; the same on all ranks."""
    return callable(getattr(optimizer, "_new_buffer", None))


def take_parts(state: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Take this rank's parts of wrapped state out of an optimizer's. [Note: Wrapped state]

    Return them by FQN, and by a text with the state's name and its region.
    """
    taken: dict[str, dict[str, Any]] = {}
    for fqn, values in state.items():
        for name, value in list(values.items()):
            is_wrapped = isinstance(value, Tensor) and is_traceable_wrapper_subclass(value)
            if not is_wrapped or isinstance(value, DTensor):
                continue
            # Also where this rank has no elements of it, or it would be described as plain state.
            del values[name]
            local = value._local if isinstance(value, FlatShard) else value
            region = region_of(value)
            box = [list(ends) for ends in region.box]
            place = [box, list(region.order), region.start, region.end]
            part: dict[str, Any] = {"name": name, "place": place, "values": local}
            if is_traceable_wrapper_subclass(local):
                attributes, context = local.__tensor_flatten__()
                part["values"] = {each: getattr(local, each) for each in attributes}
                part |= {"kind": _name_of(type(local)), "context": context}
            if region.numel:
                taken.setdefault(fqn, {})[f"{name} {place}"] = part
    return taken


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def read_parts(
    reader: TensorReader,
    parts: dict[str, Any],
    target: Tensor,
    *,
    as_saved: bool,
    is_strict: bool,
) -> dict[str, Tensor]:
    """Read this rank's part of a parameter's wrapped state, by name.

    Args:
        as_saved: Whether the optimizer accepts state of the saved class.
        is_strict: Refuse to convert the state; only the saved bits are accepted.
    """
    region = region_of(target)
    found: dict[str, Tensor] = {}
    by_name: dict[str, list[tuple[Region, dict[str, Any]]]] = {}
    for part in parts.values():
        box, order, start, end = part["place"]
        source = Region(tuple(map(tuple, box)), tuple(order), start, end)
        by_name.setdefault(part["name"], []).append((source, part))
    for name, sources in by_name.items():
        # The saved bits come before a conversion, which rounds.
        same = [part for source, part in sources if source == region and as_saved]
        if same:
            found[name] = _rebuild(reader, same[0])
            continue
        for source, part in sources:
            places, indices = find_places(region, source, 0, region.numel)
            # A rank without elements needs the name and its dtype too.
            if len(places) or name not in found:
                values = _rebuild(reader, part)
                found.setdefault(name, torch.empty(region.numel, dtype=values.dtype))
            if not len(places):
                continue
            if is_strict and "kind" in part:
                raise ValueError(
                    f"the optimizer state '{name}' was saved as {part['kind']}, which can be loaded"
                    f" bit by bit only where ranks hold the same parts of {tuple(target.shape)}: "
                    f"elements {source.start} to {source.end} were saved, and this rank holds "
                    f"{region.start} to {region.end}. Load with the world size and sharding of the "
                    "save, or pass strict=False, which loads plain values."
                )
            plain = torch.empty(values.shape, dtype=values.dtype).copy_(values)
            found[name][places] = local_part(plain)[indices]
    return {name: shaped_like(values, target) for name, values in found.items()}


def _rebuild(reader: TensorReader, part: dict[str, Any]) -> Tensor:
    values = json_tree.decode(part["values"], reader.read_whole)
    if "kind" not in part:
        return values  # type: ignore[no-any-return] # a plain shard
    known = torch.serialization.get_safe_globals()
    kinds = {_name_of(each): each for each in known if isinstance(each, type)}
    kind: Any = kinds.get(part["kind"])
    if kind is None or not issubclass(kind, Tensor):
        raise ValueError(
            f"the optimizer state '{part['name']}' was saved as {part['kind']}, which this program "
            "does not know. Import its library, or torch.serialization.add_safe_globals([class])."
        )
    shape = values[next(iter(values))].shape
    context = json_tree.decode(part["context"], reader.read_whole)
    return kind.__tensor_unflatten__(values, context, shape, None)  # type: ignore[no-any-return]
