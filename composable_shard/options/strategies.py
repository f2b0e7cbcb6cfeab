"""`ShardingStrategy` and the facts of each strategy; no other code names the members."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeAlias

from composable_shard.options.advice import expected


@dataclass(frozen=True)
class StrategyFacts:
    """The facts of one strategy. Other code reads these facts and never compares strategies.

    Attributes:
        frees_params: At rest, and between forward and backward, a rank keeps only its shard; each
            forward and backward gathers. False: the full parameters stay in one buffer; the first
            forward after a write gathers into it.
        accumulates_unsharded: Gradients accumulate in one persistent buffer of full size and are
            reduced once. False: each backward outside of `no_sync` reduces into shards.
        is_replicated: Each rank steps all parameters; nothing is gathered, and gradients are
            all-reduced. False: each rank steps its shard, and gradients are reduce-scattered.
    """

    frees_params: bool = False
    accumulates_unsharded: bool = False
    is_replicated: bool = False

    def __post_init__(self) -> None:
        """Check that the facts are possible together."""
        if self.is_replicated > self.accumulates_unsharded or (
            self.frees_params and self.accumulates_unsharded
        ):
            raise ValueError(
                "expected facts that hold together: a strategy that frees parameters accumulates "
                f"no unsharded gradients, and a replicated one does; got {self}"
            )

    def keeps_params(self, shard_size: int) -> bool:
        """Return whether full parameters stay, if `shard_size` ranks share the unit."""
        return shard_size == 1 or not self.frees_params

    def keeps_gradients(self, shard_size: int, num_ranks: int) -> bool:
        """Return whether full gradients stay in one buffer; `num_ranks` counts copies too."""
        return num_ranks > 1 and (shard_size == 1 or self.accumulates_unsharded)


class ShardingStrategy(Enum):
    """The parts of a unit that each rank keeps. All strategies compute the same training."""

    facts: StrategyFacts

    def __new__(cls, value: str, facts: StrategyFacts) -> ShardingStrategy:
        """Make a member whose value is its name in lower case."""
        member = object.__new__(cls)
        member._value_ = value
        member.facts = facts
        return member

    # Parameters, gradients and optimizer state are sharded at rest; a unit is gathered for its
    # forward and again for its backward.
    FULL_SHARD = "full_shard", StrategyFacts(frees_params=True)
    # Parameters stay unsharded, and are gathered again, in place, by the first forward after they
    # were written; gradients and optimizer state are sharded.
    SHARD_GRAD_OP = "shard_grad_op", StrategyFacts()
    # Only optimizer state is sharded: gradients have a buffer that is as large as the parameters,
    # accumulate in it, and are reduced once.
    SHARD_OPTIM = "shard_optim", StrategyFacts(accumulates_unsharded=True)
    # Every rank holds everything; gradients are all-reduced.
    NO_SHARD = "no_shard", StrategyFacts(accumulates_unsharded=True, is_replicated=True)


# The values of the members, as an editor completes them.
StrategyName: TypeAlias = Literal["full_shard", "shard_grad_op", "shard_optim", "no_shard"]


def strategy_of(value: object) -> ShardingStrategy:
    """Return the strategy that a user passed, as a member or as its name in either case."""
    if isinstance(value, ShardingStrategy):
        return value
    if isinstance(value, str):
        members = {member.value: member for member in ShardingStrategy}
        if value.lower() in members:
            return members[value.lower()]
        advice = _HYBRID if value.lower().removeprefix("_").startswith("hybrid") else ""
        names = ", ".join(map(repr, members))
        raise ValueError(
            f"expected strategy to be a ShardingStrategy or one of {names}, got {value!r}.{advice}"
        )
    raise ValueError(expected("strategy", ShardingStrategy, value))


_HYBRID = ' It is "full_shard" over a 2-D mesh (replicate, shard).'

DEFAULT_STRATEGY = ShardingStrategy.FULL_SHARD
