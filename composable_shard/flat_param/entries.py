"""The record of each parameter: its objects, the places where modules show it, its spec."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, cast

import torch
from torch import Tensor, nn

from composable_shard.layout import FlatLayout
from composable_shard.options import HIDDEN
from composable_shard.tensor import (
    DIRECT_OPS,
    FlatShard,
    FlatShardOfDTensor,
    ParamLabel,
    ShardSpec,
    WriteGuard,
    explain_read,
    rebind,
)
from composable_shard.torch_private import (
    buffers_of,
    flat_weights_names_of,
    flat_weights_of,
    modules_of,
    parameters_of,
    post_accumulate_hooks_of,
    pre_accumulate_hooks_of,
    set_hooks,
    swap_tensors,
)


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the stride a tensor gets in a flat parameter.

    The tensor's own stride if its elements fill a contiguous range in any order of dims (row-major,
    channels-last, transposed), row-major otherwise (expanded, strided slices).
    """
    expected = 1
    for size, stride in sorted(
        zip(tensor.shape, tensor.stride(), strict=True), key=lambda dim: (dim[1], dim[0])
    ):
        if size == 1:
            continue
        if stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    if any(size == 1 for size in tensor.shape):
        # Strides of dims of size 1 are arbitrary; canonical ones compare equal on all ranks.
        return torch.empty_like(
            torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
        ).stride()
    return tensor.stride()


def zero_gaps(shard: Tensor, layout: FlatLayout, rank: int) -> None:
    """Set the gaps between parameters in a rank's shard to zero, because they count in norms."""
    for gap in shard.split_with_sizes(layout.piece_numels(rank))[::2]:
        gap.zero_()


def zero_padding(full: Tensor, layout: FlatLayout) -> None:
    """Set the padding of a buffer of shape `(layout.padded_numel,)` to zero."""
    for start, end in layout.padding_ranges():
        full[start:end].zero_()


class _Container(Protocol):
    def __getitem__(self, key: Any, /) -> Any: ...
    def __setitem__(self, key: Any, value: Any, /) -> None: ...


# container[key] is where a module shows a parameter; the module, if the key is an attribute's name
Slot = tuple[_Container, Any, "ModuleItems | None"]


class ModuleItems:
    """A container that is found through its module on every access.

    Holds the module weakly: the module's hooks lead to the handle that holds the slot, and a
    strong reference would close a cycle.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)

    def get(self) -> nn.Module:
        """Return the module."""
        module = self.module()
        if module is None:
            raise RuntimeError("the module that shows this parameter was deleted")
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleItems:
        # Hooks are copied before child modules, so the module may not have been reached yet.
        return type(self)(copy.deepcopy(self.module() or nn.Module(), memo))


class _Attributes(ModuleItems):
    """The parameters of a module that overrides `__setattr__`."""

    def __getitem__(self, name: str) -> Any:
        return parameters_of(self.get())[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if (module := self.module()) is not None:
            setattr(module, name, value)


class _FlatWeights(ModuleItems):
    """The list that an RNN's forward reads; RNNBase makes a new one in `.to()` and `to_empty()`."""

    def __getitem__(self, position: int) -> Any:
        return flat_weights_of(self.get())[position]

    def __setitem__(self, position: int, value: Any) -> None:
        if (module := self.module()) is not None:
            flat_weights_of(module)[position] = value


class _KeptItem(ModuleItems):
    """An item of a list or dict in which a program keeps a parameter; the program may change it.

    Stands for the parameter that was shown here last, and shows another only where that still is.
    """

    def __init__(self, module: nn.Module, shown: Tensor) -> None:
        super().__init__(module)
        self._known: tuple[Any, ...] = (shown,)  # an interrupt leaves either of the last two

    def __getitem__(self, path: tuple[Any, ...]) -> Any:
        return self._known[-1]

    def __setitem__(self, path: tuple[Any, ...], value: Any) -> None:
        known = self._known
        self._known = (known[-1], value)
        if (module := self.module()) is None:
            return
        *outer, key = path
        container: Any = vars(module)
        try:
            for each in outer:
                container = container[each]
        except (LookupError, TypeError):
            return  # the program keeps something else there
        if type(container) not in (list, dict):
            return
        keys = range(len(container)) if type(container) is list else container.keys()
        for shown in reversed(known):
            if key not in keys or container[key] is not shown:
                # Moved inside the container, or taken out of it.
                key = next((each for each in keys if container[each] is shown), key)
            if key in keys and container[key] is shown:
                container[key] = value
                return

    def __deepcopy__(self, memo: dict[int, Any]) -> _KeptItem:
        module = copy.deepcopy(self.module() or nn.Module(), memo)
        return type(self)(module, copy.deepcopy(self._known[-1], memo))


