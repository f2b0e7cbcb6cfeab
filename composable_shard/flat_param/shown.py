"""`ShownParams`: which form of its parameters a unit's modules show.

At rest they show the sharded parameters: the originals, or the one flat parameter instead of
them. In forward, backward and after `unshard` they show the unsharded originals, and inside
`unshard_params` the parameters of that scope. Hidden originals leave None in `_parameters` and a
plain attribute that raises, see [Note: Hidden originals].
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor, nn

from composable_shard.flat_param.entries import FlatEntry, ParamEntry
from composable_shard.flat_param.hidden import hide, hide_flat, set_requires_grad, unhide
from composable_shard.flat_param.kept_params import follow_writes, run_on_shown
from composable_shard.flat_param.param_classes import Aliases
from composable_shard.flat_param.scope_params import ScopeParams
from composable_shard.flat_param.slots import FlatSlot
from composable_shard.tensor import WriteGuard
from composable_shard.torch_private import disabled_torch_function


class Shown(Enum):
    """Which parameters the modules show."""

    SHARDED = "what they show at rest: the originals, or the flat parameter"
    UNSHARDED = "the full values of the originals"
    UNSHARDED_FLAT = "the full values as one parameter"
    SCOPE = "the originals that `unshard_params` made, or left sharded"
    SCOPE_FLAT = "one parameter instead of these"
    CHANGING = "some of each, which an interrupt may leave; `show_sharded` puts it right"


SHARDED, UNSHARDED, UNSHARDED_FLAT, SCOPE, SCOPE_FLAT, CHANGING = Shown


@dataclass
class Scope:
    """The parameters that an open `unshard_params` scope shows."""

    params: Sequence[Tensor]  # in place of the originals
    full: ScopeParams | None  # what made them; None on a rank without full values
    before: Shown  # what was shown before the scope
    slots: list[tuple[Any, Any, Tensor | None]]  # container, key, what is shown there


_WRITE = (
    "Write into the existing parameter instead, for example `param.copy_(full_tensor)` under "
    "torch.no_grad(), or replace it before fully_shard."
)
_RESIZE = (
    "A sharded parameter keeps its shape: change it before fully_shard (resize_token_embeddings, "
    "say)."
)


class ShownParams:
    """The parameters of a flat parameter, and the places in modules that show them.

    Args:
        entries: The managed parameters, in order.
        flat: The flat parameter; None until it is needed.
        guard: Write guard of the local shard.
        shows_flat: Whether the flat parameter is shown at rest, instead of the originals.

    Attributes:
        state: Which parameters the modules show now.
        at_rest: The parameters that users and optimizers hold: the originals, or the flat one.
        scope: The open `unshard_params` scope, if any.
        flat_slot: Where the unit's module shows the flat parameter.
        notes: Notes that the full parameters share, [Note: Kept objects].
        agreed_flags: `requires_grad` of the entries on all ranks; None before the ranks compared.
        has_early_hooks: Any rank has hooks on gradients; all ranks know, [Note: Early gradients].
    """

    flat_slot: FlatSlot

    def __init__(
        self,
        entries: list[ParamEntry],
        flat: FlatEntry | None,
        guard: WriteGuard,
        *,
        shows_flat: bool,
    ) -> None:
        self.entries = entries
        self.flat = flat
        self.guard = guard
        guard.let_ask_shown(weakref.WeakMethod(self.shows_full))
        self.state = SHARDED
        self.shows_flat = shows_flat
        self.at_rest: Sequence[ParamEntry] = entries
        self.scope: Scope | None = None
        self.notes = Aliases()
        self.agreed_flags: list[bool] | None = None
        self.has_early_hooks = False
        # container, key, at rest, unsharded
        self._slots: list[tuple[Any, Any, Tensor | None, Tensor | None]] = []
        # Module, name, the hidden original; empty if originals are at rest
        self._hidden: list[tuple[Any, str, Tensor | None]] = []
        self.set_flat(flat, shows_flat=shows_flat)

    def remember_agreed_flags(self) -> None:
        """Remember that all ranks have the current parameters and `requires_grad` flags."""
        self.agreed_flags = trainable_flags(self)

    def set_early_hooks(self, flag: bool) -> None:
        """Say whether any rank has hooks on gradients, see [Note: Early gradients]."""
        self.has_early_hooks = flag

    def set_flat(self, flat: FlatEntry | None, *, shows_flat: bool) -> None:
        """Choose the parameters at rest; shows nothing."""
        self.flat, self.shows_flat = flat, shows_flat
        self.at_rest = [flat] if shows_flat and flat is not None else self.entries

    def set_flat_slot(self, slot: FlatSlot) -> None:
        """Choose where the unit's module shows the flat parameter."""
        self.flat_slot = slot

    def index_slots(self) -> None:
        """Refresh the flat list that registration walks; call after `entries[i].slots` changed."""
        self._slots, self._hidden = [], []
        for entry in self.entries:
            for container, key, place in entry.slots:
                at_rest = entry.hidden_at(place) if self.shows_flat else entry.sharded
                self._slots.append((container, key, at_rest, entry.unsharded))
                if self.shows_flat and place is not None:
                    self._hidden.append((place.module, key, entry.sharded))
        if self.shows_flat and self.flat is not None:
            slot = self.flat_slot
            self._slots.append((slot.reserve(), slot.name, self.flat.sharded, None))

    @property
    def is_unsharded(self) -> bool:
        """Whether the unsharded parameters are registered, perhaps beneath a scope."""
        state = self.state if self.scope is None else self.scope.before
        return state in (UNSHARDED, UNSHARDED_FLAT, CHANGING)

    def shows_full(self) -> bool:
        """Return whether modules show the full parameters of the handle, outside of scopes."""
        return self.state in (UNSHARDED, UNSHARDED_FLAT)

    # Forms of the handle

    def show_unsharded(self) -> None:
        """Make the modules show the unsharded parameters, which have current values."""
        if self.state is UNSHARDED or self.scope is not None:
            if self.scope is None and self.notes.torch_function is not disabled_torch_function:
                follow_writes(self)  # `unshard` shows them, and shards were written
            return
        if self.state is UNSHARDED_FLAT:
            self.show_unsharded_as(None)
        self.state = CHANGING
        for container, key, _, unsharded in self._slots:
            container[key] = unsharded
        for module_ref, name, _ in self._hidden:
            if (module := module_ref()) is not None:
                module.__dict__.pop(name, None)
        self.notes.torch_function = disabled_torch_function
        self.state = UNSHARDED

    def show_sharded(self) -> None:
        """Make the modules show the parameters at rest, which users and optimizers hold."""
        if self.state is SHARDED or self.scope is not None:
            return
        if self.state is UNSHARDED_FLAT:
            self.show_unsharded_as(None)
        self.state = CHANGING
        # The flat parameter first, as it goes last: an interrupt leaves nothing without a gradient.
        for container, key, at_rest, _ in reversed(self._slots):
            container[key] = at_rest
        for module_ref, name, hidden in self._hidden:
            if (module := module_ref()) is not None:
                module.__dict__[name] = hidden
        self.notes.torch_function = run_on_shown
        self.state = SHARDED

    def show_unsharded_as(self, flat: nn.Parameter | None) -> None:
        """If full values are shown, show them as one parameter, or with None as the originals."""
        if self.flat is not None:
            self.flat.unsharded = flat
        if self.is_unsharded:
            self.state = UNSHARDED if flat is None else UNSHARDED_FLAT
        self.show_again()

    def show_again(self) -> None:
        """Make the modules show the parameters of `state`, after others were shown."""
        if self.state is UNSHARDED_FLAT and self.flat is not None:
            self.show(None, self.flat.unsharded)
            return
        self.show(None, None)
        for container, key, at_rest, unsharded in self._slots:
            container[key] = unsharded if self.state is UNSHARDED else at_rest
        if self.state is UNSHARDED or not self.shows_flat:
            self._hide(False)

    def show(self, originals: Sequence[Tensor] | None, flat: Tensor | None) -> None:
        """Make the modules show these parameters: one for each entry, or none of them."""
        for index, entry in enumerate(self.entries):
            for container, key, place in entry.slots:
                hidden = entry.hidden_at(place)
                container[key] = hidden if originals is None else originals[index]
        self._hide(originals is None)
        self.flat_slot.show(flat)

    def _hide(self, flag: bool) -> None:
        """Make the originals plain attributes, or leave only what is registered."""
        for entry in self.entries:
            for _, key, place in entry.slots:
                module = None if place is None else place.module()
                if module is not None and flag:
                    vars(module)[key] = entry.sharded
                elif module is not None:
                    vars(module).pop(key, None)

    def check_registered(self) -> None:
        """Check that the modules still show our parameters."""
        # Only where the modules show what `_slots` says. Scopes and the flat parameter of full
        # values stand in other places; after an interrupt, CHANGING is some of each, and no user
        # is to blame for that.
        is_unsharded = self.state is UNSHARDED
        if not is_unsharded and self.state is not SHARDED:
            return
        for container, key, at_rest, unsharded in self._slots:
            try:
                found = container[key]
            except KeyError:
                raise RuntimeError(
                    f"parameter '{self.label_at(container, key)}' is gone from its module, as "
                    "after register_parametrization. Parametrize, prune or delete parameters "
                    "before fully_shard."
                ) from None
            if found is not (unsharded if is_unsharded else at_rest):
                is_same = at_rest is None or getattr(found, "shape", None) == at_rest.shape
                raise RuntimeError(
                    f"parameter '{self.label_at(container, key)}' was replaced by another object "
                    f"({describe_object(found)}) after fully_shard, as by assignment, "
                    "functional_call or load_state_dict(assign=True). "
                    f"Its new value would be ignored. {_WRITE if is_same else _RESIZE}"
                )

    def label_at(self, container: Any, key: Any) -> object:
        """Return the name of the parameter that is shown in a slot."""
        for entry in self.entries:
            if any(container is other and key == name for other, name, _ in entry.slots):
                return entry.label if len(entry.slots) == 1 else f"{entry.label}, or one tied to it"
        return key if self.flat is None else self.flat.label

    # Gradients of hidden parameters

    def unhide_all(self) -> None:
        """Allow gradients on all sharded parameters, in both forms."""
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


