"""The state of a run as tensors and JSON: model, optimizers, random number generators."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable_shard.checkpoint.file_format import METADATA
from composable_shard.checkpoint.objects import Change, read_parts, wraps_state
from composable_shard.checkpoint.reader import TensorReader
from composable_shard.comm import HostGroup, Messages
from composable_shard.options import StateDictOptions
from composable_shard.state_dict import (
    Group,
    ManagedParam,
    ModelTensors,
    canonical,
    extra_state_name,
    handles_of,
    is_extra_state,
    json_tree,
    keeps_tensors,
    materialize,
    own_tensors,
    params_by_fqn,
    prefixed_modules,
    runs_own_code,
    set_model_state_dict,
)
from composable_shard.tensor import FlatShard, is_joinable, kind_of, local_part, region_of

_MAX_NAMES = 8  # in a message


# Saving


def describe_model(
    values: Mapping[str, Any], places: Mapping[str, ManagedParam], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Return the model's state, encoded, by FQN; a tied parameter is saved once. No communication.

    Args:
        values: The model's state dict.
        places: Its managed parameters by FQN.
        tensors: Gets this rank's tensors, by name.
    """
    tree: dict[str, Any] = {}
    names: dict[Any, str] = {}
    for fqn, value in values.items():
        name = f"model/{fqn}"
        if isinstance(value, Tensor) and value.is_meta:
            raise RuntimeError(f"can't save '{fqn}', which is on the meta device")
        if problem := _cannot_be_written(value):
            raise ValueError(f"can't save '{fqn}', which {problem}. Replace it by its clone().")
        tied = places.get(fqn) or _memory(value)
        if tied is not None:
            name = names.setdefault(tied, name)
        tree[fqn] = json_tree.encode(value, name, tensors)
    return tree


def _cannot_be_written(value: Any) -> str:
    """Return why a load could not write a model's value; empty if it could."""
    if not isinstance(value, Tensor) or isinstance(value, FlatShard | DTensor):
        return ""
    if value.is_inference() and not torch.is_inference_mode_enabled():
        return "was made in inference mode, so that nothing can be written into it"
    is_dense = value.layout is torch.strided and not value.is_nested
    if is_dense and any(
        n > 1 and not step for n, step in zip(value.shape, value.stride(), strict=True)
    ):
        return "has elements that share memory, as expand() makes them"
    return ""


def _memory(value: Any) -> tuple[Any, ...] | None:
    """Return a key that is equal for tied plain tensors and different for others."""
    if not isinstance(value, Tensor) or isinstance(value, FlatShard | DTensor):
        return None
    if value.layout is not torch.strided or value.is_meta or value.numel() == 0:
        return None
    views = value.is_conj(), value.is_neg()
    return value.data_ptr(), value.shape, value.stride(), value.dtype, views


# Loading


