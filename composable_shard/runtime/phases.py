"""The phases of the end of a backward, and which deadlock the place of each prevents.

[Note: Phases]
When autograd has run all its nodes, ranks may have issued different numbers of reductions, and some
ranks may have no gradient at all. From here on every rank goes through all phases. In each, orders
of reductions act first, `Order.acts`, and then `BackwardPass`.
"""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """A phase, with the reason for its place."""

    COLLECT = (
        "Wait for the flags in flight. Before PACK: the flags at the end leave out handles whose "
        "gradients are final, and must have one length on all ranks."
    )
    PACK = (
        "Choose what is reduced, and pack what is left; nothing is sent. Before JOIN: a reduction "
        "that one rank can't begin for an error in its packing lets all others wait."
    )
    JOIN = (
        "Issue the reductions that other ranks may have issued in the middle of their backwards. "
        "Before FLAGS: those ranks reach their flags only when this rank has taken part."
    )
    FLAGS = (
        "Send which parameters were used. Before REST: from these flags, which every rank sends, a "
        "rank without gradients learns that the others reduce the rest, and wait for it there."
    )
    REST = (
        "Reduce what is left, on all ranks or on none. Before LAST: ranks with gradients issue "
        "these before they have read the flags, and the order must be one."
    )
    LAST = (
        "Reduce what the flags have shown: gradients that came late, and handles that no rank "
        "expected. Before DELIVER: another rank may learn of them alone, and waits here."
    )
    DELIVER = (
        "Publish what is final early, and run its hooks. Before PUBLISH, which waits for all flags "
        "in flight; after all reductions, for a hook may issue collectives itself."
    )
    PUBLISH = (
        "Wait for all reductions, then for all flags, then set `.grad`. Nothing is published "
        "before all waits are over: one that fails fails on all ranks, which drop all gradients."
    )
    IDLE = (
        "Bring units to rest. Before HOOKS, which may run a forward or a backward of the tree; "
        "until here an interrupt counts as an abort."
    )
    HOOKS = "Run hooks on published gradients. Last: a hook may raise, or step an optimizer."

    __hash__ = object.__hash__  # Enum's own is a slow Python function
