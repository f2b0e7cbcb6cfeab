"""`ScopeParams`: the parameters that `unshard_params` shows.

They show the full values for the length of one scope. They live in a buffer of their own,
not in the handle's: edits that are not written back are gone with it, a backward that waits for the
scope's end finds what it saved, and tensors that users took from the parameters (a `state_dict()`,
a view) stay readable as long as they are kept, for the buffer's storage is dropped, never resized
to nothing. The parameters themselves end with the scope.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from composable_shard.dtensors import is_dtensor
from composable_shard.flat_param.entries import ParamEntry
from composable_shard.flat_param.kept_params import ALL
from composable_shard.layout import FlatLayout
from composable_shard.tensor import (
    DTensorSlots,
    FlatShard,
    HiddenGradient,
    ParamLabel,
    copy_attributes,
    user_attributes,
)
from composable_shard.torch_private import pre_accumulate_hooks_of


class ScopeParams:
    """The parameters of one handle inside `unshard_params`."""

    def __init__(self, entries: Sequence[ParamEntry], layout: FlatLayout, buffer: Tensor) -> None:
        self._entries = entries
        self._layout = layout
        self.buffer = buffer  # shape `(layout.padded_numel,)`, the full values
        # Views of the buffer, in order. .data: each parameter gets a version counter of its own.
        self.params = [
            _make_param(entry, self._part(buffer.data, index))
            for index, entry in enumerate(entries)
        ]
        self._values = [_dense(param) for param in self.params]
        self._attributes = [user_attributes(param) for param in self.params]
        self.grad_buffer: Tensor | None = None  # full gradients, of the same shape
        self._grads: list[Tensor | None] = [None] * len(self.params)
        self._flat: nn.Parameter | None = None
        self._flat_grad: Tensor | None = None

    def _part(self, flat: Tensor, index: int) -> Tensor:
        start = self._layout.offsets[index]
        return flat[start : start + self._layout.numels[index]]

    def show_gradients(self, buffer: Tensor, has_gradient: Sequence[bool]) -> None:
        """Give parameters `.grad`, as views of `buffer`."""
        self.grad_buffer = buffer
        for index, entry in enumerate(self._entries):
            if has_gradient[index]:
                grad = entry.spec.show(self._part(buffer, index))
                self._grads[index] = grad
                self.params[index].grad = grad

    def hide_gradients(self, at_rest: Sequence[ParamEntry], are_hidden: Sequence[bool]) -> None:
        """Let `.grad` stand for the gradients that aren't shown, see `dropped_gradients`."""
        holders = at_rest if at_rest is self._entries else [*at_rest] * len(self.params)
        for index, (param, entry) in enumerate(zip(self.params, self._entries, strict=True)):
            if are_hidden[index] and holders[index].sharded.grad is not None:
                grad = HiddenGradient(entry.sharded, None, param.dtype, param.device)
                self._grads[index] = param.grad = grad

    def shown_at(self, position: int, at_rest: FlatShard) -> nn.Parameter:
        """Return what is shown in place of a full parameter, or of `ALL`."""
        return self._flat_param(at_rest) if position == ALL else self.params[position]

    def _flat_param(self, at_rest: FlatShard) -> nn.Parameter:
        """Return the flat parameter of the full values; the padding at the end is left out."""
        if self._flat is None:
            end = self._layout.end
            self._flat = nn.Parameter(
                self.buffer.data[:end], any(p.requires_grad for p in self.params)
            )
            if self._flat.requires_grad:
                self._flat.register_hook(_refuse_backward)
            if self.grad_buffer is not None:
                self._flat.grad = self._flat_grad = self.grad_buffer[:end]
            elif any(grad is not None for grad in self._grads):
                grad = HiddenGradient(at_rest, None, self._flat.dtype, self._flat.device)
                self._flat.grad = self._flat_grad = grad
        return self._flat

    # Changes that the body made

    def _is_replaced(self, index: int) -> bool:
        now, before = _dense(self.params[index]), self._values[index]
        return (
            now.data_ptr() != before.data_ptr()
            or now.stride() != before.stride()
            or now.dtype != before.dtype
            or now.shape != before.shape
        )

    def collect(self) -> None:
        """Bring values and gradients that were assigned, as by `param.data = x`, into buffers."""
        flat = self._flat
        if flat is not None and flat.data_ptr() != self.buffer.data_ptr():
            _copy_assigned(_FLAT_LABEL, ".data", flat.data, self.buffer[: self._layout.end])
        if flat is not None and flat.grad is not None and self._flat_grad is not None:
            _copy_assigned(_FLAT_LABEL, ".grad", flat.grad, self._flat_grad)
        for index, param in enumerate(self.params):
            label = self._entries[index].label
            if self._is_replaced(index):
                _copy_assigned(label, ".data", _dense(param), self._values[index])
            grad, shown = param.grad, self._grads[index]
            if shown is not None and grad is not None and grad is not shown:
                _copy_assigned(label, ".grad", _local(grad), _local(shown))

    def dropped_gradients(self) -> list[bool]:
        """Return which of the gradients that were shown the body set to None."""
        flat = self._flat
        all_dropped = flat is not None and self._flat_grad is not None and flat.grad is None
        return [
            shown is not None and (all_dropped or param.grad is None)
            for param, shown in zip(self.params, self._grads, strict=False)  # none once expired
        ]

    def new_gradients(self) -> list[str]:
        """Return the names of parameters that got a gradient where none was shown."""
        return [
            str(entry.label)
            for entry, param, shown in zip(self._entries, self.params, self._grads, strict=True)
            if shown is None and param.grad is not None
        ]

    def expire(self) -> None:
        """Release the memory; from now on every use of a parameter raises."""
        for param, entry, before in zip(self.params, self._entries, self._attributes, strict=False):
            _return_attributes(param, entry.sharded, before)
        self._attributes = []
        params = self.params if self._flat is None else [*self.params, self._flat]
        labels = [entry.label for entry in self._entries] + [_FLAT_LABEL]
        for param, label in zip(params, labels, strict=False):
            param.grad = None
            if is_dtensor(param):
                param._local_tensor = param._local_tensor.new_empty(0)
            else:
                # Of the same device: torch lets `.data` change it for its own devices alone.
                param.data = torch.empty(0, dtype=param.dtype, device=param.device)
            param.__dict__["_expired_label"] = label
            expired: Any = _ExpiredDTensor if is_dtensor(param) else _ExpiredParameter
            param.__class__ = expired
        # An exception's traceback may keep this object.
        self._values, self._grads, self._flat_grad, self.grad_buffer = [], [], None, None
        self.buffer = self.buffer.new_empty(0)