@dataclass
class StagedModel:
    """A model's new state, in host memory or verified. [Note: Two passes]"""

    model: nn.Module
    state: dict[str, Any]  # by name, without extra state; empty after `apply`
    extra: dict[str, Any]  # what modules' `set_extra_state` get, by name
    meta: ModelTensors | None  # the model's tensors, if any is on the meta device
    # Names in the checkpoint, and the tensors of `state` into which `fill` reads them
    places: list[tuple[str, Tensor]]

    @classmethod
    def read(
        cls, reader: TensorReader, model: nn.Module, state: dict[str, Any], *, is_strict: bool
    ) -> StagedModel:
        """Verify this rank's part, and read what `fill` will not; changes nothing."""
        tree = reader.metadata.tree["model"]
        extra = {
            fqn: json_tree.decode(tree[fqn], reader.read_whole)
            for fqn in tree
            if is_extra_state(fqn) and fqn in state
        }
        common = {
            fqn: json_tree.tensor_name(tree[fqn])
            for fqn in state
            if fqn in tree and fqn not in extra
        }
        problems = [_mismatch(reader, n, state[fqn], is_strict) for fqn, n in common.items()]
        named = [f"'{fqn}' {text}" for fqn, text in zip(common, problems, strict=True) if text]
        if named:
            raise ValueError(f"{reader.folder} does not fit the model: {_listing(named)}")
        meta = _find_meta(reader, model, state, common)
        staged: dict[str, Any] = {}
        places: list[tuple[str, Tensor]] = []
        is_kept = meta is not None or runs_own_code(model)
        params = params_by_fqn(model)
        known: dict[Any, tuple[str, str]] = {}  # name in the checkpoint, FQN
        for fqn, name in common.items():
            if name is None:
                staged[fqn] = json_tree.decode(tree[fqn], _no_tensor)
                continue
            tied = params.get(fqn) or _memory(state[fqn]) or fqn
            first, same = known.setdefault(tied, (name, fqn))
            if fqn == same:  # tied parameters are read once
                staged[fqn] = state[fqn]
                if is_kept:
                    staged[fqn] = reader.read_like(name, state[fqn])
                else:
                    reader.verify(name, region_of(state[fqn]))
                    places.append((name, state[fqn]))
            elif not _is_equal(reader, (name, first), state[fqn]):
                raise ValueError(
                    f"'{fqn}' and '{same}' are one tensor in the model, and have different "
                    f"values in {reader.folder}"
                )
            staged[fqn] = staged[same]
        return cls(model, staged, extra, meta, places)

    def extra_changes(self) -> list[Change]:
        """Return how to change the extra state of each module that has some."""
        found: dict[str, Change] = {}
        for prefix, module in prefixed_modules(self.model):
            key = extra_state_name(canonical(prefix))
            if key in self.extra:  # the last of a name is the module in all wrappers
                found[key] = module.set_extra_state, self.extra[key]
        return list(found.values())

    def fill(self, reader: TensorReader) -> None:
        """Read values into the model's own tensors. [Note: Two passes]"""
        for handle in handles_of(self.model):
            if handle.shown.scope is None:
                handle.guard.note_write(handle.name)  # on all ranks, also if reading fails
        for name, place in self.places:
            reader.read_into(name, place)

    def apply(self) -> None:
        """Load the values into the model, and release them, unless `fill` has done it."""
        if self.places:
            return
        if self.meta is not None:
            with torch.inference_mode(False), torch.no_grad():
                self._fill_meta(self.meta)
        set_model_state_dict(self.model, self.state, options=StateDictOptions(strict=False))
        self.state.clear()

    def _fill_meta(self, tensors: ModelTensors) -> None:
        """Give tensors on the meta device memory and values, one flat parameter at a time.

        Its staged values are released at once, so that at most one is held twice.
        """
        for handle in [handle for handle in tensors.handles if handle.shard.values.is_meta]:
            own = [each for each in tensors.sharded if each.handle is handle]
            given = {each.index: local_part(self._take(each.names)) for each in own}
            materialize(handle, given if len(given) == len(handle.entries) else None)
            handle.guard.note_write(own[0].names[0])
            for index, part in given.items():  # values that `materialize` did not take
                handle.entries[index].slice_of(handle.shard.values).copy_(part)
        device = tensors.handles[0].shard_group.device
        tensors.fill_computed(device)
        for other in tensors.others:
            if other.is_meta and any(name in self.state for name in other.names):
                other.materialize(device).copy_(self._take(other.names))

    def _take(self, names: list[str]) -> Tensor:
        values = [self.state.pop(name) for name in names if name in self.state]
        assert isinstance(values[0], Tensor)
        return values[0]


def _find_meta(
    reader: TensorReader, model: nn.Module, state: dict[str, Any], given: Container[str]
) -> ModelTensors | None:
    """Return the tensors of a model if any of them is on the meta device."""
    tensors = [*model.parameters(), *model.buffers(), *state.values()]
    if not any(isinstance(tensor, Tensor) and tensor.is_meta for tensor in tensors):
        return None
    if not handles_of(model):
        raise RuntimeError(
            "the model is on the meta device, and has no sharded unit, whose mesh would name the "
            "device. Call model.to_empty(device=...) before load_checkpoint."
        )
    found = ModelTensors(model, "load_checkpoint can't run")
    try:
        found.check_none_stays_meta(given)
    except ValueError as error:
        raise ValueError(f"can't load {reader.folder}: {error}") from None
    return found


