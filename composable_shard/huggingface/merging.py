"""Weights for inference engines, with peft's adapters merged into them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from composable_shard.dtensors import is_dtensor
from composable_shard.flat_param import handle_of
from composable_shard.module_api import unshard_params
from composable_shard.runtime import ShardState, check_whole, read_state
from composable_shard.state_dict import ModelRanks, canonical, converted
from composable_shard.tensor import FlatShard


def iter_merged_params(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    rank0_only: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and full value of each weight of an adapted model, adapters merged in.

    For an inference engine that knows no adapters: the names are those of the model that peft
    adapted, as `from_pretrained` returns it. Weights in `modules_to_save` take the places of the
    original ones. peft's own `merge` runs on full values of one unit at a time, in the main dtype;
    the model's weights and adapters stay as they are. One all-gather for each handle. Call it and
    read it to the end on all ranks, and run no step meanwhile.

    Args:
        model: What peft's `get_peft_model` returned, sharded, outside of forward, backward and
            `unshard_params`. Its active adapters are merged.
        dtype: Cast floating-point values to it.
        device: Of the values. Default: the unit's.
        rank0_only: Yield values on the first rank alone, and nothing on the others.

    Raises:
        ValueError: If the model has no adapters, or no units.
        NotImplementedError: If the weights of an adapted layer are not in one unit; with
            `rank0_only`, if the meshes of the units begin with different ranks.
        RuntimeError: Inside a forward, a backward or `unshard_params`, or after `unshard`.
    """
    if not hasattr(getattr(model, "base_model", None), "merge_adapter"):
        raise ValueError(
            f"expected a model of peft's get_peft_model, got {type(model).__name__}. Of a model "
            "without adapters iter_full_params(model) yields the weights."
        )
    check_whole(model)
    ranks, adapted = ModelRanks(model), _Adapted(model)
    if rank0_only:
        ranks.check_one_is_first()
    takes = ranks.is_first or not rank0_only
    where = None if device is None else torch.device(device)

    def merge() -> Iterator[tuple[str, Tensor]]:
        for unit, module in adapted.units.items():
            layers = adapted.layers[unit] if takes else []
            with (
                unshard_params(module, recurse=False, writeback=False, rank0_only=rank0_only),
                _merged(layers),
            ):
                yield from values(adapted.names[unit])
        yield from values(adapted.names[None])

    def values(names: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
        for name, plain_name in names.items() if takes else ():
            with torch.no_grad():  # not around the yield, where the caller's own code runs
                value = model.get_parameter(name).detach()
                value = value.full_tensor() if is_dtensor(value) else value
                value = converted(value, where, dtype)
            yield plain_name, value

    return merge()


class _Adapted:
    """What the units of an adapted model hold.

    Attributes:
        units: Each, and a module to open it by.
        names: Of their parameters, and of plain ones, that the model without adapters has: there.
        layers: The adapted layers of each.
    """

    def __init__(self, model: Any) -> None:
        self.units: dict[ShardState, nn.Module] = {}
        for module in model.modules():
            if (state := read_state(module)) is not None:
                self.units.setdefault(state, module)
        self._owners = {handle: state for state in self.units for handle in state.handles}
        # After `_owners`, by which both loops find the unit of a parameter.
        self.names: dict[ShardState | None, dict[str, str]] = defaultdict(dict)
        for name, param in model.named_parameters():
            plain_name = _name_without(name, model.base_model.prefix, model.active_adapters)
            if plain_name is not None:
                self.names[self._owner(param)][name] = plain_name
        self.layers: dict[ShardState | None, list[Any]] = defaultdict(list)
        for name, layer in model.named_modules():
            if hasattr(type(layer), "merge"):
                self.layers[self._owner_of_layer(name, layer)].append(layer)

    def _owner(self, param: Tensor) -> ShardState | None:
        handle = handle_of(param) if isinstance(param, FlatShard) else None
        return None if handle is None else self._owners.get(handle)

    def _owner_of_layer(self, name: str, layer: nn.Module) -> ShardState:
        found = {self._owner(param) for param in layer.parameters()}
        state = found.pop() if len(found) == 1 else None
        if state is None:  # a merge would write into weights that stay
            raise NotImplementedError(
                f"the weights of '{canonical(name)}' and its adapters are not in one unit, which "
                "merging needs. Call fully_shard after get_peft_model, on the layer or a module "
                "around it, and without these weights in ignored_params."
            )
        return state


def _name_without(name: str, prefix: str, active: list[str]) -> str | None:
    """Return a parameter's name in the model without adapters; None for one that it lacks."""
    parts = canonical(name).removeprefix("base_model.model.").split(".")
    if "original_module" in parts or any(part.startswith(prefix) for part in parts):
        return None
    if "modules_to_save" in parts:
        place = parts.index("modules_to_save")
        if parts[place + 1] not in active:
            return None
        del parts[place : place + 2]
    return ".".join(part for part in parts if part != "base_layer")


@contextmanager
def _merged(layers: list[Any]) -> Iterator[None]:
    """Merge the adapters of layers that show full values, which nobody writes back."""
    before = [[*layer.merged_adapters] for layer in layers]
    try:
        with torch.no_grad():
            for layer in layers:
                layer.merge()
        yield
    finally:
        for layer, merged in zip(layers, before, strict=True):
            layer.merged_adapters[:] = merged
