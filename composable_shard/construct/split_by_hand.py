"""Plain parameters that are this rank's part of larger ones, as a model splits them by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from composable_shard.dtensors import from_local

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

_PARTS: dict[int, PlainPart] = {}  # by the identity of parameters, in calls of `plain_parts`


class PlainPart(NamedTuple):
    """How a plain parameter lies on a mesh; modules compute with it as it is.

    At rest it is what a DTensor of these placements is: state dicts, norms and operations see the
    whole parameter.

    Args:
        mesh: The axes on which it is a part, or the same.
        own_placements: `Shard` or `Replicate` for each of them.
        gradient_placements: Those of the gradients that a backward gives: `Partial` where the
            ranks' gradients have to be added up.
    """

    mesh: DeviceMesh
    own_placements: tuple[Placement, ...]
    gradient_placements: tuple[Placement, ...]

    def whole_shape(self, part: Tensor) -> torch.Size:
        """Return the shape of the parameter that `part` belongs to."""
        like = torch.empty_like(part, device="meta")
        return from_local(like, self.mesh, self.own_placements).shape


def plain_part_of(param: nn.Parameter) -> PlainPart | None:
    """Return how a plain parameter lies on a mesh, if a caller of `plain_parts` has said so."""
    return _PARTS.get(id(param)) if _PARTS else None


@contextmanager
def plain_parts(parts: Mapping[nn.Parameter, PlainPart]) -> Iterator[None]:
    """Let units that are formed inside take plain parameters for the parts that they are."""
    said = {id(param): part for param, part in parts.items()}
    _PARTS.update(said)
    try:
        yield
    finally:
        for key in said:
            _PARTS.pop(key, None)
