"""One flat parameter at rest instead of the originals (`use_orig_params=False`), and the way there.

Whoever asks for it gets a form of two: `FlatForm`, or once it was left again `OriginalsAgain`. The
flat parameter stays, because an optimizer may hold it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from composable_shard.flat_param.entries import ParamEntry, zero_gaps
from composable_shard.flat_param.form import AskedForm, OriginalForm, Place
from composable_shard.flat_param.gradients_at_rest import gradient_shard, has_gradients
from composable_shard.flat_param.handle import FlatParamHandle
from composable_shard.flat_param.hidden import HiddenShard, hide, set_requires_grad, unhide
from composable_shard.flat_param.kept_params import ALL
from composable_shard.flat_param.param_classes import UnshardedParameter
from composable_shard.flat_param.pending_gradients import drop_waiting, unmarked
from composable_shard.flat_param.scopes import Scope
from composable_shard.flat_param.shown import UNSHARDED, Shown
from composable_shard.flat_param.slots import AddedSlot
from composable_shard.flat_param.user_hooks import adopt_hooks
from composable_shard.layout import FlatLayout
from composable_shard.options import FormName
from composable_shard.tensor import (
    FlatShard,
    ShardSpec,
    flat_spec,
    note_write_to_local,
    reduced_gradient,
    refuse_flat_dtensors,
    wrap,
)
from composable_shard.torch_private import (
    post_accumulate_hooks_of,
    pre_accumulate_hooks_of,
)

FLAT_PARAM_NAME = "_flat_param"
UNSHARDED_FLAT = Shown("the full values as one parameter", UNSHARDED)


@dataclass
class FlatEntry(ParamEntry):
    """The flat parameter as one parameter, which modules can show instead of the originals.

    The padding behind the last parameter is left out of `spec.shape`. `unsharded` is there while
    modules show the full values as one parameter.
    """

    used: list[bool] = field(default_factory=list)  # whose gradients are in its `.grad`

    def add_used(self, used: list[bool]) -> list[bool]:
        """Add the parameters whose gradients the flat parameter's `.grad` is about to get.

        Returns:
            Whether it gets any, as a list for that one parameter.
        """
        if self.sharded.grad is None:
            self.used = [False] * len(used)
        self.used = [before or now for before, now in zip(self.used, used, strict=True)]
        return [any(used)]


class _FlatPlace:
    """The place of the flat parameter at rest, as registration walks it.

    With the flat parameter the originals become plain attributes, [Note: Hidden originals]; with
    None instead of it they are what is registered alone.
    """

    def __init__(self, form: FlatForm) -> None:
        self._form = form
        self._parameters = form.slot.reserve()

    def __getitem__(self, name: str) -> Any:
        return self._parameters[name]

    def __setitem__(self, name: str, flat: Tensor | None) -> None:
        self._form.flat.unsharded = None
        self._form.slot.show(None)
        self._form.set_attributes(flat is not None)
        self._parameters[name] = flat


class _Whole:
    """Cuts nothing: the flat parameter's gradient is the whole shard."""

    def __init__(self, flat: FlatEntry) -> None:
        self._flat = flat

    def split(self, shard: Tensor) -> list[Tensor]:
        """Return the shard without the padding at its end."""
        spec = self._flat.spec
        zero_gaps(shard, spec.layout, spec.rank)  # nothing was packed there
        return [self._flat.slice_of(shard)]


class _HiddenOriginal(HiddenShard):
    """An original parameter while the flat parameter is shown instead."""

    reason = (
        "its unit shows one flat parameter (use_orig_params=False). Build the optimizer from "
        "model.parameters() after fully_shard, or call register_orig_params(module) first."
    )


class _HiddenFlat(HiddenShard):
    """The flat parameter while the original parameters are shown instead."""

    reason = (
        "its unit shows its original parameters. Build the optimizer anew from "
        "model.parameters(), or call register_flat_param(module) first."
    )


