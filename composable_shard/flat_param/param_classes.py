"""The classes of unsharded parameters: what they note, what they refuse, and their `.grad`.

`UnshardedParameter` and `UnshardedDTensor` (in `unsharded_dtensors`, which is imported when the
first of them is made) are what modules compute with. Their `.grad` is a `GradientAtRest` where the
sharded parameter has a gradient. All parameters of one flat parameter share one `Aliases`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from composable_shard.dtensors import is_dtensor
from composable_shard.flat_param.kept_params import ALL, Kept, KeptMeta, shown_for, values_for
from composable_shard.flat_param.readers import HIDDEN_ALIAS, Readers
from composable_shard.tensor import (
    FlatShard,
    HiddenGradient,
    NeverStepped,
    is_trainable,
    own_gradient,
    set_gradient,
)
from composable_shard.torch_private import (
    DisableTorchFunctionSubclass,
    can_change_data,
    disabled_torch_function,
    is_compiling,
    running,
)


def _no_handle() -> None:
    return None


class Aliases:
    """Notes that the parameters of one flat parameter share."""

    __slots__ = (
        "handle",
        "has_new_flags",
        "left",
        "overwritten",
        "readers",
        "torch_function",
    )

    def __init__(self, readers: Readers | None = None) -> None:
        self.readers = readers or Readers()
        self.handle: Callable[[], Any] = _no_handle  # until gradients are hooked
        # Positions whose gradient the user set; whether there was one at rest, which it replaces.
        self.left: dict[int, bool] = {}
        self.has_new_flags = False  # `requires_grad` of a parameter was set
        # By position: the gradient has overwritten the value; None: no value can be overwritten.
        self.overwritten: Sequence[bool] | None = None
        self.torch_function: Any = disabled_torch_function  # [Note: Kept objects]

    def gradient_at_rest(self, param: UnshardedParameter) -> GradientAtRest | None:
        """Return what stands for the gradient of the parameter at rest; None if it has none."""
        handle, position = self.handle(), param.shard_position
        if handle is None:
            return None
        entry, grad = handle.shown.form.gradient_at(position, handle.grads.used)
        if grad is None:
            return None
        stand_in = GradientAtRest(entry.sharded, grad, param.dtype, param.device)
        stand_in.full = param
        return stand_in

    def change_gradient(self, param: UnshardedParameter, value: Tensor | None) -> None:
        """Set the gradient of a full parameter, or with None drop it; drop that at rest."""
        at_rest, position = self.gradient_at_rest(param), param.shard_position
        self.check_can_change(param, value)
        set_gradient(param, value)
        if at_rest is not None:
            handle = self.handle()
            handle.drop_gradient(handle, position)
        if value is None:
            self.left.pop(position, None)
        else:
            self.left[position] = at_rest is not None or self.left.get(position, False)

    def check_can_change(self, param: UnshardedParameter, value: object) -> None:
        """Check that the gradient of a full parameter may be set, or with None dropped."""
        if (handle := self.handle()) is None:
            return
        if handle.guard.is_backward_running:
            raise RuntimeError(
                f"the gradient of parameter '{param.shard_label}' was set or dropped inside a "
                "backward, which may have taken it already. Do it after backward() has returned."
            )
        if value is not None and (param.shard_position == ALL or not is_trainable(param)):
            raise RuntimeError(
                f"no gradient can be set on the full parameter '{param.shard_label}', which is "
                "frozen or stands for others. Call requires_grad_(True) or register_orig_params("
                "module) before, or set the gradient after reshard(module)."
            )

    def check_can_copy(self, param: Any) -> None:
        """Check that no gradient has taken the place of a value, for a copy without an alias."""
        bits = self.readers.bits
        self.enter_hidden_alias(param)
        self.readers.bits = bits

    def enter_hidden_alias(self, param: UnshardedParameter) -> None:
        """Enter whoever takes an alias of a parameter; raise if a gradient has taken its place."""
        self.readers.add(HIDDEN_ALIAS)
        if self.overwritten is not None and self.overwritten[param.shard_position]:
            raise RuntimeError(
                f"the value of parameter '{param.shard_label}' was asked for in a backward in "
                f"which its gradient has taken its place. {EDIT_LATER}"
            )


EDIT_LATER = (
    "Read and edit parameters after backward() has returned, or in the backward hook of a module "
    "(register_full_backward_hook). Further backwards keep the values of this unit."
)


class UnshardedParameter(Kept, NeverStepped, nn.Parameter, metaclass=KeptMeta):
    """A parameter that notes when an alias is taken of it that autograd can't see.

    The gradient may overwrite the value once autograd is done with the parameter. A node that
    computes with `param.detach()` or `param.data` may run later, and with `.data` not even the
    version counter would show it. See [Note: Packing in place].
    """

    # The dict is that of the sharded parameter. Users may have attributes of shorter names.
    __slots__ = ("shard_alias", "shard_aliases", "shard_label", "shard_position")
    shard_aliases: Aliases
    shard_position: int
    shard_label: object
    shard_alias: Tensor | None  # its version counts edits through `.data`

    def __new__(
        cls,
        data: Tensor,
        requires_grad: bool = True,
        noted: tuple[object, Aliases, int] | None = None,
    ) -> UnshardedParameter:
        """Make a parameter with a label, notes and a position; a copy has defaults."""
        self = super().__new__(cls, data, requires_grad)
        self.shard_label, self.shard_aliases, self.shard_position = noted or ("?", Aliases(), 0)
        self.shard_alias = None
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain parameter with a copy of the values, which is never freed."""
        found = values_for(self)
        return (as_plain(self) if found is self else found).__reduce_ex__(protocol)

    def detach(self) -> Tensor:
        """Return a detached alias, as any tensor's does."""
        if any(running("torch.nn.parameter", "__new__")):
            raise RuntimeError(
                f"a parameter can't be made of the full values of '{self.shard_label}', which are "
                "freed after the forward. Compute with the parameter itself, or make one of a "
                "copy: nn.Parameter(weight.detach().clone())."
            )
        if (found := values_for(self)) is not self:
            return found.detach()  # type: ignore[no-any-return]
        self.shard_aliases.enter_hidden_alias(self)
        return super().detach()

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trainable; a change counts from the end of the forward on."""
        return is_trainable(self)

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        if (shown := shown_for(self)) is not self:
            shown.requires_grad = flag
            return
        Tensor.requires_grad.__set__(self, flag)  # type: ignore[attr-defined]
        self.shard_aliases.has_new_flags = True

    @property
    def grad(self) -> Tensor | None:
        """What stands for the gradient at rest, if there is one; else what the user has set.

        Setting None drops it. A tensor replaces it, and is reduced after `reshard`.
        """
        if (shown := shown_for(self)) is not self:
            return shown.grad  # type: ignore[no-any-return]
        at_rest = None if is_compiling() else self.shard_aliases.gradient_at_rest(self)
        return own_gradient(self) if at_rest is None else at_rest

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if (shown := shown_for(self)) is not self:
            shown.grad = value
        elif isinstance(value, GradientAtRest):
            _check_stands_for(value, self)  # `grad += x` gives it back
        else:
            self.shard_aliases.change_gradient(self, value)

    def requires_grad_(self, requires_grad: bool = True) -> UnshardedParameter:
        """Set `requires_grad` and return the parameter."""
        self.requires_grad = requires_grad
        return self

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Raise: the hook would run when the gradient has left the parameter."""
        if (shown := shown_for(self)) is not self:
            return shown.register_post_accumulate_grad_hook(hook)
        raise RuntimeError(
            f"a hook on the gradient of the full parameter '{self.shard_label}' would find none. "
            "Register it before unshard(module) or after reshard(module): there it runs with the "
            "reduced gradient. register_hook sees this rank's own."
        )

    def numpy(self, *, force: bool = False) -> Any:
        """Return an array, as any tensor does; from then on gradients overwrite no values."""
        if (found := values_for(self)) is not self:
            return found.numpy(force=force)
        self.shard_aliases.enter_hidden_alias(self)
        return super().numpy(force=force)

    @property
    def data(self) -> Tensor:
        """A detached alias with a version counter of its own, as any tensor's is."""
        if any(running("torch._functorch._aot_autograd.runtime_wrappers", "__torch_dispatch__")):
            return super().data  # the compiler checks its class, around the first run of a graph
        if (found := values_for(self)) is not self:
            return found.data  # type: ignore[no-any-return]
        self.shard_aliases.enter_hidden_alias(self)
        alias: Tensor | None = self.shard_alias
        if alias is None:
            alias = self.shard_alias = super().data
        return alias.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if (shown := shown_for(self)) is not self:
            shown.data = value
        elif not _is_same_memory(self, value):
            refuse_other_data(self.shard_label)

    def set_(self, *args: Any, **kwargs: Any) -> UnshardedParameter:
        """Return the parameter if it is given its own data; others would be no view of the buffer.

        A parametrization that is registered gives a parameter its own data.
        """
        if (shown := shown_for(self)) is not self:
            shown.set_(*args, **kwargs)
        elif len(args) != 1 or kwargs or not _is_same_memory(self, args[0]):
            refuse_other_data(self.shard_label)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a plain parameter with a copy of the values, which an optimizer may step.

        With its unit: the parameter that the copied unit will have.
        """
        if id(self) in memo:
            return memo[id(self)]
        handle = self.shard_aliases.handle()
        if handle is not None and id(handle) in memo:
            return _copy_unbuilt(self, memo)
        found = values_for(self)
        memo[id(self)] = as_plain(self) if found is self else copy.deepcopy(found, memo)
        return memo[id(self)]


class NotBuiltParameter(UnshardedParameter):  # type: ignore[metaclass]
    """What a copied program has kept of a unit, before the copy's first forward."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        """Raise: it has no values yet."""
        flat = [item for arg in args for item in (arg if isinstance(arg, list | tuple) else [arg])]
        labels = [item.shard_label for item in flat if isinstance(item, NotBuiltParameter)]
        raise RuntimeError(
            f"a full parameter '{labels[0] if labels else '?'}' that a forward has kept was read "
            "in a copy of the model before the forward of its unit, which gives it values. Call "
            "the copy, or read the module's own parameter: p.full_tensor()."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return another one, that of the copy's copy."""
        return memo[id(self)] if id(self) in memo else _copy_unbuilt(self, memo)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override] # the stub returns Any
        return f"<full parameter '{self.shard_label}' of a copied model before its first forward>"


