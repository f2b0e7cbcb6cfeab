"""Which form of its parameters a unit's modules show.

At rest they show the sharded parameters: the originals, or the one flat parameter instead of
them. In forward, backward and after `unshard` they show the unsharded originals, and inside
`unshard_params` the parameters of that scope. Hidden originals leave None in `_parameters`, so that
names keep their order when they come back.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from composable_shard.flat_param.entries import FlatEntry, hide, hide_flat, unhide
from composable_shard.flat_param.storage import FlatSlot, Slot
from composable_shard.tensor import FlatShard, ParamLabel, ShardSpec, WriteGuard

__all__ = ["ParamEntry", "Registration"]


@dataclass
class ParamEntry:
    """One managed parameter: the object users hold, and the one modules compute with."""

    sharded: FlatShard  # the original Parameter object
    label: ParamLabel
    slots: list[Slot]  # every place that shows it; several where modules are tied
    spec: ShardSpec
    # spec.shape, a view of the unsharded buffer; printing it without storage would crash
    unsharded: nn.Parameter | None = field(default=None, repr=False)
    shard_view: Tensor | None = None  # (spec's local numel,) view of the local shard
    runs_hooks: bool = False  # `unsharded` runs the hooks that users registered on `sharded`


class Registration:
    """The parameters of a handle, and the places in modules that show them."""

    guard: WriteGuard
    entries: list[ParamEntry]
    flat: FlatEntry | None  # None until it is wanted
    flat_slot: FlatSlot  # where the unit's module shows the flat parameter
    shows_flat: bool  # at rest, instead of the originals
    unsharded_flat: nn.Parameter | None  # shown by hand, instead of the unsharded originals
    is_registered_unsharded: bool
    is_in_scope: bool  # unshard_params decides what is shown
    has_scope_values: bool  # and shows full values, on this rank
    scope_params: Sequence[Tensor]  # what it shows of the originals
    _hides_scope_params: bool  # the flat parameter is shown instead
    _scope_slots: list[tuple[Any, Any, Tensor | None]]  # container, key, what is shown there
    _slots: list[
        tuple[Any, Any, Tensor | None, Tensor | None]
    ]  # container, key, at rest, unsharded

    @property
    def shown_at_rest(self) -> Sequence[ParamEntry | FlatEntry]:
        """What users and optimizers hold: the originals, or the flat parameter."""
        return [self.flat] if self.shows_flat and self.flat is not None else self.entries

    @property
    def unsharded_params(self) -> list[nn.Parameter]:
        """The parameters that modules compute with, each of its logical shape."""
        return [entry.unsharded for entry in self.entries if entry.unsharded is not None]

    def index_slots(self) -> None:
        """Refresh the flat list that registration walks; call after `entries[i].slots` changed."""
        self._slots = [
            (container, key, None if self.shows_flat else entry.sharded, entry.unsharded)
            for entry in self.entries
            for container, key in entry.slots
        ]
        if self.shows_flat and self.flat is not None:
            slot = self.flat_slot
            self._slots.append((slot.take(), slot.name, self.flat.sharded, None))

    def check_registered(self) -> None:
        """Check that the modules still show our parameters.

        Raises:
            RuntimeError: Naming the parameter that was replaced.
        """
        is_unsharded = self.is_registered_unsharded
        if self.is_in_scope or self.unsharded_flat is not None:
            return
        for container, key, at_rest, unsharded in self._slots:
            if container[key] is not (unsharded if is_unsharded else at_rest):
                self._raise_replaced(container, key)

    def _raise_replaced(self, container: Any, key: Any) -> None:
        label = self.label_at(container, key)
        raise RuntimeError(
            f"parameter '{label}' was replaced by another object ({_describe(container[key])}) "
            "after fully_shard, as by assignment, functional_call or load_state_dict(assign=True). "
            "Its new value would be ignored. Write into the existing parameter instead, for "
            "example `param.copy_(full_tensor)` under torch.no_grad(), or replace it before "
            "fully_shard."
        )

    def label_at(self, container: Any, key: Any) -> object:
        """Return the name of the parameter that is shown in a slot."""
        for entry in self.entries:
            if any(container is other and key == name for other, name in entry.slots):
                return entry.label
        return key if self.flat is None else self.flat.label

    def register_unsharded(self) -> None:
        """Make the modules show the unsharded parameters."""
        if self.is_in_scope or (self.is_registered_unsharded and self.unsharded_flat is None):
            return
        if self.unsharded_flat is not None:
            self.show(None, None)
        for container, key, _, unsharded in self._slots:
            container[key] = unsharded
        self.unsharded_flat = None
        self.is_registered_unsharded = True

    def register_sharded(self) -> None:
        """Make the modules show what they show at rest, the objects users and optimizers hold."""
        if not self.is_registered_unsharded or self.is_in_scope:
            return
        if self.unsharded_flat is not None:
            self.show(None, None)
        for container, key, at_rest, _ in self._slots:
            container[key] = at_rest
        self.unsharded_flat = None
        self.is_registered_unsharded = False

    def show(self, originals: Sequence[Tensor] | None, flat: Tensor | None) -> None:
        """Make the modules show these parameters: one for each entry, or none of them."""
        for index, entry in enumerate(self.entries):
            for container, key in entry.slots:
                container[key] = None if originals is None else originals[index]
        self.flat_slot.show(flat)

    def enter_scope(self, params: Sequence[Tensor] | None) -> None:
        """Show the parameters of an `unshard_params` scope; None for the sharded originals."""
        self.is_in_scope = self.guard.is_in_scope = True
        self.has_scope_values = params is not None
        if params is None:
            self.unhide_all()
        self.scope_params = [e.sharded for e in self.entries] if params is None else params
        self.show_in_scope(self.scope_params, None)

    def show_in_scope(self, originals: Sequence[Tensor] | None, flat: Tensor | None) -> None:
        """Show these parameters, and expect them to stay until the scope's end."""
        self.show(originals, flat)
        self._hides_scope_params = originals is None
        self._scope_slots = [
            (container, key, container[key])
            for entry in self.entries
            for container, key in entry.slots
        ]
        if flat is not None:
            slot = self.flat_slot
            self._scope_slots.append((slot.take(), slot.name, flat))

    def show_scope_params(self) -> None:
        """Show the originals again, for a forward, where the scope shows the flat parameter."""
        if self._hides_scope_params:
            self.show_in_scope(self.scope_params, None)

    def check_scope(self) -> None:
        """Check that the modules still show the parameters of the scope.

        Raises:
            RuntimeError: Naming the parameter that was replaced.
        """
        for container, key, shown in self._scope_slots:
            try:
                found = container[key]
            except KeyError:
                found = None
            except RuntimeError:
                continue  # its module was deleted, as by replacing it in its parent
            if found is not shown:
                raise RuntimeError(
                    f"parameter '{self.label_at(container, key)}' was replaced by another object "
                    f"({_describe(found)}) inside unshard_params. Its value was not written back, "
                    "nor was any other. Write into the existing parameter instead, for example "
                    "`param.copy_(value)` under torch.no_grad()."
                )

    def leave_scope(self) -> None:
        """Show again what was shown before the scope; no-op outside of one."""
        if not self.is_in_scope:
            return
        self.is_in_scope = self.guard.is_in_scope = self.has_scope_values = False
        self._scope_slots, self.scope_params = [], ()
        self.hide_unshown()
        self.show_again()
        if not self.shows_flat:
            self.flat_slot.remove()

    def unhide_all(self) -> None:
        """Let all sharded parameters, in both forms, have gradients."""
        for entry in self.entries:
            unhide(entry.sharded)
        if self.flat is not None:
            unhide(self.flat.sharded)

    def hide_unshown(self) -> None:
        """Make the sharded parameters that are not shown at rest refuse gradients."""
        self.unhide_all()
        if self.shows_flat:
            for entry in self.entries:
                hide(entry.sharded)
        elif self.flat is not None:
            hide_flat(self.flat.sharded)

    def show_again(self) -> None:
        """Make the modules show what the attributes of the handle say, after `show`."""
        if self.unsharded_flat is not None:
            self.show(None, self.unsharded_flat)
            return
        self.show(None, None)
        for container, key, at_rest, unsharded in self._slots:
            container[key] = unsharded if self.is_registered_unsharded else at_rest

    def adopt_hooks(self) -> None:
        """Make backward run the hooks that users put on parameters with `register_hook`.

        Raises:
            RuntimeError: If some are on the flat parameter, of which autograd has no gradient.
        """
        self._check_flat_hooks()
        for entry in self.entries:
            if entry.sharded._backward_hooks and not entry.runs_hooks:
                _connect_hooks(entry)

    def _check_flat_hooks(self) -> None:
        if self.flat is not None and self.flat.sharded._backward_hooks:
            raise RuntimeError(
                f"the hooks on '{self.flat.label}' (register_hook) would never run: autograd "
                "computes the gradients of the original parameters. Remove them, and use "
                "register_post_accumulate_grad_hook, which sees the reduced gradient, or register "
                "them on the original parameters after register_orig_params(module)."
            )

    @property
    def has_gradient_hooks(self) -> bool:
        """Whether `run_gradient_hooks` has any to run."""
        return any(entry.sharded._post_accumulate_grad_hooks for entry in self.shown_at_rest)

    def run_gradient_hooks(self) -> None:
        """Run the hooks that users put on the sharded parameters with
        `register_post_accumulate_grad_hook`, once, with the final gradient.
        """
        for entry in self.shown_at_rest:
            hooks = entry.sharded._post_accumulate_grad_hooks
            if hooks and entry.sharded.grad is not None:
                for hook in list(hooks.values()):
                    hook(entry.sharded)


def _connect_hooks(entry: ParamEntry) -> None:
    if entry.unsharded is None or not entry.unsharded.requires_grad:
        return
    # Weak, as in FlatParamHandle._hook_gradient: a user's hook may lead anywhere.
    sharded_ref = weakref.ref(entry.sharded)

    def run_hooks(gradient: Tensor) -> Tensor:
        sharded = sharded_ref()
        hooks = None if sharded is None else sharded._backward_hooks
        for hook in list((hooks or {}).values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    entry.unsharded.register_hook(run_hooks)
    entry.runs_hooks = True


def _describe(found: object) -> str:
    if isinstance(found, Tensor):
        return f"{type(found).__name__}{tuple(found.shape)}"
    return repr(found)