@dataclass
class StagedOptimizer:
    """An optimizer's new state."""

    view: list[Group]
    # As `get_optimizer_state_dict` returns it. Values that `fill` will read are the optimizer's own
    # tensors.
    state: dict[str, Any]
    # Names in the checkpoint, and FQNs and names of the state that `fill` reads
    places: list[tuple[str, str, str]]

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer to load."""
        return self.view[0].optimizer

    @classmethod
    def read(
        cls,
        reader: TensorReader,
        params: dict[str, Any],
        view: list[Group],
        stored: tuple[Any, Mapping[str, str]],
        *,
        is_strict: bool,
    ) -> StagedOptimizer:
        """Verify this rank's part, and read what `fill` will not; changes nothing.

        State of a parameter's shape is sharded as the parameter is; other state is read whole.

        Args:
            stored: The encoded state, and the FQN of the parameter that a shard was cut like, by
                the tensor's name.
        """
        tree, cuts = stored
        groups = json_tree.decode(tree["param_groups"], reader.read_whole)
        wanted = {fqn for group in view for fqn in group.fqns}
        homes = {fqn for group in groups for fqn in group["params"]}
        found = cls(view, {"state": {}, "param_groups": groups}, [])
        tensors = own_tensors(view) if keeps_tensors(found.optimizer) else {}

        def find_cut(name: str) -> Tensor:
            return _read_cut(reader, name, params.get(cuts.get(name, "")))

        for fqn, entries in tree["state"].items():
            if fqn in wanted:
                at = {json_tree.tensor_name(each): key for key, each in entries.items()}
                given = partial(found._find, reader, params[fqn], fqn, at, tensors.get(fqn, {}))
                find = partial(_choose, cuts, find_cut, given)
                found.state["state"][fqn] = json_tree.decode(entries, find)
            elif fqn not in homes:  # state that belongs to no parameter
                found.state["state"][fqn] = json_tree.decode(entries, find_cut)
        for key in [k for k in tree if k not in ("state", "param_groups", "parts")]:
            found.state[key] = json_tree.decode(tree[key], find_cut)
        as_saved = wraps_state(found.optimizer)
        wrapped = {fqn: parts for fqn, parts in tree.get("parts", {}).items() if fqn in wanted}
        for fqn, parts in wrapped.items():
            state = found.state["state"].setdefault(fqn, {})
            state |= read_parts(reader, parts, params[fqn], as_saved=as_saved, is_strict=is_strict)
        return found

    def _find(
        self,
        reader: TensorReader,
        param: Tensor,
        fqn: str,
        keys: Mapping[str | None, str],
        own: Mapping[str, Tensor],
        name: str,
    ) -> Tensor:
        stored = reader.metadata.tensors.get(name)
        # State of one element may be a number, which is the same on all ranks.
        if stored is None or stored.shape != param.shape or param.numel() == 1:
            return reader.read_whole(name)
        place = own.get(keys.get(name, ""))
        is_same = place is not None and place.dtype == stored.dtype == param.dtype
        is_same = is_same and kind_of(place) is kind_of(param)
        if place is None or not is_same or region_of(place) != region_of(param):
            return reader.read_like(name, param, stored.dtype)
        reader.verify(name, region_of(param))
        self.places.append((name, fqn, keys[name]))
        return place

    def fill(self, reader: TensorReader) -> None:
        """Read values into the optimizer's tensors, after it has loaded. [Note: Two passes]"""
        tensors = own_tensors(self.view)
        for name, fqn, key in self.places:
            reader.read_into(name, tensors[fqn][key])


def _choose(
    cuts: Mapping[str, str],
    find_cut: Callable[[str], Tensor],
    find: Callable[[str], Tensor],
    name: str,
) -> Tensor:
    return find_cut(name) if name in cuts else find(name)


def _read_cut(reader: TensorReader, name: str, like: Tensor | None) -> Tensor:
    """Read a shard as this rank's part of the parameter that it is cut like, or else whole."""
    stored = reader.metadata.tensors.get(name)
    if like is None or stored is None or stored.shape.numel() != like.numel():
        return reader.read_whole(name)
    # A view of it was saved: maybe a part of a vector, which not all forms can be a part of.
    if stored.shape != like.shape and isinstance(like, FlatShard):
        like = like.detach().view(stored.shape) if is_joinable(like) else like
    if stored.shape != like.shape:
        return reader.read_whole(name)
    return reader.read_like(name, like, stored.dtype)


