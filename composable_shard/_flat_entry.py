"""The flat parameter as one parameter, and the original parameters that it hides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from composable_shard._flat_shard import FlatShard, FlatShardOfDTensor
from composable_shard._layout import FlatLayout
from composable_shard._mesh import ShardGroup
from composable_shard._shard_spec import ParamLabel, ShardSpec

__all__ = ["FlatEntry", "flat_spec", "hide", "hide_flat", "set_requires_grad", "unhide"]


@dataclass
class FlatEntry:
    """The flat parameter as one parameter, which modules can show instead of the originals."""

    sharded: FlatShard  # spec.shape: the padding behind the last parameter is left out
    label: ParamLabel
    spec: ShardSpec
    shard_view: Tensor  # (spec's local numel,) view of the local shard
    used: list[bool]  # which parameters its `.grad` has gradients of


class _HiddenShard(FlatShard):
    """An original parameter while the flat parameter is shown instead: it has no gradient.

    An optimizer that holds it would step nothing, silently.
    """

    _reason = (
        "its unit shows one flat parameter (use_orig_params=False). Build the optimizer from "
        "model.parameters() after fully_shard, or call register_orig_params(module) first."
    )

    @property
    def grad(self) -> Tensor | None:
        """Raise: the gradient is in the flat parameter's."""
        self._raise_hidden()

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            self._raise_hidden()

    @property
    def requires_grad(self) -> bool:
        """Whether what is shown instead is trainable."""
        flag: bool = Tensor.requires_grad.__get__(self)  # type: ignore[attr-defined]
        return flag

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        if flag is not self.requires_grad:
            self._raise_hidden()

    def register_post_accumulate_grad_hook(self, hook: Any) -> NoReturn:
        """Raise: it would never run."""
        self._raise_hidden()

    def _raise_hidden(self) -> NoReturn:
        fqn = self._shard_spec.label.fqn
        raise RuntimeError(f"parameter '{fqn}' has no gradient of its own: {self._reason}")


class _HiddenShardOfDTensor(_HiddenShard, FlatShardOfDTensor):
    """A hidden original parameter that was a DTensor."""


class _HiddenFlat(_HiddenShard):
    """The flat parameter while the original parameters are shown instead."""

    _reason = (
        "its unit shows its original parameters. Build the optimizer anew from "
        "model.parameters(), or call register_flat_param(module) first."
    )


_HIDDEN: dict[type, type] = {
    FlatShard: _HiddenShard,
    FlatShardOfDTensor: _HiddenShardOfDTensor,
}
_SHOWN: dict[type, type] = {hidden: shown for shown, hidden in _HIDDEN.items()}
_SHOWN[_HiddenFlat] = FlatShard


def hide(param: FlatShard) -> None:
    """Make an original parameter, whose `.grad` is None, refuse questions for its gradient."""
    param.__class__ = _HIDDEN.get(type(param), type(param))


def hide_flat(param: FlatShard) -> None:
    """Make a flat parameter, whose `.grad` is None, refuse questions for its gradient."""
    param.__class__ = _HiddenFlat


def unhide(param: FlatShard) -> None:
    """Make a hidden parameter an ordinary FlatShard again."""
    param.__class__ = _SHOWN.get(type(param), type(param))


def set_requires_grad(param: FlatShard, flag: bool) -> None:
    """Set the flag of a parameter, which may be hidden and refuse that to users."""
    FlatShard.requires_grad.__set__(param, flag)  # type: ignore[attr-defined]


def flat_spec(
    specs: Sequence[ShardSpec], layout: FlatLayout, shard_group: ShardGroup, name: str
) -> ShardSpec:
    """Return the spec of the flat parameter that holds parameters of these specs.

    Raises:
        RuntimeError: If parameters of a tensor-parallel mesh lie on it in different ways.
    """
    shape, tensor_parallel = torch.Size([layout.end]), specs[0].tensor_parallel
    if tensor_parallel is not None:
        mesh, placements = tensor_parallel
        numel, placements = _flat_placement(layout.end, mesh, placements)
        shape, tensor_parallel = torch.Size([numel]), (mesh, placements)
    total = sum(spec.shape.numel() for spec in specs)
    is_even = total * layout.end == sum(layout.numels) * shape.numel()
    if len({spec.tensor_parallel for spec in specs}) > 1 or not is_even:
        raise RuntimeError(
            f"the parameters {[spec.label.fqn for spec in specs]} lie on their tensor-parallel "
            "mesh in different ways, or unevenly, so they can't be one flat parameter. Pass "
            "use_orig_params=True, or make them units of their own."
        )
    return ShardSpec(
        shape=shape,
        dense_shape=torch.Size([layout.end]),
        dense_stride=(1,),
        layout=layout,
        index=None,
        rank=shard_group.rank,
        group_name=shard_group.name,
        tensor_parallel=tensor_parallel,
        label=ParamLabel(name),
    )


def _flat_placement(
    numel: int, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> tuple[int, tuple[Placement, ...]]:
    """Return the elements of a mesh's flat parameters together, and how they lie on the mesh."""
    flat: list[Placement] = []
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            numel *= mesh.size(axis)
            placement = Shard(0)
        flat.append(placement)
    return numel, tuple(flat)