class FlatSlot(ModuleItems):
    """The place where a unit's module shows its flat parameter: an entry of `_parameters`."""

    def __init__(self, module: nn.Module, name: str, is_ours: bool = False) -> None:
        super().__init__(module)
        self.name = name
        self._is_ours = is_ours  # False: a user's parameter may be there
        self._shadow: Any = None  # a user's attribute that would hide the shown parameter
        self._shown: Tensor | None = None  # what `show` has set

    def take(self) -> dict[str, Any]:
        """Return the module's dict of parameters, in which the flat parameter will be shown."""
        self._is_ours = True
        return parameters_of(self.get())

    def show(self, flat: Tensor | None) -> None:
        """Show `flat`, or None, among the module's parameters; its position there is kept."""
        if flat is None and not self._is_ours:
            return
        if self.module() is None:
            return  # deleted, as by replacing it in its parent
        self._shown = flat
        attributes = self.get().__dict__
        if self._shadow is not None:
            attributes[self.name], self._shadow = self._shadow, None
        if flat is not None:
            self._shadow = attributes.pop(self.name, None)
        parameters = self.take()
        if flat is not None or self.name in parameters:
            parameters[self.name] = flat

    def remove(self) -> None:
        """Give up the place."""
        if self._is_ours and (module := self.module()) is not None:
            self._is_ours = False
            parameters_of(module).pop(self.name, None)

    def is_free(self, ours: Tensor | None) -> bool:
        """Return whether no attribute of the module but `ours` has the flat parameter's name."""
        module = self.get()
        found = [vars(module).get(self.name), parameters_of(module).get(self.name)]
        taken = [buffers_of(module).get(self.name), modules_of(module).get(self.name)]
        taken.append(getattr(type(module), self.name, None))
        taken += [each for each in found if each is not ours and each is not self._shown]
        return all(each is None for each in taken)

    def is_around(self, module: nn.Module) -> bool:
        """Return whether `module` is in the unit's first module, or is it."""
        outer = self.module()
        return outer is not None and any(each is module for each in outer.modules())

    def keep_reachable(self, flat: Tensor) -> None:
        """Make `flat` a plain attribute of the module, found also while it is not registered."""
        self.get().__dict__[self.name] = flat

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatSlot:
        return type(self)(copy.deepcopy(self.get(), memo), self.name, self._is_ours)


def find_slots(place: ModuleItems, name: str) -> tuple[Slot, ...]:
    """Return every place where a module itself keeps its parameter `name`.

    `place` is the module's; one object serves all its parameters.
    """
    module = place.get()
    if isinstance(module, nn.RNNBase) and name in flat_weights_names_of(module):
        position = flat_weights_names_of(module).index(name)
        return (parameters_of(module), name, place), (_FlatWeights(module), position, None)
    if type(module).__setattr__ is nn.Module.__setattr__:
        return ((parameters_of(module), name, place),)
    return ((_Attributes(module), name, place),)


def find_kept_items(module: nn.Module) -> Iterator[tuple[nn.Parameter, Slot]]:
    """Yield each parameter that a module keeps in a list or dict of its own, and its slot."""
    for name, value in vars(module).items():
        if type(value) in (list, dict) and name not in _OWN_NAMES:
            for path, param in _params_in(value, (name,)):
                yield param, (_KeptItem(module, param), path, None)


_OWN_NAMES = frozenset([*vars(nn.Module()), "_flat_weights"])


def _params_in(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], nn.Parameter]]:
    is_list = type(value) is list
    for key, item in enumerate(value) if is_list else value.items():
        if isinstance(item, Tensor):
            if isinstance(item, nn.Parameter):
                yield (*path, key), item
        elif type(item) in (list, dict) and len(path) < _MAX_DEPTH:
            yield from _params_in(item, (*path, key))


_MAX_DEPTH = 4  # of lists in lists, which may refer to each other


def slot_key(slot: Slot) -> tuple[int, Any]:
    """Return a key that identifies an entry of a module's `_parameters`."""
    container, key, _ = slot
    if isinstance(container, _Attributes):
        container = parameters_of(container.get())
    return id(container), key