def _copy_unbuilt(param: UnshardedParameter, memo: dict[int, Any]) -> UnshardedParameter:
    with torch.inference_mode(False), DisableTorchFunctionSubclass():
        empty = torch.empty(0, dtype=param.dtype, device=param.device)
    twin = NotBuiltParameter(empty, False, (param.shard_label, Aliases(), param.shard_position))
    memo[id(param)] = twin
    return twin


def copy_unsharded(param: nn.Parameter | None, memo: dict[int, Any]) -> nn.Parameter | None:
    """Return what a copied handle's parameter will be, as programs may have kept the object."""
    return copy.deepcopy(param, memo) if isinstance(param, UnshardedParameter) else None


class GradientAtRest(HiddenGradient):
    """The `.grad` of a full parameter whose sharded one has a gradient, `reduced`."""

    full: UnshardedParameter | None = None  # None: a copy that `.to()` has made

    def __iadd__(self, other: Any) -> GradientAtRest:  # type: ignore[misc]
        """Let `full.grad += other` wait for a reduction, which adds it to the gradient at rest."""
        _check_stands_for(self, full := self.full)
        if full is None or getattr(self.reduced, "_shard_spec", self._shard_spec).owner is not None:
            return self._local  # other ranks don't know whether there is a gradient
        full.shard_aliases.check_can_change(full, other)
        own = own_gradient(full)
        own = torch.zeros_like(full) if own is None else own
        own += other
        set_gradient(full, own)
        full.shard_aliases.left[full.shard_position] = True
        return self


