"""The record of each parameter, and of the flat parameter: its objects, its places, its spec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from composable_shard.comm import ShardGroup
from composable_shard.flat_param.storage import Slot, take_place
from composable_shard.layout import FlatLayout
from composable_shard.tensor import (
    FlatShard,
    FlatShardOfDTensor,
    ParamLabel,
    ShardSpec,
    WriteGuard,
    rebind,
)


@dataclass
class ParamEntry:
    """One managed parameter: the object users hold, and the one modules compute with."""

    sharded: FlatShard  # the original Parameter object; spec.shape
    spec: ShardSpec
    slots: list[Slot] = field(default_factory=list)  # every place that shows it; several if tied
    # spec.shape, a view of the unsharded buffer; printing it without storage would crash
    unsharded: nn.Parameter | None = field(default=None, repr=False)
    shard_view: Tensor | None = None  # (spec's local numel,) view of the local shard
    runs_hooks: bool = False  # `unsharded` runs the hooks that users registered on `sharded`

    @property
    def label(self) -> ParamLabel:
        """The name for messages."""
        return self.spec.label

    def slice_of(self, shard: Tensor) -> Tensor:
        """Return the parameter's part of a tensor of shape `(layout.shard_numel,)`, a view."""
        spec = self.spec
        if spec.index is None:
            start, end = spec.local_range
            return shard[: end - start]
        start, end = spec.layout.local_range(spec.index, spec.rank)
        return shard[start:end]

    def add_slots(self, slots: list[Slot]) -> None:
        """Let the parameter be shown in further places."""
        self.slots = self.slots + slots

    def replace(self, original: nn.Parameter) -> None:
        """Turn the original Parameter object into the sharded parameter; attributes carry over.

        `.grad`, which must be None, stays the caller's.
        """
        take_place(original, self.sharded)
        self.sharded = original  # type: ignore[assignment]
        if self.shard_view is None or original.dtype != self.shard_view.dtype:
            raise RuntimeError(
                f"parameter '{self.label}' has {original.dtype} after it was sharded, not that of "
                "its shard; please report this"
            )

    def view_in(self, shard: Tensor, guard: WriteGuard) -> None:
        """Make the sharded parameter a view of its part of a new shard."""
        self.shard_view = self.slice_of(shard)
        param, view = self.sharded, self.shard_view
        if (
            param.dtype != view.dtype
            or param.device != view.device
            or param.shape != self.spec.shape
        ):
            self.remake(guard)
        rebind(param, view, self.spec, guard)

    def remake(self, guard: WriteGuard) -> None:
        """Make the sharded parameter what the entry says: of another dtype, or another shape."""
        param = self.sharded
        shown_class = FlatShardOfDTensor if isinstance(param, FlatShardOfDTensor) else FlatShard
        old_class, flag = type(param), param.requires_grad
        shard = shown_class(cast(Tensor, self.shard_view), self.spec, guard=guard)
        take_place(cast(nn.Parameter, param), nn.Parameter(shard, flag))
        param.__class__ = old_class


@dataclass
class FlatEntry(ParamEntry):
    """The flat parameter as one parameter, which modules can show instead of the originals.

    The padding behind the last parameter is left out of `spec.shape`. `unsharded` is there while
    modules show the full values as one parameter.
    """

    used: list[bool] = field(default_factory=list)  # whose gradients are in its `.grad`


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
        label=ParamLabel(name, specs[0].label.owned),
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