def take_place(original: nn.Parameter, replacement: Tensor) -> None:
    """Make the object `original` be `replacement`, keeping its attributes and its hooks.

    `.grad` is left alone, and must be None if its dtype would not fit.
    """
    hooks, late_hooks = pre_accumulate_hooks_of(original), post_accumulate_hooks_of(original)
    replacement.__dict__.update(
        {key: value for key, value in original.__dict__.items() if key not in replacement.__dict__}
    )
    swap_parameter(original, replacement)
    set_hooks(original, hooks, late_hooks)


def swap_parameter(original: nn.Parameter, replacement: Tensor) -> None:
    """Make the object `original` be `replacement`: class, attributes, data; and the reverse.

    Like `torch.utils.swap_tensors`, which refuses tensors with weak references (LSTM and GRU keep
    some to their weights); such references still point to the same object.
    """
    done = []
    try:
        for swap in (_swap_slots, _swap_classes, _swap_attributes, swap_tensors):
            done.append((swap(original, replacement), swap))
    except BaseException:
        # Some of each object would be neither parameter. A swap is its own inverse.
        for _, swap in reversed(done):
            swap(original, replacement)
        raise


def _swap_slots(original: Tensor, replacement: Tensor) -> None:
    for name in ("_local_tensor", "_spec"):
        if hasattr(type(original), name):
            ours, theirs = getattr(original, name, None), getattr(replacement, name, None)
            setattr(original, name, theirs)
            setattr(replacement, name, ours)


def _swap_classes(original: Tensor, replacement: Tensor) -> None:
    original.__class__, replacement.__class__ = type(replacement), type(original)


def _swap_attributes(original: Tensor, replacement: Tensor) -> None:
    original.__dict__, replacement.__dict__ = replacement.__dict__, original.__dict__


def give_back(
    original: nn.Parameter, sharded: Tensor, grad: Tensor | None, attributes: dict[str, Any]
) -> None:
    """Undo `ParamEntry.replace`, also where it has failed or has not begun.

    Args:
        original: The user's Parameter object.
        sharded: The object that was swapped with it.
        grad: Its gradient before.
        attributes: Its attributes before.
    """
    if isinstance(original, FlatShard):
        swap_parameter(original, sharded)
    vars(original).update(attributes)
    original.grad = grad


@dataclass
class ParamEntry:
    """One managed parameter: the object users hold, and the one modules compute with."""

    sharded: FlatShard  # the original Parameter object; spec.shape
    spec: ShardSpec
    slots: tuple[Slot, ...] = ()  # every place that shows it; several if tied
    # spec.shape, a view of the unsharded buffer; printing it without storage would crash
    unsharded: nn.Parameter | None = field(default=None, repr=False)
    shard_view: Tensor | None = None  # (spec's local numel,) view of the local shard
    runs_hooks: bool = False  # `unsharded` runs the hooks that users registered on `sharded`

    @property
    def label(self) -> ParamLabel:
        """The name for messages."""
        return self.spec.label

    def slice_of(self, shard: Tensor) -> Tensor:
        """Return the parameter's part of a tensor of shape `(layout.shard_numel,)`, a view."""
        spec = self.spec
        if spec.index is None:
            start, end = spec.local_range
            return shard[: end - start]
        start, end = spec.layout.local_range(spec.index, spec.rank)
        return shard[start:end]

    def hidden_at(self, place: ModuleItems | None) -> FlatShard | None:
        """Return a slot's value while the parameter is hidden: None if the slot registers it."""
        return self.sharded if place is None else None

    def fill(self, full: Tensor) -> None:
        """Write this rank's part of the parameter's full values, before anything reads the shard.

        Args:
            full: Of the dense shape, on any device.
        """
        assert self.shard_view is not None
        self.shard_view.copy_(self.spec.slice(full))

    def set_slots(self, slots: tuple[Slot, ...]) -> None:
        """Let the parameter be shown in these places alone."""
        self.slots = slots

    def add_slots(self, slots: tuple[Slot, ...]) -> None:
        """Let the parameter be shown in further places."""
        self.slots = self.slots + slots

    def replace(self, original: nn.Parameter) -> None:
        """Turn the original Parameter object into the sharded parameter; attributes carry over.

        `.grad`, which must be None, stays the caller's.
        """
        take_place(original, self.sharded)
        self.sharded = original  # type: ignore[assignment]
        if self.shard_view is None or original.dtype != self.shard_view.dtype:
            raise RuntimeError(
                f"parameter '{self.label}' has {original.dtype} after it was sharded, not that of "
                "its shard; please report this"
            )

    def view_in(self, shard: Tensor, guard: WriteGuard) -> None:
        """Make the sharded parameter a view of its part of a new shard."""
        self.shard_view = self.slice_of(shard).data
        param, view = self.sharded, self.shard_view
        if (
            param.dtype != view.dtype
            or param.device != view.device
            or param.shape != self.spec.shape
        ):
            self.remake(guard)
        rebind(param, view, self.spec, guard)

    def remake(self, guard: WriteGuard) -> None:
        """Give the sharded parameter the dtype, device and shape that the entry has now."""
        param = self.sharded
        shown_class = FlatShardOfDTensor if isinstance(param, FlatShardOfDTensor) else FlatShard
        old_class, flag = type(param), param.requires_grad
        shard = shown_class(cast(Tensor, self.shard_view), self.spec, guard=guard)
        take_place(cast(nn.Parameter, param), nn.Parameter(shard, flag))
        param.__class__ = old_class