_FLAT_LABEL = ParamLabel("_flat_param")


def _make_param(entry: ParamEntry, values: Tensor) -> nn.Parameter:
    param = nn.Parameter(entry.spec.show(values), values.is_floating_point() or values.is_complex())
    copy_attributes(param, entry.sharded)
    if param.requires_grad:  # Also on frozen ones, except integers: the body may unfreeze them.
        param.register_hook(_refuse_backward)
    param.requires_grad_(entry.sharded.requires_grad)
    return param


def _return_attributes(param: Tensor, sharded: Tensor, before: dict[str, Any]) -> None:
    """Set or delete at rest the attributes that the body of a scope has set or deleted."""
    now = user_attributes(param)
    for name, value in now.items():
        if name not in before or value is not before[name]:
            sharded.__dict__[name] = value
    for name in before.keys() - now.keys():
        sharded.__dict__.pop(name, None)


def is_shown_by_scope(param: nn.Parameter) -> bool:
    """Return whether an open scope made this parameter."""
    return _refuse_backward in (pre_accumulate_hooks_of(param) or {}).values()


def _refuse_backward(_: Tensor) -> NoReturn:
    raise RuntimeError(
        "a backward inside unshard_params reached parameters that the scope shows: their gradients "
        "would not be reduced. Run forward and backward outside the scope."
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor


def _dense(param: nn.Parameter) -> Tensor:
    return param._local_tensor if is_dtensor(param) else param.data


def _copy_assigned(label: ParamLabel, what: str, value: Tensor, target: Tensor) -> None:
    if value.shape != target.shape or value.dtype != target.dtype or value.device != target.device:
        raise RuntimeError(
            f"expected '{label}'{what} to keep its shape, dtype and device inside unshard_params, "
            f"{tuple(target.shape)} {target.dtype} on {target.device}; it was set to "
            f"{tuple(value.shape)} {value.dtype} on {value.device}. Nothing was written back. "
            "Convert the model outside the scope."
        )
    # Cloned: the values may be a transposed view of where they go.
    if value is not target:
        target.copy_(value.clone())


def _raise_expired(label: object) -> NoReturn:
    raise RuntimeError(
        f"parameter '{label}' was kept beyond its unshard_params scope, which freed its values. "
        "Use the module's own parameters, or clone() inside the scope what you want to keep."
    )


class _Expired:
    """The class of a scope's parameters after its end."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        """Raise: torch comes here with every use of the parameter."""
        flat = [item for arg in args for item in (arg if isinstance(arg, list | tuple) else [arg])]
        labels = [item.__dict__["_expired_label"] for item in flat if isinstance(item, _Expired)]
        _raise_expired(labels[0] if labels else "?")

    def __getattr__(self, name: str) -> Any:
        """Raise: a DTensor has methods that Tensor has not."""
        if name.startswith("_"):
            raise AttributeError(name)
        _raise_expired(self.__dict__["_expired_label"])

    def __repr__(self, **_: Any) -> str:
        return f"<parameter '{self.__dict__['_expired_label']}' of an ended unshard_params scope>"

    def __format__(self, _: str) -> str:
        return repr(self)


class _ExpiredParameter(_Expired, nn.Parameter):  # type: ignore[misc] # __repr__ takes less
    """A parameter of an ended scope."""


class _ExpiredDTensor(_Expired, DTensorSlots):  # type: ignore[misc]
    """A parameter of an ended scope that was a DTensor."""
