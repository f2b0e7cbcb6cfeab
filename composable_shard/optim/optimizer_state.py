"""Shard optimizer state that was made at full size before its parameters were sharded."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from composable_shard.dtensors import is_dtensor
from composable_shard.tensor import FlatShard, is_owned_by_other_rank, wrap

_O = TypeVar("_O", bound=Optimizer)

# Names of state in torch's optimizers that is one number for a parameter of any shape.
_SCALAR_KEYS = frozenset({"step", "mu_product", "eta", "mu"})


def shard_optimizer_state(optimizer: Optimizer) -> None:
    """Replace full-size state of sharded parameters by this rank's shard of it.

    Call it for state made before `fully_shard`: Adagrad makes its state in the constructor, other
    optimizers in their first step. Every rank must hold the same full-size state. State of one
    number for each parameter (`step`), and of parameters that are not sharded, stays unchanged. For
    a parameter of granularity "param" the owner keeps all state, of any shape; the other ranks keep
    none. A second call does nothing. No communication.

    Raises:
        ValueError: If a state tensor has neither the parameter's shape nor a single element, for
            example Adafactor's row statistics, or is a DTensor. Nothing has been changed then.
    """
    shards = [param for param in optimizer.state if isinstance(param, FlatShard)]
    found = [
        (param, key, value)
        for param in shards
        for key, value in optimizer.state[param].items()
        if isinstance(value, Tensor) and not isinstance(value, FlatShard)
    ]
    scalar_keys = find_scalar_keys((key, value.shape, param.shape) for param, key, value in found)
    full_size = [
        (param, key, value)
        for param, key, value in found
        if value.numel() != 1 or (param.numel() == 1 and key not in scalar_keys)
    ]
    for param, key, value in full_size:
        spec = param._shard_spec
        if is_dtensor(value) and spec.tensor_parallel is None:
            raise ValueError(
                f"the state '{key}' of '{spec.label.fqn}' is a DTensor, which is cut in another "
                "way than the parameter. Load it by set_optimizer_state_dict, on all ranks."
            )
        if value.shape != param.shape and spec.owner is None:
            raise ValueError(
                f"the state '{key}' of '{spec.label.fqn}' {tuple(spec.shape)} has shape "
                f"{tuple(value.shape)}: it can't be cut like the parameter. Use an elementwise "
                'optimizer, or granularity="param".'
            )
    for param, key, value in full_size:
        if value.shape == param.shape:
            # Offloading may have moved the parameter to another device.
            shard = FlatShard.from_full(value, param._shard_spec).to(param.device)
            optimizer.state[param][key] = shard
    for param in filter(is_owned_by_other_rank, shards):
        del optimizer.state[param]


def has_stepped(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has state of a parameter."""
    return any(isinstance(key, Tensor) for key in optimizer.state)


@contextmanager
def made_state(optimizer: Optimizer) -> Iterator[None]:
    """Give an optimizer the state that a step with zero gradients makes, in the block alone.

    Everything that the step changes is as before afterwards: parameters, gradients, groups, numbers
    that the optimizer has, and random number generators. So its first step is the one that it would
    have been. For torch's optimizers the state is that before a first step. Takes memory for a copy
    of the parameters. No communication for elementwise optimizers.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    kept = [(param.grad, param.detach().clone()) for param in params]
    contents = [*optimizer.param_groups, vars(optimizer)]
    before = [{**content} for content in contents]
    state = {**optimizer.state}
    is_torchs = type(optimizer).step.__module__.startswith("torch.optim.")
    try:
        for content in contents:
            plain = {k: v for k, v in content.items() if k != "state" and _is_plain(v)}
            content.update({name: _copied(value) for name, value in plain.items()})
        optimizer.state.update({key: copy.deepcopy(value) for key, value in state.items()})
        _step_on_zeros(optimizer, params, is_torchs=is_torchs)
        _restore(contents, before)
        if is_torchs:
            _set_to_start(optimizer)
        yield
    finally:
        _restore(contents, before)
        optimizer.state.clear()
        optimizer.state.update(state)
        with torch.no_grad():
            for param, (grad, value) in zip(params, kept, strict=True):
                param.grad = grad
                param.copy_(value)


def _step_on_zeros(optimizer: Optimizer, params: list[Tensor], *, is_torchs: bool) -> None:
    """Take a step with zero gradients; of torch's optimizers one that leaves no trace in state."""
    with torch.random.fork_rng():
        for group in optimizer.param_groups:
            for name in _ZEROED & group.keys() if is_torchs else ():
                group[name] = group[name] * 0
        if is_torchs and not isinstance(optimizer, torch.optim.Rprop):  # a size, not a factor
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * 0
        for param in params:
            wants_state = param.requires_grad and not is_owned_by_other_rank(param)
            param.grad = torch.zeros_like(param) if wants_state else None
        with torch.enable_grad():
            optimizer.step()