def let_stand(shown: ShownParams) -> None:
    """Let the full parameters stand for what modules show, unless they show these."""
    shown.notes.torch_function = disabled_torch_function if shown.shows_full() else run_on_shown


def trainable_flags(shown: ShownParams) -> list[bool]:
    """Return `requires_grad` of the originals, as the parameters at rest have it."""
    if shown.shows_flat and shown.flat is not None:
        return [shown.flat.sharded.requires_grad] * len(shown.entries)
    return [entry.sharded.requires_grad for entry in shown.entries]


def check_flags(shown: ShownParams, flags: Sequence[bool], unit: str, where: str) -> None:
    """Check that the parameters at rest can have these flags, one for each original."""
    if shown.shows_flat and any(flags) and not all(flags):
        pairs = zip(shown.entries, flags, strict=True)
        frozen = [str(entry.label) for entry, flag in pairs if not flag]
        raise RuntimeError(
            f"the parameters {frozen} of unit '{unit}' were frozen {where} and others are not, so "
            "they can't be one flat parameter. Freeze or unfreeze all of them, or call "
            "register_orig_params(module) before."
        )


def set_trainable_flags(shown: ShownParams, flags: Sequence[bool]) -> None:
    """Set `requires_grad` of the parameters at rest, as users do it, after `check_flags`."""
    for each, flag in zip(shown.at_rest, flags, strict=False):
        if each.sharded.requires_grad != flag:
            set_requires_grad(each.sharded, flag)


def describe_object(found: object) -> str:
    """Return what stands in the place of a parameter, for messages."""
    if isinstance(found, Tensor):
        return f"{type(found).__name__}{tuple(found.shape)}"
    return repr(found)
