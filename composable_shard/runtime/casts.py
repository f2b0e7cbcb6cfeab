"""Casts of the inputs, outputs and buffers of a unit, and the broadcast of its buffers.

[Note: When buffers are broadcast]
Ranks see different data, so their batch statistics drift apart between two broadcasts. A forward
broadcasts if the forward before it was for training and its gradients were synchronised. So
microbatches without synchronisation keep what they add to each rank's buffers until the step, and
an evaluation sees the same values everywhere for one broadcast. A unit that runs several times in
a call broadcasts once; a recomputation in a backward broadcasts nothing.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.jit import ScriptModule

from composable_shard.comm import ShardGroup, collectives
from composable_shard.tensor import FlatShard
from composable_shard.torch_private import (
    buffers_of,
    foreach_copy_,
)


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in `value`, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (str, bytes, int, float, type(None))):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from iter_tensors(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from iter_tensors(item)
    else:
        for name in _attributes(value):
            yield from iter_tensors(getattr(value, name))


def _attributes(value: Any) -> list[str]:
    """Return the attributes of a dataclass or plain result object that may hold tensors.

    A module in an output keeps its parameters and buffers: they are the model's, not results.
    """
    if isinstance(value, (type, nn.Module)):
        return []
    if dataclasses.is_dataclass(value):
        names = [entry.name for entry in dataclasses.fields(value)]
        return [name for name in names if hasattr(value, name)]
    # One level of attributes is what users write.
    kinds = (Tensor, Mapping, list, tuple)
    return [
        name for name, item in getattr(value, "__dict__", {}).items() if isinstance(item, kinds)
    ]


def map_tensors(
    value: Any, fn: Callable[[Tensor], Tensor], *, looks_into_objects: bool = True
) -> Any:
    """Return `value` with `fn` applied to every tensor in it.

    Containers and objects in which a tensor changes are replaced by shallow copies, because the
    model or its caller may keep the originals: a running state, a cache, a batch. Unless
    `looks_into_objects`, objects that are neither containers nor dataclasses are left alone. So are
    modules, always.
    """
    if isinstance(value, Tensor):
        return fn(value)
    mapped = partial(map_tensors, fn=fn, looks_into_objects=looks_into_objects)
    if isinstance(value, (list, tuple, set, frozenset)):
        return _map_sequence(value, mapped)
    if isinstance(value, Mapping):
        items = list(value.items())
    elif looks_into_objects or dataclasses.is_dataclass(value):
        items = [(name, getattr(value, name)) for name in _attributes(value)]
    else:
        return value
    changed = {key: new for key, old in items if (new := mapped(old)) is not old}
    if not changed:
        return value
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)({**value, **changed})  # type: ignore[call-arg]
    twin = _copied(value)
    for key, new in changed.items():
        if isinstance(twin, MutableMapping):
            twin[key] = new
        else:
            # Past a frozen dataclass's own __setattr__.
            object.__setattr__(twin, key, new)
    return twin


def _map_sequence(value: Any, mapped: Callable[[Any], Any]) -> Any:
    items = [mapped(item) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    if isinstance(value, list):
        twin = _copied(value)
        twin[:] = items
        return twin
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _copied(value: Any) -> Any:
    try:
        return copy.copy(value)
    except Exception as error:
        raise RuntimeError(
            f"can't copy the {type(value).__name__} that a forward takes or returns, in which "
            "tensors are replaced (they are cast, or of earlier graphs, or views of full "
            f"parameters): {error}. Give the class a __copy__ that works, or pass a dict."
        ) from error


def cast_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return arguments with all floating-point tensors in them cast; None if none needs a cast.

    The caller's containers stay as they are, and so do objects that are not containers, such as a
    cache that the forward writes to.
    """
    cast = partial(_cast, dtype)
    new_args, new_kwargs = (
        map_tensors(given, cast, looks_into_objects=False) for given in (args, kwargs)
    )
    if new_args is args and new_kwargs is kwargs:
        return None
    return new_args, new_kwargs


def cast_output(output: Any, dtype: torch.dtype) -> Any:
    """Return the output with all floating-point tensors in it cast, as `map_tensors` does it.

    What the model or the caller keeps of it, such as a state in fp32, is not cast. Neither are
    sharded parameters, which an optimizer may hold.
    """
    return map_tensors(output, partial(_cast_result, dtype))


def _cast_result(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, FlatShard) else _cast(dtype, tensor)


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor


def cast_buffers(modules: list[nn.Module], kept: list[nn.Module], dtype: torch.dtype) -> None:
    """Cast the floating-point buffers that `modules` themselves hold, except inside `kept`."""
    left_alone = {id(module) for root in kept for module in root.modules()}
    done: dict[int, Tensor] = {}  # modules may share a buffer
    for module in modules:
        for name, buffer in buffers_of(module).items():
            if buffer is None or id(module) in left_alone:
                continue
            done.setdefault(id(buffer), _cast(dtype, buffer))
            buffers_of(module)[name] = done[id(buffer)]


class Boundary:
    """The hooks of a module inside a unit that computes in the main dtype.

    They cast arguments to the dtype of the module's parameters, and the output to the dtype of the
    arguments.
    """

    def __init__(self) -> None:
        self._incoming: torch.dtype | None = None

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Cast the arguments."""
        dtypes = _floating(iter_tensors((args, kwargs)))
        self._incoming = next(dtypes, None)
        own = next(_floating(chain(module.parameters(), module.buffers())), torch.float32)
        return cast_arguments(args, kwargs, own)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Cast the output."""
        return output if self._incoming is None else cast_output(output, self._incoming)


def _floating(tensors: Any) -> Iterator[torch.dtype]:
    return (tensor.dtype for tensor in tensors if tensor.is_floating_point())


class BufferBroadcast:
    """Broadcasts the buffers that a unit's modules hold when it runs.

    Refers to the modules' dicts of buffers, never to modules, which would refer back to it.
    """

    def __init__(self, modules: Sequence[nn.Module], shard_group: ShardGroup) -> None:
        self.shard_group = shard_group  # the ranks that take part
        # A ScriptModule's is no dict, and has no copy; `check_can_broadcast` found it empty.
        self._slots = [each for each in map(buffers_of, modules) if isinstance(each, dict)]
        self._is_due = True

    def describe(self) -> list[str]:
        """Return one line for each buffer: all that the ranks must agree on."""
        return [
            f"buffer '{name}' shape {tuple(buffer.shape)} {buffer.dtype}"
            for slots in self._slots
            for name, buffer in slots.items()
            if buffer is not None
        ]

    def broadcast_if_due(self, *, is_followed: bool) -> None:
        """Broadcast if it is due, see [Note: When buffers are broadcast].

        Sends all buffers of the unit as bytes in one broadcast; on a 2-D mesh without a group of
        all its ranks in two, one along each axis. `is_followed`: the next forward broadcasts too.
        """
        if self._is_due:
            self._broadcast()
        self._is_due = is_followed

    @torch.no_grad()
    def _broadcast(self) -> None:
        buffers = self._collect()
        if not buffers or not self.shard_group.joint_groups:
            return
        flat = torch.cat([buffer.flatten().view(torch.uint8) for buffer in buffers])
        for group in self.shard_group.joint_groups:
            collectives.broadcast(flat, 0, group, what="the buffers of a unit").wait()
        if self.shard_group.is_first:
            return
        parts = flat.split([buffer.nbytes for buffer in buffers])
        received = [
            part.view(buffer.dtype).view(buffer.shape)
            for part, buffer in zip(parts, buffers, strict=True)
        ]
        foreach_copy_(buffers, received)

    def _collect(self) -> list[Tensor]:
        """Return the buffers, each once, widest dtype first, so that their bytes are aligned.

        Returns aliases with separate version counters: a pending graph may have saved a buffer that
        its backward does not read, for example batch norm's running mean.
        """
        found: dict[int, Tensor] = {}
        for slots in self._slots:
            for buffer in slots.values():
                if buffer is not None and buffer.numel():
                    local = buffer.to_local() if isinstance(buffer, DTensor) else buffer
                    found.setdefault(id(buffer), local.data)
        return sorted(found.values(), key=lambda buffer: -buffer.dtype.itemsize)


def check_can_broadcast(modules: Sequence[nn.Module]) -> None:
    """Check that the buffers of a unit can be broadcast."""
    for module in modules:
        if isinstance(module, ScriptModule) and len(buffers_of(module)):
            raise NotImplementedError(
                f"broadcast_buffers=True can't find the buffers of a {type(module).__name__} "
                "(torch.jit.script or trace). Leave broadcast_buffers out for its unit."
            )
        for name, buffer in buffers_of(module).items():
            if buffer is not None and buffer.layout is not torch.strided:
                raise ValueError(
                    f"broadcast_buffers=True can't send buffer '{name}' of "
                    f"{type(module).__name__}, which has layout {buffer.layout}. Make it dense, or "
                    "leave broadcast_buffers out for its unit."
                )