@dataclass
class FlatEntry(ParamEntry):
    """The flat parameter as one parameter, which modules can show instead of the originals.

    The padding behind the last parameter is left out of `spec.shape`. `unsharded` is there while
    modules show the full values as one parameter.
    """

    used: list[bool] = field(default_factory=list)  # whose gradients are in its `.grad`


class _HiddenShard(FlatShard):
    """An original parameter while the flat parameter is shown instead.

    [Note: Hidden originals]
    It has no gradient: an optimizer that holds it would step nothing, silently. Modules register
    None in its place, so that names keep their order, and have it as a plain attribute, which is
    found first: a layer that found None would compute without its weight, as norms do. No op runs
    on it, because after `.to()` or `to_empty()` its slice is outdated until the next forward.
    """

    _reason = (
        "its unit shows one flat parameter (use_orig_params=False). Build the optimizer from "
        "model.parameters() after fully_shard, or call register_orig_params(module) first."
    )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stub lacks `func`
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        """Raise: its values may be outdated."""
        given = [*args, *(kwargs or {}).values()]
        flat = [item for arg in given for item in (arg if isinstance(arg, list | tuple) else [arg])]
        hidden = next(item for item in flat if isinstance(item, _HiddenShard))
        raise RuntimeError(
            f"parameter '{hidden._shard_spec.label}' has no values of its own: {hidden._reason} "
            f"{explain_read(hidden) or HIDDEN}{hidden._shard_spec.label.late_remedy}"
        )

    @property
    def grad(self) -> Tensor | None:
        """Raise: the gradient is in the flat parameter's."""
        self._raise_hidden()

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            self._raise_hidden()

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter shown instead is trainable."""
        flag: bool = Tensor.requires_grad.__get__(self)  # type: ignore[attr-defined]
        return flag

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        if flag is not self.requires_grad:
            self._raise_hidden()

    def register_post_accumulate_grad_hook(self, hook: Any) -> NoReturn:
        """Raise: it would never run."""
        self._raise_hidden()

    def _raise_hidden(self) -> NoReturn:
        fqn = self._shard_spec.label.fqn
        raise RuntimeError(f"parameter '{fqn}' has no gradient of its own: {self._reason}")


for _name in DIRECT_OPS:  # direct ops would bypass the dispatcher
    setattr(_HiddenShard, _name, getattr(Tensor, _name))


class _HiddenFlat(_HiddenShard):
    """The flat parameter while the original parameters are shown instead."""

    _reason = (
        "its unit shows its original parameters. Build the optimizer anew from "
        "model.parameters(), or call register_flat_param(module) first."
    )


def hide(param: FlatShard) -> None:
    """Make an original parameter, whose `.grad` is None, raise on access to its gradient."""
    param.__class__ = _HiddenShard


def hide_flat(param: FlatShard) -> None:
    """Make a flat parameter, whose `.grad` is None, raise on access to its gradient."""
    param.__class__ = _HiddenFlat


def unhide(param: FlatShard) -> None:
    """Make a hidden parameter an ordinary FlatShard again."""
    if type(param) in (_HiddenShard, _HiddenFlat):
        param.__class__ = FlatShard


def set_requires_grad(param: FlatShard, flag: bool) -> None:
    """Set the flag of a parameter, even of a hidden one, which refuses users."""
    FlatShard.requires_grad.__set__(param, flag)  # type: ignore[attr-defined]