def _check_stands_for(stand_in: GradientAtRest, full: UnshardedParameter | None) -> None:
    """Raise unless this stands for the gradient that the full parameter has at rest now."""
    now = None if full is None else full.shard_aliases.gradient_at_rest(full)
    if now is None or now.reduced is not stand_in.reduced or full is not stand_in.full:
        stand_in._local  # noqa: B018 -- raises


class KeptDTensor(Kept, NeverStepped):
    """What `UnshardedDTensor` has beside DTensor, for `isinstance` without an import of DTensor."""

    __slots__ = ()
    shard_label: object = "?"
    shard_aliases = Aliases()
    shard_position = 0
    grad = UnshardedParameter.grad
    register_post_accumulate_grad_hook = UnshardedParameter.register_post_accumulate_grad_hook
    _local_tensor: Tensor


def as_plain(param: Any) -> nn.Parameter:
    """Return a plain parameter with a copy of the values; raise if they are not there."""
    param.shard_aliases.check_can_copy(param)
    return nn.Parameter(Tensor.detach(param).clone(), is_trainable(param))


def _is_same_memory(param: Tensor, value: object) -> bool:
    """Return whether a value is the parameter's own data, as of a conversion that changes none."""
    if not isinstance(value, Tensor) or value.is_meta or isinstance(value, FlatShard):
        return False
    return value is param or (
        value.data_ptr() == param.data_ptr()
        and (value.shape, value.stride(), value.dtype, value.device)
        == (param.shape, param.stride(), param.dtype, param.device)
    )


