"""`UnshardedDTensor`: an unsharded parameter of a tensor-parallel mesh.

This module is imported with the first of them, as it needs DTensor's class, see `dtensors`.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable_shard.flat_param.kept_params import values_for
from composable_shard.flat_param.param_classes import (
    Aliases,
    KeptDTensor,
    as_plain,
    note_on_dtensor,
    refuse_other_data,
)


class UnshardedDTensor(KeptDTensor, DTensor):
    """A full DTensor, whose `.grad` follows the gradient at rest as that of others does."""

    @staticmethod
    def __tensor_unflatten__(*args: Any) -> DTensor:
        """Make the tensor that a compiler traces, of this class: compiled code asks for it."""
        made: DTensor = DTensor.__tensor_unflatten__(*args)
        made.__class__ = UnshardedDTensor
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        found = values_for(self)
        return copy.deepcopy(as_plain(self) if found is self else found, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        found = values_for(self)
        return (as_plain(self) if found is self else found).__reduce_ex__(protocol)

    def to_local(self, **kwargs: Any) -> Tensor:
        """Return the part of what the modules show, as any DTensor's."""
        found = values_for(self)
        return super().to_local(**kwargs) if found is self else found.to_local(**kwargs)

    def full_tensor(self, **kwargs: Any) -> Tensor:
        """Return the whole of what the modules show, as any DTensor's."""
        found = values_for(self)
        return super().full_tensor(**kwargs) if found is self else found.full_tensor(**kwargs)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """Redistribute what the modules show, as any DTensor."""
        found = values_for(self)
        redistribute = super().redistribute if found is self else found.redistribute
        return redistribute(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":  # by torch.utils.swap_tensors, as `Module.to` calls it
            refuse_other_data(self.shard_label)
        super().__setattr__(name, value)


def make_unsharded(dense: DTensor, flag: bool, noted: tuple[object, Aliases, int]) -> nn.Parameter:
    """Return the parameter whose data is `dense`, the DTensor of a view of the buffer."""
    param = nn.Parameter(dense, flag)
    note_on_dtensor(param, noted)
    param.__class__ = UnshardedDTensor  # type: ignore[assignment]
    return param
