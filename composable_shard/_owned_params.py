"""What this process knows about parameters that one rank holds whole, beside what it holds.

[Note: Writes by owners]
An optimizer steps a parameter of granularity "param" on its owner alone, and the other ranks, which
have no gradient of it, see nothing. All ranks must decide alike whether full values that were
gathered before are still valid, so every step of an optimizer counts as a write to all owned
parameters in its groups, on every rank; and full values that outlive a backward that reduced
gradients are gathered anew, for who steps by hand. A write by hand at any other time must happen on
all ranks: an in-place op on the empty slice counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol
from weakref import WeakSet

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from composable_shard._flat_shard import FlatShard
from composable_shard._operands import note_write

__all__ = ["note_owned", "trainable_owned"]


class _Entry(Protocol):
    sharded: FlatShard


class _Handle(Protocol):
    requires_grad: bool
    shows_flat: bool

    @property
    def entries(self) -> Iterable[_Entry]: ...


# Of a process, not of a model: gradients and optimizers don't refer to models.
_HANDLES: WeakSet[_Handle] = WeakSet()
_HOOKS: list[Any] = []


def note_owned(handle: _Handle) -> None:
    """Remember a flat parameter, as long as it lives, whose parameters other ranks hold whole."""
    _HANDLES.add(handle)
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_pre_hook(_note_step))
        _HOOKS.append(register_optimizer_step_post_hook(_note_step))


def trainable_owned() -> Iterator[FlatShard]:
    """Yield all trainable parameters, shown as such, that are whole on one of several ranks.

    The same ones on all ranks, whatever gradients those have.
    """
    for handle in list(_HANDLES):
        if handle.requires_grad and not handle.shows_flat:
            yield from (entry.sharded for entry in handle.entries)


def _note_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count a step as a write, [Note: Writes by owners]; before it, and after its closure ran."""
    noted = None
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not isinstance(param, FlatShard) or param._guard is noted:
                continue
            spec = param._shard_spec
            if spec.owner is not None and spec.world_size > 1:
                note_write(param)
                noted = param._guard