def refuse_other_data(label: object) -> NoReturn:
    """Raise: the parameter would be no view of the buffer any more."""
    raise RuntimeError(
        f"parameter '{label}' can't be given other data (`param.data = ...`, `set_()`) while its "
        "full values are shown. Write into it instead, for example `param.copy_(value)` under "
        "torch.no_grad(), in unshard_params(module)."
    )


def note_on_dtensor(param: Any, noted: tuple[object, Aliases, int]) -> None:
    """Give a DTensor its label, notes and position, of which its class has defaults."""
    names = "shard_label", "shard_aliases", "shard_position"
    param.__dict__.update(zip(names, noted, strict=True))


def can_hold(kept: nn.Parameter, dense: Tensor) -> bool:
    """Return whether the object that programs may have kept can be the parameter of new values."""
    if isinstance(kept, KeptDTensor) and is_dtensor(dense):
        return kept.dtype == dense.dtype and kept.device == dense.device
    is_plain = isinstance(kept, UnshardedParameter) and type(dense) is Tensor
    return is_plain and can_change_data(kept, dense)


def hold_values(kept: nn.Parameter, dense: Tensor, noted: tuple[object, Aliases, int]) -> None:
    """Make an unsharded parameter the one of other values: a forward may have kept the object."""
    flag = dense.is_floating_point() or dense.is_complex()
    set_gradient(kept, None)
    if isinstance(kept, UnshardedParameter):
        # First: by notes of its own it stands for no other, [Note: Kept objects].
        kept.shard_label, kept.shard_aliases, kept.shard_position = noted
        Tensor.requires_grad.__set__(kept, False)  # type: ignore[attr-defined] # for integers
        Tensor.data.__set__(kept, dense)  # type: ignore[attr-defined]
        Tensor.requires_grad.__set__(kept, flag)  # type: ignore[attr-defined]
        kept.shard_alias = None
    elif isinstance(kept, KeptDTensor) and is_dtensor(dense):
        note_on_dtensor(kept, noted)
        kept._local_tensor = dense._local_tensor
        kept.requires_grad_(flag)
