"""Gather full parameters and free them by calls, beside the hooks of forward and backward."""

from __future__ import annotations

from torch import nn

from composable_shard.flat_param import RESHARD, follow_writes
from composable_shard.runtime import (
    ShardState,
    TrainingState,
    lazy_init,
    release_handle,
    select_states,
)


class UnshardWork:
    """A gather that `unshard(async_op=True)` started."""

    def __init__(self, states: list[ShardState]) -> None:
        self._states = states

    def wait(self) -> None:
        """Wait for the gather; from then on the modules show their full parameters."""
        _check_not_in_scope(self._states)
        states, self._states = self._states, []
        for state in states:
            _show_unsharded(state)


def unshard(
    module: nn.Module, *, recurse: bool = False, async_op: bool = False
) -> UnshardWork | None:
    """Gather the full parameters and keep them until `reshard`.

    The module shows them as plain parameters; a forward or backward in between needs no gather.
    Edits to them are lost at `reshard` (with a warning) unless `writeback` is called before. One
    all-gather for each handle; a second call does nothing.

    Args:
        module: A sharded module.
        recurse: Also the units below `module`, which need not be sharded itself.
        async_op: Return at once with an object whose `wait()` must be called before use.

    Raises:
        ValueError: If there is no unit to unshard.
        RuntimeError: Inside `unshard_params`, which shows the full parameters already.
    """
    states = select_states(module, recurse)
    _check_not_in_scope(states)
    lazy_init(module)
    for state in states:
        _unshard(state)
    work = UnshardWork(states)
    if async_op:
        return work
    work.wait()
    return None


def reshard(module: nn.Module, *, recurse: bool = False) -> None:
    """Free the full parameters and show the sharded ones; no communication.

    Args:
        module: A sharded module.
        recurse: Also the units below `module`, which need not be sharded itself.

    Raises:
        ValueError: If there is no unit to reshard.
        RuntimeError: Inside `unshard_params`, which shows the sharded ones again itself.
    """
    states = select_states(module, recurse)
    _check_not_in_scope(states)
    for state in states:
        _reshard(state)


def _check_not_in_scope(states: list[ShardState]) -> None:
    for state in states:
        if any(handle.shown.scope for handle in state.needed_handles):
            raise RuntimeError(
                f"unit '{state.name}' shows its full parameters inside unshard_params already. "
                "Call unshard(module), its wait() and reshard(module) outside the scope."
            )


def _unshard(state: ShardState) -> None:
    """Start gathering a unit's full parameters and hold them until `_reshard`."""
    if state.is_held or state.context is None:
        return
    for handle in state.needed_handles:
        handle.shown.check_registered()
    for handle in state.needed_handles:
        handle.unshard(state.context.streams)
    state.hold()


def _show_unsharded(state: ShardState) -> None:
    """Wait for `_unshard` and register the full parameters."""
    for handle in state.needed_handles:
        if state.context is not None and not handle.shown.is_unsharded:
            # Again, if shards were written meanwhile: the gather may have sent old and new values.
            handle.unshard(state.context.streams)
        handle.full.wait()
        handle.shown.show_unsharded()
        follow_writes(handle.shown)


def _reshard(state: ShardState) -> None:
    """Free a unit's full parameters and register the sharded ones, unless a pass needs them."""
    if state.context is None:
        return
    state.let_go()
    if state.training_state is TrainingState.IDLE:
        for handle in state.needed_handles:
            if not handle.full.readers.claims:
                if handle.keep_gradients is not None:
                    handle.keep_gradients(handle)
                handle.full.end_graphs(RESHARD)
            release_handle(handle)
