"""How finely a parameter may be cut: what users ask for, and the block that it comes to."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TypeAlias

from torch import Tensor, nn

from composable_shard.api import Block, Granularity

__all__ = ["GranularityOption", "block_numel", "check_option", "granularity_of"]

GranularityOption: TypeAlias = Granularity | Callable[[nn.Parameter], Granularity]

_NAMES = ("element", "row", "param")
_EXPECTED = '"element", "row", "param" or Block(n)'


def check_option(value: object) -> None:
    """Check what a user passed for all parameters of a unit.

    Raises:
        ValueError: If it is neither a granularity nor a function that returns one.
    """
    if not (_is_granularity(value) or callable(value)) or isinstance(value, type):
        raise ValueError(
            f"expected granularity to be {_EXPECTED}, or a function of a parameter that returns "
            f"one of these, got {value!r}"
        )


def granularity_of(param: nn.Parameter, fqn: str, option: GranularityOption) -> Granularity:
    """Return the granularity of one parameter.

    Raises:
        ValueError: If the user's function returned something else, naming the parameter.
    """
    if isinstance(option, (str, Block)):
        return option
    value = option(param)
    if not _is_granularity(value):
        raise ValueError(
            f"expected the granularity function to return {_EXPECTED}, got {value!r} for '{fqn}'"
        )
    return value


def _is_granularity(value: object) -> bool:
    return isinstance(value, Block) or (isinstance(value, str) and value in _NAMES)


def block_numel(dense: Tensor, granularity: Granularity) -> int:
    """Return how many consecutive elements of a dense tensor, in memory order, stay together.

    A row is what one index of the outermost dimension in memory selects: of the first one, unless
    the tensor is laid out otherwise (channels_last, a transposed weight).
    """
    if isinstance(granularity, Block):
        return granularity.numel
    if granularity == "element" or dense.numel() == 0:
        return 1
    if granularity == "param":
        return dense.numel()
    outermost = max(range(dense.dim()), key=lambda dim: dense.stride(dim), default=None)
    if outermost is None:
        return 1
    return prod(size for dim, size in enumerate(dense.shape) if dim != outermost)
