"""The table of rules by which ops run on shards, which `op_rules` fills."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from composable_shard.options import WHOLE_NEEDED
from composable_shard.torch_private import OpOverload

Rule = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]
WholeRule = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Callable[[], Any] | None]


class NeedsWhole(RuntimeError):
    """Raised by a rule, before it changes anything, if it needs more than this rank's range.

    If this rank holds every operand whole, the op runs on whole tensors instead. Users see its
    `refusal()`.
    """

    def __init__(self, text: str, remedy: str = WHOLE_NEEDED, in_graph: str = "") -> None:
        super().__init__(text)
        self._remedy, self._in_graph = remedy, in_graph

    def refusal(self, in_training: str) -> RuntimeError:
        """Return the error for users.

        Args:
            in_training: The remedy where autograd records, if the error has no better one; else "".
        """
        return RuntimeError(
            f"{self} {(in_training and self._in_graph) or in_training or self._remedy}"
        )


class RuleTable(dict[OpOverload, Rule]):
    """How each op runs on FlatShards: rules by op, and families that make rules for whole kinds.

    Filled once by `register_op_rules`; what a family makes is kept.

    Attributes:
        families: Asked in order for a rule of an op that has none.
        on_lists: Runs a function of torch on lists of shards.
        on_whole: Asked after `NeedsWhole` for a function that runs the op on whole tensors; returns
            None if this rank does not hold them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.families: list[Callable[[OpOverload], Rule | None]] = []
        self.on_lists: Callable[..., Any] = lambda *_: NotImplemented
        self.on_whole: WholeRule = lambda *_: None  # until the table is filled

    def __missing__(self, func: OpOverload) -> Rule:
        """Ask the families in order; the last one makes a rule that raises, for any op."""
        made = (family(func) for family in self.families)
        self[func] = rule = next(rule for rule in made if rule is not None)
        return rule


OP_RULES = RuleTable()
