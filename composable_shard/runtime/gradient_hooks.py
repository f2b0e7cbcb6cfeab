"""Hooks on gradients, `register_post_accumulate_grad_hook`: run when the backward has ended.

A tree has this order once a hook was registered on one of its parameters. `EarlyHooks` runs those
before the end that all ranks know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from composable_shard.comm import trace
from composable_shard.flat_param import has_gradient_hooks, run_gradient_hooks
from composable_shard.runtime.phases import Phase
from composable_shard.runtime.reduction_queue import Ending, Item, Order, ReductionQueue
from composable_shard.runtime.unit import StateRef


class GradientHooks(Order):
    """Runs the hooks on gradients that are published at the end; is the order of no handle."""

    place: ClassVar[int] = 5

    def __init__(self, queue: ReductionQueue) -> None:
        super().__init__(queue)
        self._error: BaseException | None = None  # the first one, to be raised at the end

    def run(self, item: Item) -> None:
        """Run the hooks of a handle's parameters, unless a hook has failed in this backward."""
        handle = item.handle
        if self._error is not None or True in handle.grads.was_used:  # published in part
            return
        if trace.logs:
            trace.record("gradient_hooks", handle.name)
        try:
            run_gradient_hooks(handle.shown)
        except BaseException as error:
            # Raise it at the end, because the other ranks wait for this rank's collectives.
            self._error = error

    def run_all(self, ending: Ending) -> None:
        """Run the hooks on what was published at the end."""
        for item in ending.published:
            if item.state.settings.is_last_backward and has_gradient_hooks(item.handle.shown):
                self.run(item)
        self.raise_error(ending)

    def raise_error(self, ending: Ending) -> None:
        """Raise the first hook's error."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame: a cycle

    acts: ClassVar[Mapping[Phase, Callable[[Any, Ending], None]]] = {Phase.HOOKS: run_all}


def note_hook(state_ref: StateRef) -> None:
    """Let hooks on gradients of a unit run, at the end of a running backward too."""
    state = state_ref()
    if state is None:
        return
    state.add_order(GradientHooks)
    if state.context is not None and state.context.backward is not None:
        state.context.backward.queue.enter(GradientHooks)
