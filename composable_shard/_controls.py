"""Functions that users call on sharded modules between and around steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from composable_shard._contract import read_state
from composable_shard._lazy_init import lazy_init
from composable_shard._runtime import reshard_state, show_unsharded, unshard_state
from composable_shard._state import ShardState
from composable_shard._traversal import get_states

__all__ = ["UnshardWork", "no_sync", "reshard", "set_requires_gradient_sync", "unshard"]


class UnshardWork:
    """A gather that `unshard(async_op=True)` started."""

    def __init__(self, states: list[ShardState]) -> None:
        self._states = states

    def wait(self) -> None:
        """Wait for the gather; from then on the modules show their full parameters."""
        states, self._states = self._states, []
        for state in states:
            show_unsharded(state)


def _select(module: nn.Module, recurse: bool) -> list[ShardState]:
    own = read_state(module)
    states = get_states(module) if recurse else [own] if own is not None else []
    if not states:
        where = "a module with sharded units" if recurse else "a sharded module"
        raise ValueError(
            f"expected {where}, got {type(module).__name__}. Call fully_shard on it first"
            + ("." if recurse else ", or pass recurse=True for the units inside it.")
        )
    return states


def unshard(
    module: nn.Module, *, recurse: bool = False, async_op: bool = False
) -> UnshardWork | None:
    """Gather the full parameters and keep them until `reshard`.

    The module shows them as plain parameters; a forward or backward in between needs no gather.
    Edits to them are not written back to the shards. One all-gather for each handle; a second
    call does nothing.

    Args:
        module: A sharded module.
        recurse: Also the units below `module`, which need not be sharded itself.
        async_op: Return at once with an object whose `wait()` must be called before use.

    Raises:
        ValueError: If there is no unit to unshard.
    """
    states = _select(module, recurse)
    lazy_init(module)
    for state in states:
        unshard_state(state)
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
    """
    for state in _select(module, recurse):
        reshard_state(state)


def set_requires_gradient_sync(module: nn.Module, flag: bool, *, recurse: bool = True) -> None:
    """Choose whether backwards reduce gradients, or accumulate them unsharded on each rank.

    The first backward with `flag` True reduces what was accumulated.

    Args:
        module: A module with sharded units.
        flag: Whether to reduce.
        recurse: Also the units below `module`.

    Raises:
        ValueError: If there is no unit.
    """
    for state in _select(module, recurse):
        state.requires_gradient_sync = flag


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Accumulate gradients without communication in the enclosed block.

    As in DistributedDataParallel, the next backward outside reduces the sum. Each rank holds
    unsharded gradients meanwhile. The earlier setting of each unit comes back, also after an
    exception.

    Raises:
        ValueError: If there is no unit in `module`.
    """
    states = _select(module, recurse=True)
    before = [state.requires_gradient_sync for state in states]
    for state in states:
        state.requires_gradient_sync = False
    try:
        yield
    finally:
        for state, flag in zip(states, before, strict=True):
            state.requires_gradient_sync = flag
