"""The tensors of a model under the names that its unsharded twin's state dict would have."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from composable_shard.flat_param import FlatParamHandle, ParamEntry
from composable_shard.runtime import check_is_idle, select_states
from composable_shard.state_dict.names import ManagedParam, flat_names
from composable_shard.state_dict.optimizer_view import canonical, params_by_fqn

__all__ = ["ModelTensors", "OtherTensor", "ShardedTensor"]


@dataclass(frozen=True)
class ShardedTensor:
    """A parameter of a unit, with all names it has in the model."""

    is_persistent: ClassVar[bool] = True
    names: tuple[str, ...]
    handle: FlatParamHandle
    index: int  # among the handle's entries

    @property
    def entry(self) -> ParamEntry:
        """What the handle knows of it."""
        return self.handle.entries[self.index]

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole tensor."""
        return self.entry.spec.shape

    @property
    def is_meta(self) -> bool:
        """Whether it has no values yet."""
        return self.handle.local_shard.is_meta


@dataclass(frozen=True)
class OtherTensor:
    """A parameter that no unit manages, or a buffer, with all names and places it has."""

    names: tuple[str, ...]
    places: tuple[tuple[nn.Module, str], ...]
    tensor: Tensor
    is_persistent: bool  # belongs in state dicts

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole tensor."""
        return self.tensor.shape

    @property
    def is_meta(self) -> bool:
        """Whether it has no values yet."""
        return self.tensor.is_meta

    def materialize(self, device: torch.device) -> Tensor:
        """Put a real tensor where one on the meta device is; a Parameter stays the same object.

        Returns:
            What is there then, without values.
        """
        real = torch.empty_like(self.tensor.detach(), device=device)
        if isinstance(self.tensor, nn.Parameter):
            torch.utils.swap_tensors(self.tensor, nn.Parameter(real, self.tensor.requires_grad))
            return self.tensor
        for module, key in self.places:
            module._buffers[key] = real
        return real


class ModelTensors:
    """All tensors of a model at rest.

    Names are those of the original parameters, whichever form the modules show, without the parts
    that `torch.compile` and activation checkpointing add.

    Attributes:
        handles: Those with a parameter in the model, also if a unit outside of it owns them.
        sharded: Their parameters in the model, in the order of the handles.
        others: All other parameters, and all buffers.
    """

    def __init__(self, model: nn.Module, what: str) -> None:
        """Find and name everything; takes over what was done to the parameters since.

        Args:
            model: A model with sharded units.
            what: How a message begins, for example "load_safetensors can't run".

        Raises:
            ValueError: If there is no unit.
            RuntimeError: In a forward or backward, or while units show full parameters.
        """
        states = select_states(model, recurse=True)
        for context in dict.fromkeys(state.context for state in states):
            if context is not None:
                check_is_idle(context, what)
        names: dict[ManagedParam, list[str]] = {}
        for fqn, param in params_by_fqn(model).items():
            names.setdefault(param, []).append(fqn)
        handles = dict.fromkeys(handle for state in states for handle in state.needed)
        self.sharded: list[ShardedTensor] = []
        for handle in handles:
            _check_at_rest(handle, what)
            handle.adopt_changes()
            for index in range(len(handle.entries)):
                if found := names.get(ManagedParam(handle, index)):
                    self.sharded.append(ShardedTensor(tuple(found), handle, index))
        self.handles = list(dict.fromkeys(each.handle for each in self.sharded))
        managed = {id(entry.sharded) for handle in handles for entry in handle.entries}
        self.others = _find_others(model, managed | _ids_of_flat(model))

    def check_none_stays_meta(self, given: Container[str]) -> None:
        """Check that everything on the meta device will get values.

        Raises:
            ValueError: Naming what is not in `given` under any of its names.
        """
        lost = [
            each.names[0]
            for each in self.all
            if each.is_meta and not (each.is_persistent and any(n in given for n in each.names))
        ]
        if lost:
            raise ValueError(
                f"{lost} are on the meta device, and the checkpoint does not have them (buffers "
                "that are not persistent are in none). Call model.to_empty(device=...) and "
                "initialise them, for example by reset_parameters(), before loading the rest."
            )

    @property
    def all(self) -> Sequence[ShardedTensor | OtherTensor]:
        """All parameters and buffers."""
        return [*self.sharded, *self.others]

    def by_name(self) -> dict[str, ShardedTensor | OtherTensor]:
        """Return everything that belongs in a state dict, under every name it has."""
        return {name: each for each in self.all if each.is_persistent for name in each.names}


def _check_at_rest(handle: FlatParamHandle, what: str) -> None:
    if handle.is_in_scope or handle.is_registered_unsharded:
        raise RuntimeError(
            f"{what} while unit '{handle.name}' shows full parameters. Call it outside "
            "unshard_params, and after reshard(module)."
        )


def _ids_of_flat(model: nn.Module) -> set[int]:
    return {id(handle.flat.sharded) for handle in flat_names(model).values() if handle.flat}


@dataclass
class _Found:
    """Where a tensor was found, and its names there."""

    tensor: Tensor
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    hidden_names: list[str] = field(default_factory=list)  # where it is not persistent


def _find_others(model: nn.Module, managed: set[int]) -> list[OtherTensor]:
    found: dict[int, _Found] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or id(tensor) in managed:
                continue
            each = found.setdefault(id(tensor), _Found(tensor))
            each.places.append((module, key))
            is_hidden = key in module._non_persistent_buffers_set
            names = each.hidden_names if is_hidden else each.names
            names.append(canonical(f"{prefix}.{key}".lstrip(".")))
    return [
        OtherTensor(
            tuple(each.names or each.hidden_names),
            tuple(each.places),
            each.tensor,
            bool(each.names),
        )
        for each in found.values()
    ]
