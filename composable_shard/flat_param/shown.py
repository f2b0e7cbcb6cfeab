"""`ShownParams`: which form of its parameters a unit's modules show.

At rest they show the sharded parameters, in the form that users hold, [Note: Forms]. In forward,
backward and after `unshard` they show the unsharded originals, and inside `unshard_params` the
parameters of that scope.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

from torch import Tensor, nn

from composable_shard.flat_param.entries import ParamEntry
from composable_shard.flat_param.form import OriginalForm, Place
from composable_shard.flat_param.kept_params import follow_writes, run_on_shown
from composable_shard.flat_param.param_classes import Aliases
from composable_shard.flat_param.slots import ModuleItems
from composable_shard.tensor import WriteGuard
from composable_shard.torch_private import disabled_torch_function, modules_in


class Shown:
    """Which parameters the modules show; a form and `unshard_params` have states of their own.

    Attributes:
        kind: The state of `SHOWN_MOVES` whose moves it has.
        is_fixed: Only who shows this may show something else: no step, and no call.
        before: What is shown again after a fixed one.
    """

    SHARDED: ClassVar[Shown]
    is_fixed = False
    before: Shown | None = None

    def __init__(self, what: str, kind: Shown | None = None) -> None:
        self.what = what
        self.kind = kind or self

    def __repr__(self) -> str:
        return f"<Shown: {self.what}>"

    def stand_in(self, form: OriginalForm, position: int) -> Any:
        """Return what modules show in place of a full parameter."""
        return form.shown_at(position, is_full=self.kind is UNSHARDED)

    def let_compute(self, shown: ShownParams, unit: str, *, is_trained: bool) -> None:
        """Prepare a forward of a unit, or raise if it can't compute with what is shown."""

    def refuse_backward(self, unit: str) -> None:
        """Raise if no backward may reach a unit."""


SHARDED = Shown.SHARDED = Shown("what they show at rest")
UNSHARDED = Shown("the full values")
SCOPE = Shown("the parameters of an `unshard_params` scope")
CHANGING = Shown("some of each, which an interrupt may leave; `show_sharded` puts it right")

SHOWN_MOVES: dict[Shown, frozenset[Shown]] = {
    SHARDED: frozenset({CHANGING, SCOPE}),
    UNSHARDED: frozenset({CHANGING, SCOPE}),
    CHANGING: frozenset({SHARDED, UNSHARDED, SCOPE}),
    SCOPE: frozenset({SHARDED, UNSHARDED, CHANGING}),  # back to what was shown before
}


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
        form: What users hold at rest.
        guard: Write guard of the local shard.

    Attributes:
        state: Which parameters the modules show now; it moves as `SHOWN_MOVES` says.
        at_rest: The parameters that users and optimizers hold.
        home: The unit's first module.
        number: The number of the flat parameter in its unit.
        notes: Notes that the full parameters share, [Note: Kept objects].
        agreed_flags: `requires_grad` of the entries on all ranks; None before the ranks compared.
        has_early_hooks: Any rank has hooks on gradients; all ranks know, [Note: Early gradients].
    """

    home: ModuleItems
    number: int

    def __init__(self, entries: list[ParamEntry], form: OriginalForm, guard: WriteGuard) -> None:
        self.entries = entries
        self.guard = guard
        guard.let_ask_shown(weakref.WeakMethod(self.shows_full))
        self.state = SHARDED
        self.notes = Aliases()
        self.agreed_flags: list[bool] | None = None
        self.has_early_hooks = False
        self._places: list[Place] = []
        self.take_form(form)

    def take_form(self, form: OriginalForm) -> None:
        """Choose what users hold at rest; shows nothing."""
        form.bind(self.entries)
        self.form = form
        self.at_rest = form.at_rest

    def set_home(self, module: ModuleItems, number: int) -> None:
        """Choose the unit's first module, and the number of the flat parameter in the unit."""
        self.home, self.number = module, number

    def is_around(self, module: nn.Module) -> bool:
        """Return whether `module` is in the unit's first module, or is it."""
        outer = self.home.module()
        return outer is not None and any(each is module for each in modules_in(outer))

    def remember_agreed_flags(self) -> None:
        """Remember that all ranks have the current parameters and `requires_grad` flags."""
        self.agreed_flags = self.form.trainable_flags()

    def set_early_hooks(self, flag: bool) -> None:
        """Say whether any rank has hooks on gradients, see [Note: Early gradients]."""
        self.has_early_hooks = flag

    def index_slots(self) -> None:
        """Refresh the flat list that registration walks; call after `entries[i].slots` changed."""
        self._places = self.form.places()

    def move(self, state: Shown) -> None:
        """Change the state by one of `SHOWN_MOVES`."""
        now = self.state.kind
        if state.kind is not now and state.kind not in SHOWN_MOVES[now]:
            raise RuntimeError(
                f"modules that show {self.state.what} can't show {state.what} next; please report "
                "this"
            )
        self.state = state

    @property
    def is_unsharded(self) -> bool:
        """Whether the unsharded parameters are registered, perhaps beneath a scope."""
        kind = (self.state.before or self.state).kind
        return kind is UNSHARDED or kind is CHANGING

    @property
    def scope(self) -> Shown | None:
        """The open `unshard_params` scope, if any."""
        return self.state if self.state.is_fixed else None

    def shows_full(self) -> bool:
        """Return whether modules show the full parameters of the handle, outside of scopes."""
        return self.state.kind is UNSHARDED

    def show_unsharded(self) -> None:
        """Make the modules show the unsharded parameters, which have current values."""
        if self.state is UNSHARDED:
            if self.notes.torch_function is not disabled_torch_function:
                follow_writes(self)  # `unshard` shows them, and shards were written
            return
        if self.state.is_fixed:
            return
        self.state = CHANGING  # `move` inlined here and below, for each step
        for container, key, _, unsharded in self._places:
            container[key] = unsharded
        self.notes.torch_function = disabled_torch_function
        self.state = UNSHARDED

    def show_sharded(self) -> None:
        """Make the modules show the parameters at rest, which users and optimizers hold."""
        if self.state is SHARDED or self.state.is_fixed:
            return
        self.state = CHANGING
        # The last place first: what has the gradients goes last and comes first, so an interrupt
        # leaves no module without it.
        for container, key, at_rest, _ in reversed(self._places):
            container[key] = at_rest
        self.notes.torch_function = run_on_shown
        self.state = SHARDED

    def show_again(self) -> None:
        """Make the modules show the parameters of `state`, or those before it, after others."""
        is_unsharded = (self.state.before or self.state) is UNSHARDED
        self.form.show_again(self._places, is_unsharded=is_unsharded)

    def check_registered(self) -> None:
        """Check that the modules still show our parameters."""
        # Only where the modules show what `_places` says. What has a state of its own stands in
        # other places; after an interrupt, CHANGING is some of each, and no user is to blame.
        is_unsharded = self.state is UNSHARDED
        if not is_unsharded and self.state is not SHARDED:
            return
        for container, key, at_rest, unsharded in self._places:
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
        return key if self.form.label is None else self.form.label


def let_stand(shown: ShownParams) -> None:
    """Let the full parameters stand for what modules show, unless they show these."""
    shown.notes.torch_function = disabled_torch_function if shown.shows_full() else run_on_shown


def describe_object(found: object) -> str:
    """Return what stands in the place of a parameter, for messages."""
    if isinstance(found, Tensor):
        return f"{type(found).__name__}{tuple(found.shape)}"
    return repr(found)