def read_extra(reader: TensorReader, params: Mapping[str, Any]) -> Any:
    """Return what a save got as `extra`; shards of it as those of the model's parameters are."""
    cuts: Mapping[str, str] = reader.metadata.tree.get("extra_cuts", {})

    def find(name: str) -> Tensor:
        like = params.get(cuts.get(name, ""))
        found = _read_cut(reader, name, like)
        return found.to(like.device) if like is not None and not like.is_meta else found

    with torch.no_grad():
        return json_tree.decode(reader.metadata.tree["extra"], find)


def _is_equal(reader: TensorReader, names: tuple[str, str], target: Tensor) -> bool:
    """Return whether this rank's parts of two tensors have the same bytes."""
    if names[0] == names[1]:
        return True
    parts = [local_part(reader.read_like(name, target)).view(torch.uint8) for name in names]
    return torch.equal(*parts)


def _no_tensor(name: str) -> Any:
    raise ValueError(f"'{name}' is a tensor where none is expected")


# Checks


def _mismatch(reader: TensorReader, name: str | None, target: Any, is_strict: bool) -> str:
    """Return why a value of the checkpoint does not fit; empty if it fits."""
    if name is None or not isinstance(target, Tensor):
        is_same = name is None and not isinstance(target, Tensor)
        return "" if is_same else "is a tensor on one side only"
    stored = reader.metadata.tensors.get(name)
    if stored is None:
        return "has no data"
    if problem := _cannot_be_written(target):
        return problem
    if stored.shape != target.shape:
        shapes = tuple(stored.shape), tuple(target.shape)
        return f"was saved with shape {shapes[0]}, the model has {shapes[1]}"
    # A wider dtype takes the values as they are.
    if is_strict and torch.promote_types(stored.dtype, target.dtype) != target.dtype:
        return f"was saved as {stored.dtype}, the model has {target.dtype}; strict=False casts"
    return ""


# By kind of name: the names of this rank, and the names in the checkpoint.
_NameLists = dict[str, tuple[Iterable[str], Iterable[str]]]


def list_names(
    reader: TensorReader,
    state: dict[str, Any],
    views: Mapping[str, list[Group]],
    trees: Iterable[Any],
) -> _NameLists:
    """Return the names of the model and of its optimizers, here and in a checkpoint."""
    stored = reader.metadata.tree.get("model")
    if not isinstance(stored, dict):
        raise ValueError(
            f"{reader.folder / METADATA} has no entry 'model', so it has no parameters to load. "
            "Load a checkpoint that save_checkpoint wrote."
        )
    lists: _NameLists = {"parameters and buffers": (state, stored)}
    for (name, view), tree in zip(views.items(), trees, strict=True):
        own = [fqn for group in view for fqn in group.fqns]
        saved = [fqn for group in tree["param_groups"] for fqn in group["params"]]
        if not all(isinstance(fqn, str) for fqn in saved):
            raise TypeError(f"expected names of parameters, got {saved[:_MAX_NAMES]}")
        what = f"parameters in optimizer '{name}'" if name else "parameters in an optimizer"
        lists[what] = own, saved
    return lists


def compare_names(group: HostGroup, folder: Path, lists: _NameLists) -> None:
    """Check that every rank finds its names, and that some rank has each name of the checkpoint."""
    unknown = {what: sorted(set(stored) - set(own)) for what, (own, stored) in lists.items()}
    unexpected: dict[str, list[str]] = group.join(unknown, _find_common)
    with group.agreed():
        for what, (own, stored) in lists.items():
            found = {"missing": set(own) - set(stored), "unexpected": unexpected[what]}
            parts = [f"{kind}: {_listing(sorted(names))}" for kind, names in found.items() if names]
            if parts:
                raise ValueError(
                    f"{folder} has other {what} than the model; {'; '.join(parts)}. Pass "
                    "strict=False to load the common ones."
                )


def _find_common(told: Messages) -> dict[str, list[str]]:
    """Return, of each kind, the names that all ranks have told which tell of that kind."""
    kinds = {what for unknown, _ in told for what in unknown}
    return {
        what: sorted(set.intersection(*(set(each[what]) for each, _ in told if what in each)))
        for what in kinds
    }


def _listing(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
