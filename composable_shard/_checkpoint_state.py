"""What of a model and its optimizers a checkpoint holds, and how it gets back into them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable_shard import _json_tree
from composable_shard._checkpoint_reader import CheckpointReader
from composable_shard._flat_shard import FlatShard
from composable_shard._optimizer_state import shard_optimizer_state
from composable_shard._tensor_region import region_of

__all__ = ["StagedModel", "StagedOptimizer", "describe_model", "describe_optimizer"]

_MAX_NAMES = 8  # in a message


def _get_model_state(model: nn.Module) -> dict[str, Any]:
    return model.state_dict(keep_vars=True)


def _set_model_state(model: nn.Module, state: dict[str, Any]) -> None:
    model.load_state_dict(state, strict=False)


def _get_optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    state = {names[param]: dict(each) for param, each in optimizer.state.items()}
    groups = [
        {**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def _set_optimizer_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    order = [names[p] for group in optimizer.param_groups for p in group["params"]]
    number = {name: index for index, name in enumerate(order)}
    by_name = {name: group for group in state["param_groups"] for name in group["params"]}
    groups = []
    for group in optimizer.param_groups:
        own = [names[p] for p in group["params"]]
        stored = by_name[own[0]] if own else group
        groups.append({**stored, "params": [number[name] for name in own]})
    states = {number[name]: each for name, each in state["state"].items() if name in number}
    optimizer.load_state_dict({"state": states, "param_groups": groups})
    shard_optimizer_state(optimizer)  # that of parameters of one element


# Saving


def describe_model(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the model's state, encoded, by FQN; a tensor under several FQNs is saved once.

    Args:
        model: The model.
        tensors: Gets this rank's tensors, by name.
    """
    tree: dict[str, Any] = {}
    names: dict[int, str] = {}
    for fqn, value in _get_model_state(model).items():
        if isinstance(value, Tensor):
            name = names.setdefault(id(value), f"model/{fqn}")
            tree[fqn] = _json_tree.encode(value, name, tensors)
        else:
            tree[fqn] = _json_tree.encode(value, f"model/{fqn}", tensors)
    meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    if meta:
        raise RuntimeError(f"can't save {_listing(meta)}: on the meta device")
    return tree


def describe_optimizer(
    model: nn.Module, optimizer: Optimizer, name: str, tensors: dict[str, Tensor]
) -> Any:
    """Return the optimizer's state by FQN, encoded.

    Args:
        model: The model whose parameters it has.
        optimizer: The optimizer.
        name: What names of tensors begin with.
        tensors: Gets this rank's tensors, by name.
    """
    return _json_tree.encode(_get_optimizer_state(model, optimizer), name, tensors)


# Loading


@dataclass
class StagedModel:
    """A model's new state in host memory."""

    model: nn.Module
    state: dict[str, Any]

    @classmethod
    def read(cls, reader: CheckpointReader, model: nn.Module, *, is_strict: bool) -> StagedModel:
        """Read and verify what this rank needs; changes nothing.

        Raises:
            ValueError: If the checkpoint does not fit or is damaged.
            RuntimeError: If the model is on the meta device.
        """
        state = _get_model_state(model)
        meta = [fqn for fqn, value in state.items() if isinstance(value, Tensor) and value.is_meta]
        if meta:
            raise RuntimeError(
                f"the model's {_listing(meta)} are on the meta device. Call "
                "model.to_empty(device=...) before load_checkpoint."
            )
        tree = reader.metadata.tree.get("model")
        if not isinstance(tree, dict):
            raise ValueError(f"{reader.folder} has no model")
        if is_strict:
            _compare_names(reader, "parameters and buffers", state, tree)
        common = [fqn for fqn in state if fqn in tree]
        pairs = [(fqn, _json_tree.tensor_name(tree[fqn]), state[fqn]) for fqn in common]
        problems = [p for pair in pairs for p in _mismatch(reader, *pair, is_strict=is_strict)]
        if problems:
            raise ValueError(f"{reader.folder} does not fit the model: {_listing(problems)}")
        staged: dict[str, Any] = {}
        known: dict[int, Tensor] = {}
        for fqn, name, target in pairs:
            if name is None:
                staged[fqn] = _json_tree.decode(tree[fqn], _no_tensor)
            else:
                if id(target) not in known:  # tied parameters are read once
                    known[id(target)] = _read_like(reader, name, target)
                staged[fqn] = known[id(target)]
        return cls(model, staged)

    def apply(self) -> None:
        """Change the model."""
        _set_model_state(self.model, self.state)