class OriginalsAgain(OriginalForm):
    """The original parameters, with a flat parameter that stands by.

    Args:
        flat: The flat parameter, a view of the shard.
        slot: Where the unit's module shows it.
    """

    def __init__(self, flat: FlatEntry, slot: AddedSlot) -> None:
        super().__init__()
        self.flat, self.slot = flat, slot
        self.label = flat.label

    def __deepcopy__(self, memo: dict[int, Any]) -> OriginalsAgain:
        sharded = copy.deepcopy(self.flat.sharded, memo)
        used = list(self.flat.used)
        # The parameter's own spec: optimizers compare specs by identity first.
        flat = FlatEntry(sharded, sharded._shard_spec, shard_view=sharded._local, used=used)
        return type(self)(flat, copy.deepcopy(self.slot, memo))

    @property
    def every(self) -> Sequence[ParamEntry]:
        """All that views the shard, shown or not."""
        return [*self.entries, self.flat]

    def follow_layout(self) -> None:
        """Follow the entries, whose places in the shard have changed."""
        spec = flat_spec([entry.spec for entry in self.entries], self.flat.label.fqn)
        self.flat.spec = replace(spec, label=self.flat.label)

    def rename(self, unit_name: str) -> None:
        """Name the flat parameter after its unit."""
        self.flat.label.rename(f"{unit_name}.{self.slot.name}".lstrip("."))

    def show_one(self, flat: Tensor | None) -> None:
        """Make the modules show one parameter, and none of the originals."""
        for entry in self.entries:
            for container, key, place in entry.slots:
                container[key] = entry.hidden_at(place)
        self.set_attributes(True)
        self.slot.show(flat)

    def set_attributes(self, flag: bool) -> None:
        """Make the originals plain attributes, or leave only what is registered."""
        for entry in self.entries:
            for _, key, place in entry.slots:
                module = None if place is None else place.module()
                if module is not None and flag:
                    vars(module)[key] = entry.sharded
                elif module is not None:
                    vars(module).pop(key, None)

    def show(self, params: Sequence[Tensor]) -> None:
        """Make the modules show these in place of the originals."""
        super().show(params)
        self.set_attributes(False)
        self.slot.show(None)

    def show_again(self, places: Sequence[Place], *, is_unsharded: bool) -> None:
        """Make the modules show what is shown at rest or with full values, after others were."""
        self.slot.show(None)
        super().show_again(places, is_unsharded=is_unsharded)
        self.set_attributes(False)
        self.slot.remove()

    def unhide(self) -> None:
        """Allow gradients on all sharded parameters."""
        for each in self.every:
            unhide(each.sharded)

    def hide(self) -> None:
        """Make the flat parameter refuse gradients."""
        self.unhide()
        hide(self.flat.sharded, _HiddenFlat)

    def shown_at(self, position: int, *, is_full: bool = False) -> Any:
        """Return what modules show in place of a full parameter, or of `ALL`."""
        if position != ALL:
            return super().shown_at(position, is_full=is_full)
        return self.flat.unsharded if is_full else self.flat.sharded

    def gradient_at(self, position: int, used: Sequence[bool]) -> tuple[ParamEntry, Tensor | None]:
        """Return the record of a full parameter, or of `ALL`, and its gradient at rest."""
        if position != ALL:
            return super().gradient_at(position, used)
        return self.flat, self.flat.sharded.grad

    def follow_flags(self, flags: Sequence[bool]) -> None:
        """Give the flat parameter the flags of the originals."""
        set_requires_grad(self.flat.sharded, any(flags))

    def check_hooks(self) -> None:
        """Check that the flat parameter has no hook that would never run."""
        if pre_accumulate_hooks_of(self.flat.sharded):
            raise RuntimeError(
                f"the hooks on '{self.flat.label}' (register_hook) would never run: autograd "
                "computes the gradients of the original parameters. Remove them, and use "
                "register_post_accumulate_grad_hook, which sees the reduced gradient, or register "
                "them on the original parameters after register_orig_params(module)."
            )

    def gradient_layout(self, layout: FlatLayout, flags: Sequence[bool]) -> FlatLayout:
        """Return the layout of gradients: the parameters', of which the flat one has all."""
        return layout


