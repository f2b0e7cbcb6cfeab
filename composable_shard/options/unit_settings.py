"""`UnitSettings`: what the setters change of a unit after `fully_shard`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import ref

from composable_shard.options.unit_options import ReshardAfterForward


class TakesPlace(Protocol):
    """What takes the place of the collectives of a unit's reductions.

    Attributes:
        name: For the ranks to compare.
    """

    name: str

    def make_sum(self, *arguments: Any, gaps: Any, before: Any) -> Any:
        """Return what takes the place of a reduce-scatter, with its methods."""
        ...

    def reduce(self, stage: Any) -> Any:
        """Start a stage of a reduction; return its work."""
        ...


@dataclass(frozen=True)
class UnitSettings:
    """What the setters change of a unit after `fully_shard`; its handles have the same record.

    Attributes:
        reshard_after_forward: True frees the full parameters between forward and backward, False
            keeps them, None keeps them only where the unit leads the call, and a number n keeps
            1/n of them.
        reshard_after_backward: Whether the end of a backward frees the full parameters.
        requires_gradient_sync: False leaves gradients unsharded and unreduced.
        requires_all_reduce: False reduces gradients over the shard group only.
        is_last_backward: False while accumulating: more backwards come before the step.
        unshard_in_backward: False: the user promised that no backward reads full parameters.
        gathers_at_rest: Whether operations on parameters at rest may gather whole tensors.
        gradient_divide_factor: Divisor of the gradients' sum over all data-parallel ranks; None:
            their number.
        comm_hook: What takes the place of the collectives of reductions; None: nothing.
        forward_prefetch: Units to gather when its forward begins; None: the units expected next.
        backward_prefetch: Units to gather when its backward begins; None: the units expected next.
    """

    reshard_after_forward: ReshardAfterForward = None
    reshard_after_backward: bool = True
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    is_last_backward: bool = True
    unshard_in_backward: bool = True
    gathers_at_rest: bool = True
    gradient_divide_factor: float | None = None
    comm_hook: TakesPlace | None = None
    forward_prefetch: tuple[ref[Any], ...] | None = None
    backward_prefetch: tuple[ref[Any], ...] | None = None

    @property
    def reduces_fully(self) -> bool:
        """Whether a backward reduces gradients completely, over all ranks."""
        return self.requires_gradient_sync and self.requires_all_reduce and self.is_last_backward

    @property
    def hook_name(self) -> str | None:
        """The name of the comm hook, None where there is none."""
        return None if self.comm_hook is None else self.comm_hook.name

    def changed(self) -> dict[str, object]:
        """Return what setters have changed, by name, for the ranks to compare.

        Left out are what the ranks compare anyway and what units are called, which the tree knows.
        """
        return {
            "comm_hook": self.hook_name,
            "gradient_divide_factor": self.gradient_divide_factor,
            "keeps_after_backward": not self.reshard_after_backward,
            "no_gradient_sync": not self.requires_gradient_sync,
            "no_all_reduce": not self.requires_all_reduce,
            "is_not_last_backward": not self.is_last_backward,
            "no_unshard_in_backward": not self.unshard_in_backward,
            "no_gathers_at_rest": not self.gathers_at_rest,
        }

    def of_copy(self) -> UnitSettings:
        """Return the settings of a copy: without a hook, and without units of the original."""
        return replace(self, comm_hook=None, forward_prefetch=None, backward_prefetch=None)
