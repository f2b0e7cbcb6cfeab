"""`Scope`: what modules show inside `unshard_params`, and what they refuse meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from composable_shard.flat_param.form import OriginalForm
from composable_shard.flat_param.kept_params import run_on_shown
from composable_shard.flat_param.param_classes import KeptDTensor, UnshardedParameter
from composable_shard.flat_param.scope_params import ScopeParams
from composable_shard.flat_param.shown import (
    SCOPE,
    Shown,
    ShownParams,
    describe_object,
    let_stand,
)
from composable_shard.tensor import share_attributes

_WRITES = (
    "inside unshard_params, which shows its full values. Call optimizer.step() and edit shards "
    "outside the scope, or edit the module's own parameters in it."
)


class Scope(Shown):
    """The parameters of an open `unshard_params` scope are shown.

    Attributes:
        full: What made the parameters; None on a rank without full values, which shows its shards.
        params: What is shown in place of the originals.
        shows_originals: They are shown now, and not one parameter instead of them.
    """

    is_fixed = True

    def __init__(self, shown: ShownParams, full: ScopeParams | None) -> None:
        super().__init__("the originals that `unshard_params` made, or left sharded", SCOPE)
        self.before = shown.state
        self.full = full
        sharded = [entry.sharded for entry in shown.entries]
        self.params: Sequence[Tensor] = sharded if full is None else full.params
        self.shows_originals = True
        self._slots: list[tuple[Any, Any, Tensor | None]] = []  # container, key, what is there

    def show(self, shown: ShownParams) -> None:
        """Make the modules show the scope's parameters in place of the originals."""
        shown.form.show(self.params)
        self.expect(shown)

    def expect(
        self, shown: ShownParams, one: Sequence[tuple[Any, Any, Tensor | None]] = ()
    ) -> None:
        """Expect what the modules show to stay there; `one` is the place of what shows all."""
        self.shows_originals = not one
        slots = [
            (container, key, container[key])
            for entry in shown.entries
            for container, key, _ in entry.slots
        ]
        self._slots = [*slots, *one]

    def check_slots(self, shown: ShownParams) -> None:
        """Check that the modules still show the parameters of the scope."""
        for container, key, param in self._slots:
            try:
                found = container[key]
            except KeyError:
                found = None
            except RuntimeError:
                continue  # its module was deleted, as by replacing it in its parent
            if found is not param:
                raise RuntimeError(
                    f"parameter '{shown.label_at(container, key)}' was replaced by another object "
                    f"({describe_object(found)}) inside unshard_params. Its value was not written "
                    "back, nor was any other. Write into the existing parameter instead, for "
                    "example `param.copy_(value)` under torch.no_grad()."
                )

    def flags(self) -> list[bool]:
        """Return `requires_grad` of the originals, as the scope's body has set it."""
        return [param.requires_grad for param in self.params]

    def stand_in(self, form: OriginalForm, position: int) -> Any:
        """Return what modules show in place of a full parameter."""
        at_rest = form.shown_at(position)
        return at_rest if self.full is None else self.full.shown_at(position, at_rest)

    def let_compute(self, shown: ShownParams, unit: str, *, is_trained: bool) -> None:
        """Show the originals to a forward of a unit, if it may run with them."""
        if self.full is None:
            raise RuntimeError(
                f"unit '{unit}' can't run inside unshard_params(rank0_only=True) on this "
                "rank, which has no full parameters. Run the model on the first rank only, or pass "
                "rank0_only=False."
            )
        if is_trained:
            raise RuntimeError(
                f"a training forward of unit '{unit}' inside unshard_params: gradients would "
                "not be reduced. Run it under torch.no_grad(), or train outside the scope."
            )
        if not self.shows_originals:
            self.show(shown)

    def refuse_backward(self, unit: str) -> None:
        """Raise: a backward must not reach a unit inside `unshard_params`."""
        raise RuntimeError(
            f"a backward reached unit '{unit}' inside unshard_params. Call backward() "
            "before the scope opens or after it has closed."
        )


def enter_scope(shown: ShownParams, full: ScopeParams | None) -> None:
    """Show the parameters of an `unshard_params` scope; None for the sharded originals."""
    if full is None:
        shown.form.unhide()
    scope = Scope(shown, full)
    shown.move(scope)  # first: whoever finds it after an interrupt leaves it
    shown.guard.refuse_writes(_WRITES)
    for entry, param in zip(shown.entries, scope.params, strict=True):
        if isinstance(entry.unsharded, UnshardedParameter | KeptDTensor):
            share_attributes(entry.unsharded, param)
    scope.show(shown)
    let_stand(shown)


def leave_scope(shown: ShownParams) -> None:
    """Show again what was shown before the scope; no-op outside of one."""
    before = shown.state.before
    if before is None:
        return
    shown.guard.refuse_writes("")
    for entry in shown.entries:
        if isinstance(entry.unsharded, UnshardedParameter | KeptDTensor):
            share_attributes(entry.unsharded, entry.sharded)
    shown.form.hide()
    shown.show_again()
    # Also where modules show full parameters again: the scope may have written the shards.
    shown.notes.torch_function = run_on_shown
    shown.move(before)  # last: whoever finds the scope after an interrupt repeats the rest


def check_scope(shown: ShownParams, unit: str) -> None:
    """Check that the modules show what a scope has shown, with flags that they can have at rest."""
    if isinstance(shown.state, Scope):
        shown.state.check_slots(shown)
        shown.form.check_flags(shown.state.flags(), unit, "inside unshard_params")


def keep_scope_flags(shown: ShownParams) -> None:
    """Adopt the `requires_grad` flags that a scope's body set, as if set outside."""
    if isinstance(shown.state, Scope):
        shown.form.set_flags(shown.state.flags())


def shows_scope_originals(shown: ShownParams) -> bool:
    """Return whether a scope shows originals, whatever is shown at rest."""
    return isinstance(shown.state, Scope) and shown.state.shows_originals
