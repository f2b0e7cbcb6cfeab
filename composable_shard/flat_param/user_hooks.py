"""Hooks that users put on the parameters at rest: where they run, and with which gradient."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from composable_shard.flat_param.entries import ParamEntry
from composable_shard.flat_param.shown import ShownParams
from composable_shard.tensor import is_trainable
from composable_shard.torch_private import (
    DisableTorchFunctionSubclass,
    post_accumulate_hooks_of,
    pre_accumulate_hooks_of,
)


def adopt_hooks(shown: ShownParams) -> None:
    """Make backward run the hooks that users put on parameters with `register_hook`."""
    shown.form.check_hooks()
    for entry in shown.entries:
        if pre_accumulate_hooks_of(entry.sharded) and not entry.runs_hooks:
            with DisableTorchFunctionSubclass():  # [Note: Kept objects]
                _connect_hooks(entry)


def has_gradient_hooks(shown: ShownParams) -> bool:
    """Return whether `run_gradient_hooks` has any to run."""
    return bool(_with_hooks(shown.at_rest))


def run_gradient_hooks(shown: ShownParams) -> None:
    """Run the hooks that users put on the sharded parameters with
    `register_post_accumulate_grad_hook`, once, with the final gradient.
    """
    for entry in _with_hooks(shown.at_rest):
        if entry.sharded.grad is not None:
            for hook in list((post_accumulate_hooks_of(entry.sharded) or {}).values()):
                hook(entry.sharded)


def _with_hooks(entries: Sequence[ParamEntry]) -> list[ParamEntry]:
    with DisableTorchFunctionSubclass():  # [Note: Many getters]
        return [each for each in entries if post_accumulate_hooks_of(each.sharded)]


def _connect_hooks(entry: ParamEntry) -> None:
    if entry.unsharded is None or not is_trainable(entry.unsharded):
        return
    # Weak, because a user's hook may refer to anything. Not to the parameter itself: `Module.to`
    # can't swap parameters with weak references.
    entry_ref = weakref.ref(entry)

    def run_hooks(gradient: Tensor) -> Tensor:
        entry = entry_ref()
        hooks = None if entry is None else pre_accumulate_hooks_of(entry.sharded)
        for hook in list((hooks or {}).values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    Tensor.register_hook(entry.unsharded, run_hooks)  # type: ignore[no-untyped-call]
    entry.runs_hooks = True
