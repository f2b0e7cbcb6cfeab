"""What modules show inside `unshard_params`: the parameters of the scope."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from composable_shard.flat_param.kept_params import run_on_shown
from composable_shard.flat_param.param_classes import UnshardedDTensor, UnshardedParameter
from composable_shard.flat_param.scope_params import ScopeParams
from composable_shard.flat_param.shown import (
    SCOPE,
    Scope,
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


def enter_scope(shown: ShownParams, full: ScopeParams | None) -> None:
    """Show the parameters of an `unshard_params` scope; None for the sharded originals."""
    if full is None:
        shown.form.unhide()
    params = [entry.sharded for entry in shown.entries] if full is None else full.params
    shown.scope = Scope(params, full, shown.state, [])
    shown.guard.refuse_writes(_WRITES)
    for entry, param in zip(shown.entries, params, strict=True):
        if isinstance(entry.unsharded, UnshardedParameter | UnshardedDTensor):
            share_attributes(entry.unsharded, param)
    _show(shown, params)
    let_stand(shown)


def _show(shown: ShownParams, params: Sequence[Tensor]) -> None:
    shown.form.show(params)
    expect_in_scope(shown, SCOPE)


def expect_in_scope(
    shown: ShownParams, state: Shown, further: Sequence[tuple[Any, Any, Tensor | None]] = ()
) -> None:
    """Expect what the modules show in the scope to stay there until its end.

    Args:
        state: What that is.
        further: Places that are none of the originals', and what they show.
    """
    assert shown.scope is not None
    shown.state = state
    slots = [
        (container, key, container[key])
        for entry in shown.entries
        for container, key, _ in entry.slots
    ]
    shown.scope.slots = [*slots, *further]


def show_scope_params(shown: ShownParams) -> None:
    """Show the originals again, for a forward, where the scope shows something else."""
    if shown.scope is not None and shown.state is not SCOPE:
        _show(shown, shown.scope.params)


def check_scope(shown: ShownParams) -> None:
    """Check that the modules still show the parameters of the scope."""
    for container, key, param in () if shown.scope is None else shown.scope.slots:
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
                "back, nor was any other. Write into the existing parameter instead, for example "
                "`param.copy_(value)` under torch.no_grad()."
            )


def leave_scope(shown: ShownParams) -> None:
    """Show again what was shown before the scope; no-op outside of one."""
    if shown.scope is None:
        return
    shown.guard.refuse_writes("")
    for entry in shown.entries:
        if isinstance(entry.unsharded, UnshardedParameter | UnshardedDTensor):
            share_attributes(entry.unsharded, entry.sharded)
    shown.state = shown.scope.before
    shown.form.hide()
    shown.show_again()
    # Also where modules show full parameters again: the scope may have written the shards.
    shown.notes.torch_function = run_on_shown
    shown.scope = None  # last: whoever finds it after an interrupt repeats the rest


def check_scope_flags(shown: ShownParams, unit: str) -> None:
    """Check that the parameters at rest can have the flags that a scope's body set."""
    if shown.scope is not None:
        flags = [param.requires_grad for param in shown.scope.params]
        shown.form.check_flags(flags, unit, "inside unshard_params")


def keep_scope_flags(shown: ShownParams) -> None:
    """Adopt the `requires_grad` flags that a scope's body set, as if set outside."""
    if shown.scope is not None:
        shown.form.set_flags([param.requires_grad for param in shown.scope.params])