@dataclass
class StagedOptimizer:
    """An optimizer's new state in host memory."""

    model: nn.Module
    optimizer: Optimizer
    state: dict[str, Any]

    @classmethod
    def read(
        cls,
        reader: CheckpointReader,
        model: nn.Module,
        optimizer: Optimizer,
        tree: Any,
        *,
        is_strict: bool,
    ) -> StagedOptimizer:
        """Read and verify what this rank needs; changes nothing.

        State of a parameter's shape is read like the parameter is sharded, everything else whole.

        Raises:
            ValueError: If the checkpoint does not fit or is damaged.
        """
        groups = _json_tree.decode(tree["param_groups"], _no_tensor)
        own = _get_optimizer_state(model, optimizer)["param_groups"]
        _compare_groups(reader, own, groups, is_strict=is_strict)
        wanted = {fqn for group in own for fqn in group["params"]}
        params = _get_model_state(model)
        state: dict[str, dict[str, Any]] = {}
        for fqn, entries in tree["state"].items():
            if fqn in wanted:

                def find(name: str, param: Tensor = params[fqn]) -> Tensor:
                    return _read_state(reader, name, param)

                state[fqn] = _json_tree.decode(entries, find)
        return cls(model, optimizer, {"state": state, "param_groups": groups})

    def apply(self) -> None:
        """Change the optimizer."""
        _set_optimizer_state(self.model, self.optimizer, self.state)


def _read_state(reader: CheckpointReader, name: str, param: Tensor) -> Tensor:
    stored = reader.metadata.tensors.get(name)
    # One element may be a number for the whole parameter: that is the same everywhere.
    if stored is not None and stored.shape == param.shape and param.numel() != 1:
        return _read_like(reader, name, param, stored.dtype)
    values = reader.read(name)
    return values.view(reader.metadata.tensors[name].shape)


def _read_like(
    reader: CheckpointReader, name: str, target: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """Read this rank's part of a tensor, as a CPU tensor of the target's kind and dtype."""
    values = reader.read(name, region_of(target)).to(dtype or target.dtype)
    if isinstance(target, FlatShard):
        return FlatShard(values, target._shard_spec)
    if isinstance(target, DTensor):
        return DTensor.from_local(
            values.view(target.to_local().shape).to(target.device),
            target.device_mesh,
            target.placements,
            run_check=False,
            shape=target.shape,
            stride=torch.empty(target.shape, device="meta").stride(),
        )
    return values.view(target.shape)


def _no_tensor(name: str) -> Any:
    raise ValueError(f"'{name}' is a tensor where none is expected")


# Checks


def _mismatch(
    reader: CheckpointReader, fqn: str, name: str | None, target: Any, *, is_strict: bool
) -> list[str]:
    if name is None or not isinstance(target, Tensor):
        is_same = name is None and not isinstance(target, Tensor)
        return [] if is_same else [f"'{fqn}' is a tensor on one side only"]
    stored = reader.metadata.tensors.get(name)
    if stored is None:
        return [f"'{fqn}' has no data"]
    if stored.shape != target.shape:
        shapes = tuple(stored.shape), tuple(target.shape)
        return [f"'{fqn}' was saved with shape {shapes[0]}, the model has {shapes[1]}"]
    # A wider dtype takes the values as they are.
    if is_strict and torch.promote_types(stored.dtype, target.dtype) != target.dtype:
        return [
            f"'{fqn}' was saved as {stored.dtype}, the model has {target.dtype}; strict=False casts"
        ]
    return []


def _compare_names(
    reader: CheckpointReader, what: str, own: Iterable[str], stored: Iterable[str]
) -> None:
    missing, unexpected = sorted(set(own) - set(stored)), sorted(set(stored) - set(own))
    if missing or unexpected:
        parts = [f"missing: {_listing(missing)}"] if missing else []
        parts += [f"unexpected: {_listing(unexpected)}"] if unexpected else []
        raise ValueError(
            f"{reader.folder} has other {what} than the model; {'; '.join(parts)}. Pass "
            "strict=False to load the common ones."
        )


def _compare_groups(
    reader: CheckpointReader, own: list[Any], stored: list[Any], *, is_strict: bool
) -> None:
    names, stored_names = (
        [fqn for group in groups for fqn in group["params"]] for groups in (own, stored)
    )
    if is_strict:
        _compare_names(reader, "parameters in an optimizer", names, stored_names)
    group_of = {fqn: number for number, group in enumerate(stored) for fqn in group["params"]}
    for number, group in enumerate(own):
        found = {group_of[fqn] for fqn in group["params"] if fqn in group_of}
        if len(found) > 1:
            raise ValueError(
                f"parameter group {number} of the optimizer has parameters of the groups "
                f"{sorted(found)} in {reader.folder}: build the optimizer with the same groups"
            )


def _listing(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