class FlatForm(OriginalsAgain):
    """One flat parameter at rest instead of the originals, which are hidden."""

    has_names = False

    def __init__(self, flat: FlatEntry, slot: AddedSlot) -> None:
        super().__init__(flat, slot)
        self.cutter = _Whole(flat)

    def bind(self, entries: list[ParamEntry]) -> None:
        """Become the form of a handle with these parameters."""
        self.entries, self.at_rest = entries, [self.flat]

    def places(self) -> list[Place]:
        """Return the places of parameters in modules, the flat parameter's last."""
        places: list[Place] = [
            (container, key, entry.hidden_at(place), entry.unsharded)
            for entry in self.entries
            for container, key, place in entry.slots
        ]
        return [*places, (_FlatPlace(self), self.slot.name, self.flat.sharded, None)]

    def show_again(self, places: Sequence[Place], *, is_unsharded: bool) -> None:
        """Make the modules show what is shown at rest or with full values, after others were."""
        if self.flat.unsharded is not None:
            self.show_one(self.flat.unsharded)
        else:
            OriginalForm.show_again(self, places, is_unsharded=is_unsharded)

    def hide(self) -> None:
        """Make the originals refuse gradients."""
        self.unhide()
        for entry in self.entries:
            hide(entry.sharded, _HiddenOriginal)

    def gradient_at(self, position: int, used: Sequence[bool]) -> tuple[ParamEntry, Tensor | None]:
        """Return the record of a full parameter, and the flat gradient if it has a part in it."""
        flat, grad = self.flat, self.flat.sharded.grad
        if position == ALL:
            return flat, grad
        # One `.grad` may be that of other parameters alone. The waiting ones are asked first: where
        # this parameter has one, the flat `.grad` is its too, though nothing was reduced yet.
        if grad is not None and not used[position]:
            is_others = any(flat.used) and not flat.used[position]
            grad = None if is_others or reduced_gradient(flat.sharded) is None else grad
        return self.entries[position], grad

    def trainable_flags(self) -> list[bool]:
        """Return `requires_grad` of the originals, as the flat parameter has it."""
        return [self.flat.sharded.requires_grad] * len(self.entries)

    def check_flags(self, flags: Sequence[bool], unit: str, where: str) -> None:
        """Check that the originals are frozen or trainable together."""
        if any(flags) and not all(flags):
            pairs = zip(self.entries, flags, strict=True)
            frozen = [str(entry.label) for entry, flag in pairs if not flag]
            raise RuntimeError(
                f"the parameters {frozen} of unit '{unit}' were frozen {where} and others are not, "
                "so they can't be one flat parameter. Freeze or unfreeze all of them, or call "
                "register_orig_params(module) before."
            )

    def set_flags(self, flags: Sequence[bool]) -> None:
        """Set `requires_grad` of the flat parameter, if the flags are equal."""
        if len(set(flags)) == 1:
            super().set_flags(flags)

    def follow_flags(self, flags: Sequence[bool]) -> None:
        """Give the originals the flag of the flat parameter."""
        for entry, flag in zip(self.entries, flags, strict=True):
            set_requires_grad(entry.sharded, flag)

    def has_gradients(self) -> list[bool]:
        """Return whose sharded gradients are in that of the flat parameter."""
        is_there, used = reduced_gradient(self.flat.sharded) is not None, self.flat.used
        # If no backward set it, the user did, and it counts for all parameters.
        return [is_there and (is_used or not any(used)) for is_used in used]

    def add_gradients(self, pieces: Sequence[Tensor] | None, used: list[bool]) -> list[bool]:
        """Set, or add to, the gradient of the flat parameter."""
        return super().add_gradients(pieces, self.flat.add_used(used))

    def drop_gradient(self, handle: FlatParamHandle, index: int) -> None:
        """Drop one parameter's part of the flat gradient, or with `ALL` the gradient."""
        flat, indices = self.flat, range(len(self.entries)) if index == ALL else [index]
        with torch.inference_mode(False), torch.no_grad(), unmarked(handle):
            drop_waiting(handle, indices)
            grad, used = flat.sharded.grad, has_gradients(handle)
            for each in indices:
                used[each] = False
                if isinstance(grad, FlatShard):
                    note_write_to_local(grad)
                    self.entries[each].slice_of(grad._local).zero_()
            flat.used, flat.sharded.grad = used, None
            if isinstance(grad, FlatShard) and any(used):
                # Stand-ins know it by its identity.
                flat.sharded.grad = wrap(grad._local, flat.spec)

    def holders(self, used: Sequence[int]) -> Iterator[tuple[FlatShard, list[int]]]:
        """Yield the flat parameter, whose `.grad` stands for all of the gradients."""
        yield self.flat.sharded, list(used)


