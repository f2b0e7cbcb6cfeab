"""DTensors, for programs that may have none.

`import torch.distributed.tensor` takes half a second, so what every program imports asks for
DTensors here. Whoever holds a DTensor, or a placement of one, has imported that module; where
nobody has, nothing is a DTensor.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from typing_extensions import TypeIs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

_MODULE = "torch.distributed.tensor"


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Return whether a value is a DTensor."""
    return isinstance(value, getattr(sys.modules.get(_MODULE), "DTensor", ()))


def from_local(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], **whole: Any
) -> DTensor:
    """Return the DTensor of which each rank holds its `local` part; nothing is compared or sent."""
    kind: type[DTensor] = sys.modules[_MODULE].DTensor
    return kind.from_local(local, mesh, placements, run_check=False, **whole)


def distribute(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return a tensor that is the same on all ranks as a DTensor: each cuts its part, locally."""
    cut: Any = sys.modules[_MODULE].distribute_tensor
    made: DTensor = cut(tensor, mesh, placements, src_data_rank=None)
    return made


def are_shards_or_replicas(placements: Sequence[Placement]) -> bool:
    """Return whether each placement is `Shard` or `Replicate`: no values are to be added up."""
    kinds = sys.modules[_MODULE].Shard, sys.modules[_MODULE].Replicate
    return all(isinstance(placement, kinds) for placement in placements)