_ZEROED = frozenset({"weight_decay"})  # options that would leave a trace in momenta
_START = {"step": 0.0, "mu_product": 1.0, "mu": 1.0}  # of torch's optimizers


def _set_to_start(optimizer: Optimizer) -> None:
    """Give the numbers in the state of a torch optimizer the values before its first step."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            for name, value in optimizer.state.get(param, {}).items():
                # The groups must have their own values again: the step on zeros set lr to 0.
                start = group["lr"] if name == "eta" else _START.get(name)
                if start is not None and isinstance(value, Tensor):
                    value.fill_(start)
                elif name == "ax":
                    value.zero_()


_NUMBERS = bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device


def _is_plain(value: object) -> bool:
    """Return whether a value is one that a step may change: numbers, a tensor, lists of numbers."""
    if isinstance(value, dict):
        return all(map(_is_number, [*value, *value.values()]))
    if isinstance(value, list | tuple | set | deque):
        return all(map(_is_number, value))
    return isinstance(value, _NUMBERS) or _is_tensor(value)


def _is_number(value: object) -> bool:
    is_container = isinstance(value, dict | list | tuple | set | deque)
    return _is_plain(value) if is_container else isinstance(value, _NUMBERS)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _restore(contents: list[dict[str, Any]], before: list[dict[str, Any]]) -> None:
    """Give groups and attributes the values, and the objects, of before."""
    for content, values in zip(contents, before, strict=True):
        for name in [name for name in content if name not in values and _is_plain(content[name])]:
            del content[name]
        content.update(values)


def find_scalar_keys(
    tensors: Iterable[tuple[str, torch.Size, torch.Size]],
) -> frozenset[str]:
    """Return the keys of state that is one number for each parameter.

    A parameter of one element does not show it. Then the shapes of other parameters' state of this
    key decide, or else torch's own names.

    Args:
        tensors: Key and shape of each state tensor, and its parameter's shape.
    """
    told = {key: shape != wanted for key, shape, wanted in tensors if wanted.numel() != 1}
    found = {key for key, is_scalar in told.items() if is_scalar}
    return frozenset(found | (_SCALAR_KEYS - told.keys()))


def with_local_state(kind: type[_O]) -> type[_O]:
    """Return a class derived from a low-bit optimizer of torchao, whose state is that of shards.

    Example: `AdamW8bit = with_local_state(torchao.optim.AdamW8bit)`. These classes quantise their
        state in blocks, and of sharded tensors they support only DTensors. With
        `fully_shard(granularity=Block(n))`, where n is a multiple of their `block_size`, each block
        has the same elements as without sharding.

    Args:
        kind: AdamW8bit, AdamW4bit, AdamWFp8 or another class with their method `_new_buffer`.
    """

    class Local(kind):  # type: ignore[valid-type,misc] # a class that is given
        def _new_buffer(self, param: Tensor, signed: bool) -> Tensor:
            if not isinstance(param, FlatShard):
                made: Tensor = super()._new_buffer(param, signed)
                return made
            return wrap(super()._new_buffer(param._local.detach(), signed), param._shard_spec)

    Local.__name__, Local.__qualname__ = kind.__name__, kind.__qualname__
    return Local
