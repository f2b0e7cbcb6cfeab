"""`Readers`: who may still read the full values of one flat parameter.

The ledger answers three questions. May the unit's modules show the shards again: only without
`claims`. May the memory of the values be freed: `may_free`. May a gradient take the place of a
value, [Note: Packing in place]: `may_overwrite`. Whoever is about to read enters before, and leaves
as the rule of its kind says.

Not entered is what nobody could enter, or take out, at the right moment; whoever packs a gradient
asks for it instead (`runtime/backward.py`, `_pack`): hooks of users on modules, because a dict of
torch's is all that there is of them, and a region that a checkpoint runs again, because it belongs
to a call and not to the values. The scopes of `unshard_params` read a buffer of their own. A gather
that was issued ahead reads nothing yet, so its values are freed unless somebody has entered.
"""

from __future__ import annotations

from typing import NamedTuple

# Kinds of readers, as bits: a step tests an int.
FORWARD, HELD, GRAPH, LATE_GRAPH, HIDDEN_ALIAS, NESTED = (1 << index for index in range(6))

# What ends readers.
POST_FORWARD = "the unit's forward ends, or fails"
RESHARD = "`reshard`"
WRITE = "a write to the shards"
BACKWARD = "the end of a backward that publishes gradients"
CONVERSION = "new full parameters, as after `.to()`"


class Rule(NamedTuple):
    """What the values must be spared for one kind of reader, and for how long.

    Attributes:
        name: What reads.
        enters: When it is entered.
        keeps_shown: It is a claim of somebody by name: modules go on showing the full values.
        keeps_memory: Their memory stays.
        ends_with: What ends it; empty: nothing.
    """

    name: str
    enters: str
    keeps_shown: bool = False
    keeps_memory: bool = False
    ends_with: tuple[str, ...] = ()


RULES: dict[int, Rule] = {
    FORWARD: Rule(
        "a unit's forward",
        "before it gathers",
        keeps_shown=True,
        keeps_memory=True,
        ends_with=(POST_FORWARD,),
    ),
    HELD: Rule(
        "the program, after `unshard`",
        "when the gather was issued",
        keeps_shown=True,
        keeps_memory=True,
        ends_with=(RESHARD,),
    ),
    GRAPH: Rule(
        "a graph with no output to hook: of `create_graph`, of a transform, behind a late output",
        "before its nodes are recorded, or as its forward ends",
        keeps_memory=True,
        ends_with=(WRITE, RESHARD, CONVERSION),
    ),
    LATE_GRAPH: Rule(
        "a graph that may read a value after its gradient is complete: recorded while the parameter"
        " was frozen, or by a forward whose number of nodes was new",
        "when the parameter is unfrozen, or as that forward ends",
        ends_with=(BACKWARD, CONVERSION),
    ),
    HIDDEN_ALIAS: Rule(
        "whoever has an alias that autograd does not connect with the parameter",
        "when the alias is taken or saved",
        ends_with=(CONVERSION,),
    ),
    NESTED: Rule(
        "a backward inside the backward, as of reentrant checkpoints, which may use a parameter"
        " again",
        "with the first gradient that one packs",
    ),
}

_KEEP_MEMORY = sum(kind for kind, rule in RULES.items() if rule.keeps_memory)
_ENDS = {
    event: sum(kind for kind, rule in RULES.items() if event in rule.ends_with)
    for event in (WRITE, RESHARD, BACKWARD, CONVERSION)
}


class Readers:
    """Who may still read the full values of one flat parameter.

    Attributes:
        claims: Pairs of a kind that keeps values shown, and who it is. A set: to claim twice, as
            after an interrupt, is to claim once, and units that share the values claim apart.
        bits: The other kinds that are entered.
    """

    __slots__ = ("bits", "claims")

    def __init__(self) -> None:
        self.claims: set[tuple[int, object]] = set()
        self.bits = 0

    @property
    def may_free(self) -> bool:
        """Whether the values' memory may be freed: no reader keeps it."""
        return not (self.claims or self.bits & _KEEP_MEMORY)

    @property
    def may_overwrite(self) -> bool:
        """Whether a gradient may take the place of a value: nobody is entered."""
        return not (self.claims or self.bits)

    def add(self, kind: int) -> None:
        """Enter a kind that is no claim."""
        self.bits |= kind

    def end(self, event: str) -> int:
        """Take out the kinds that an event ends, claims aside; return those that were entered."""
        ended = self.bits & _ENDS[event]
        self.bits ^= ended
        return ended

    def follow(self, before: Readers) -> None:
        """Take over the readers that outlive a conversion."""
        self.claims, self.bits = before.claims, before.bits & ~_ENDS[CONVERSION]