# The way from one form to another


class _AskedFlat(AskedForm):
    """What `fully_shard` does where it is asked for one flat parameter."""

    has_names = False

    def check(
        self,
        module: nn.Module,
        params: Sequence[tuple[str, nn.Parameter]],
        tensor_parallel: Sequence[str],
    ) -> None:
        """Check that a unit can show a flat parameter instead of its originals."""
        taken = [name for name in dir(module) if name.startswith(FLAT_PARAM_NAME)]
        if taken:
            raise ValueError(
                f"{type(module).__name__} has the attributes {taken}, the names of flat "
                "parameters. Rename them, or pass use_orig_params=True."
            )
        hooked = [name for name, param in params if post_accumulate_hooks_of(param)]
        if hooked:
            raise ValueError(
                f"the hooks on the parameters {hooked} (register_post_accumulate_grad_hook) would "
                "never run with use_orig_params=False: only the flat parameter gets a gradient. "
                "Register them on it after fully_shard, or pass use_orig_params=True."
            )
        refuse_flat_dtensors(tensor_parallel)

    def prepare(self, handle: FlatParamHandle) -> None:
        """Make the flat parameter; shows nothing."""
        _with_flat(handle)

    def show(self, handle: FlatParamHandle) -> None:
        """Show the flat parameter."""
        show_flat(handle)


FORMS: Mapping[FormName, AskedForm] = {"originals": AskedForm(), "flat": _AskedFlat()}


def _slot_of(handle: FlatParamHandle) -> AddedSlot:
    """Return where the flat parameter is or would be shown."""
    form, shown = handle.shown.form, handle.shown
    if isinstance(form, OriginalsAgain):
        return form.slot
    suffix = f"_{shown.number}" if shown.number else ""
    return AddedSlot(shown.home.get(), f"{FLAT_PARAM_NAME}{suffix}")


def _with_flat(handle: FlatParamHandle) -> OriginalsAgain:
    """Return a form with a flat parameter, made at the first call; shows nothing."""
    form = handle.shown.form
    if isinstance(form, OriginalsAgain):
        return form
    slot = _slot_of(handle)
    spec = _flat_spec(handle, slot)
    start, end = spec.local_range
    view = handle.shard.values[: end - start]
    param = nn.Parameter(FlatShard(view, spec, guard=handle.guard), handle.requires_grad)
    used = [False] * len(handle.entries)
    flat = FlatEntry(cast(FlatShard, param), spec, shard_view=view, used=used)
    made = OriginalsAgain(flat, slot)
    handle.shown.take_form(made)
    return made


def _flat_spec(handle: FlatParamHandle, slot: AddedSlot) -> ShardSpec:
    return flat_spec([entry.spec for entry in handle.entries], slot.name)


def check_can_show_flat(handle: FlatParamHandle) -> None:
    """Check that one flat parameter can replace the originals; changes nothing."""
    form, slot = handle.shown.form, _slot_of(handle)
    _flat_spec(handle, slot)
    frozen = [str(e.label) for e in handle.entries if not e.sharded.requires_grad]
    if frozen and len(frozen) < len(handle.entries):
        raise RuntimeError(
            f"the parameters {frozen} of unit '{handle.name}' are frozen and others are not, so "
            "they can't be one flat parameter. Freeze or unfreeze all of them, or shard the frozen "
            "ones as a unit of their own."
        )
    hooked = [str(e.label) for e in handle.entries if post_accumulate_hooks_of(e.sharded)]
    if hooked:
        raise RuntimeError(
            f"the hooks on the parameters {hooked} (register_post_accumulate_grad_hook) would "
            f"never run while unit '{handle.name}' shows one flat parameter. Remove them, and "
            "register them on the flat parameter."
        )
    if not slot.is_free(form.flat.sharded if isinstance(form, OriginalsAgain) else None):
        raise RuntimeError(
            f"the module of unit '{handle.name}' has an attribute "
            f"'{slot.name}', the name of its flat parameter. Rename it."
        )
    if handle.memory.precision.extension is not None and handle.shown.is_unsharded:
        raise RuntimeError(
            f"unit '{handle.name}' shows the full values of a parameter of a class of its own "
            "(fsdp_pre_all_gather), which no flat parameter can stand for. Call reshard(module) "
            "first."
        )
    has_gradients(handle)


