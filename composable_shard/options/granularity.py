"""How finely ranks cut a parameter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from torch import nn


@dataclass(frozen=True)
class Block:
    """A granularity: each `numel` consecutive elements of a parameter stay on one rank.

    Blocks begin at the parameter's first element, in memory order; the last one may be shorter. Use
    it for optimizers with block-wise quantised state, for example `Block(256)`.

    Attributes:
        numel: Elements in a block, at least 1.
    """

    numel: int

    def __post_init__(self) -> None:
        """Check the size."""
        if not isinstance(self.numel, int) or isinstance(self.numel, bool) or self.numel < 1:
            raise ValueError(f"expected Block(n) with n >= 1 elements, got {self.numel!r}")


_Name = Literal["element", "row", "param"]
# Cut anywhere, between rows, not at all, or between blocks.
Granularity: TypeAlias = _Name | Block
# One for all parameters of a unit, or a function of a parameter, the same on all ranks.
GranularityOption: TypeAlias = Granularity | Callable[[nn.Parameter], Granularity]

_EXPECTED = ", ".join(f'"{name}"' for name in get_args(_Name)) + " or Block(n)"


def check_granularity(value: object) -> None:
    """Check what a user passed for all parameters of a unit."""
    if not (_is_granularity(value) or callable(value)) or isinstance(value, type):
        raise ValueError(
            f"expected granularity to be {_EXPECTED}, or a function of a parameter that returns "
            f"one of these, got {value!r}"
        )


def granularity_of(param: nn.Parameter, fqn: str, option: GranularityOption) -> Granularity:
    """Return the granularity of one parameter."""
    if isinstance(option, (str, Block)):
        return option
    value = option(param)
    if not _is_granularity(value):
        raise ValueError(
            f"expected the granularity function to return {_EXPECTED}, got {value!r} for '{fqn}'"
        )
    return value


def _is_granularity(value: object) -> bool:
    return isinstance(value, Block) or (isinstance(value, str) and value in get_args(_Name))