def check_can_show_originals(handle: FlatParamHandle) -> None:
    """Check that no hook is lost; changes nothing."""
    adopt_hooks(handle.shown)
    has_gradients(handle)
    form = handle.shown.form
    if isinstance(form, OriginalsAgain) and post_accumulate_hooks_of(form.flat.sharded):
        raise RuntimeError(
            f"the hooks on '{form.flat.label}' (register_post_accumulate_grad_hook) would "
            f"never run while unit '{handle.name}' shows its original parameters. Remove them, and "
            "register them on the original parameters."
        )


def show_flat(handle: FlatParamHandle) -> None:
    """Show the flat parameter instead of the originals; gradients move. No communication.

    While the full values are registered, their flat parameter is shown, also in a scope.
    """
    shown, form = handle.shown, _with_flat(handle)
    flat, slot = form.flat, form.slot
    if isinstance(shown.state, Scope):
        one = shown.state.stand_in(form, ALL)
        form.show_one(one)
        shown.state.expect(shown, [(slot.reserve(), slot.name, one)])
        return
    if not isinstance(form, FlatForm):
        slot.keep_reachable(flat.sharded)
        form.unhide()
        flat.sharded.requires_grad = handle.entries[0].sharded.requires_grad
        with torch.no_grad(), unmarked(handle):
            _move_gradients_to_flat(handle, flat)
            shown.take_form(FlatForm(flat, slot))
        shown.form.hide()
        shown.index_slots()
    if shown.is_unsharded:
        if flat.unsharded is None:
            params = handle.full.params
            # Under the version counter of the first parameter, which then shows edits.
            full = params.views[0].as_strided((handle.layout.end,), (1,), 0)
            noted = flat.label, params.aliases, ALL
            flat.unsharded = UnshardedParameter(full, handle.requires_grad, noted)
        shown.move(UNSHARDED_FLAT)
    shown.show_again()


def show_originals(handle: FlatParamHandle) -> None:
    """Show the original parameters instead of the flat one; gradients move. No communication."""
    shown, form = handle.shown, handle.shown.form
    if isinstance(shown.state, Scope):
        shown.state.show(shown)
        return
    if not isinstance(form, FlatForm):
        return  # before the first forward there is no list of places to show them by
    flat = form.flat
    form.unhide()
    for entry in handle.entries:
        entry.sharded.requires_grad = flat.sharded.requires_grad
    with torch.no_grad(), unmarked(handle):
        _move_gradients_to_originals(handle, flat)
        shown.take_form(OriginalsAgain(flat, form.slot))
    shown.form.hide()
    shown.index_slots()
    flat.unsharded = None
    if shown.is_unsharded:
        shown.move(UNSHARDED)
    shown.show_again()


def _move_gradients_to_flat(handle: FlatParamHandle, flat: FlatEntry) -> None:
    flat.used = has_gradients(handle)
    if not any(flat.used):
        return
    whole = gradient_shard(handle)
    for entry in handle.entries:
        entry.sharded.grad = None
    flat.sharded.grad = wrap(flat.slice_of(whole), flat.spec)


def _move_gradients_to_originals(handle: FlatParamHandle, flat: FlatEntry) -> None:
    has_gradient = has_gradients(handle)
    if not any(has_gradient):
        return
    whole = gradient_shard(handle)
    flat.sharded.grad = None
    for entry, is_there in zip(handle.entries, has_gradient, strict=True):
        if is_there and not entry.spec.is_owned_by_other_rank:
            entry.sharded.grad = wrap(entry.slice_of(whole), entry.spec)
