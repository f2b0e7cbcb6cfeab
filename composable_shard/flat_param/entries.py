"""What a handle knows of each parameter: its names, its slots, its dtypes.

[Note: Reduce dtype]
The buffer of gradients may have another dtype than the parameters: packing casts. Gradients of
microbatches that are not reduced then add up in it too, under every strategy. The result is cast
once, to the main dtype. Where that takes memory of its own, persistent gradients have it
persistently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from composable_shard.comm import ShardGroup
from composable_shard.layout import FlatLayout
from composable_shard.options import PRECISIONS, MixedPrecisionPolicy
from composable_shard.tensor import FlatShard, FlatShardOfDTensor, ParamLabel, ShardSpec

__all__ = [
    "FlatEntry",
    "Precision",
    "UnshardedParameter",
    "alias_of",
    "flat_spec",
    "hide",
    "hide_flat",
    "is_repointed",
    "make_unsharded",
    "set_requires_grad",
    "unhide",
]


@dataclass(frozen=True)
class Precision:
    """Dtypes that differ, or may come to differ, from that of the local shard.

    None follows another dtype, also through `module.to(dtype)`.

    Attributes:
        main_dtype: What the local shard must have; None: whatever it has.
        param_dtype: Of the unsharded buffer; None: that of the local shard.
        gather_dtype: In which shards travel; None: that of the unsharded buffer.
        reduce_dtype: In which gradients travel; None: that of the unsharded buffer.
    """

    main_dtype: torch.dtype | None = None
    param_dtype: torch.dtype | None = None
    gather_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    @classmethod
    def of(cls, policy: MixedPrecisionPolicy, dtype: torch.dtype, *, is_kept: bool) -> Precision:
        """Return the dtypes of a flat parameter.

        Args:
            policy: Of its unit.
            dtype: Of its original parameters.
            is_kept: Whether they are in a module that computes in their main dtype.
        """
        if dtype not in PRECISIONS:
            return cls()
        if is_kept:
            return cls(policy.main_dtype)
        param_dtype = policy.param_dtype
        if param_dtype is None and policy.main_dtype is not None:
            param_dtype = dtype  # the model computes as it did
        return cls(policy.main_dtype, param_dtype, policy.gather_dtype, policy.reduce_dtype)

    def computes_in(self, main: torch.dtype) -> torch.dtype:
        """Return the dtype of the unsharded buffer, where the local shard's is `main`."""
        return self.param_dtype or main

    def reduces_in(self, main: torch.dtype) -> torch.dtype:
        """Return the dtype of the reduce buffer."""
        return self.reduce_dtype or self.computes_in(main)

    def travels_in(self, main: torch.dtype) -> torch.dtype:
        """Return the dtype in which shards are gathered."""
        return self.gather_dtype or self.computes_in(main)

    def itemsize(self, main: torch.dtype) -> int:
        """Return the smallest size of an element in any of the buffers, which alignment is for."""
        used = (main, self.computes_in(main), self.reduces_in(main), self.travels_in(main))
        return min(dtype.itemsize for dtype in used)


class UnshardedParameter(nn.Parameter):
    """A parameter that remembers whether anyone took an alias of it that autograd can't see.

    The value may give way to the gradient once autograd is done with the parameter. A node that
    computes with `param.detach()` or `param.data` may come later, and for `.data` not even the
    version counter would tell. See [Note: Packing in place].
    """

    has_hidden_alias: bool = False
    is_repointed: bool = False  # `param.data = x`: it is no view of the buffer any more

    def detach(self) -> Tensor:
        """Return a detached alias, as any tensor's does."""
        self.has_hidden_alias = True
        return super().detach()

    @property
    def data(self) -> Tensor:
        """A detached alias with a version counter of its own, as any tensor's is."""
        self.has_hidden_alias = True
        return super().data

    @data.setter
    def data(self, value: Tensor) -> None:
        self.is_repointed = True
        increment_version(self)  # an edit like any other
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]


def make_unsharded(dense: Tensor, requires_grad: bool) -> nn.Parameter:
    """Return the parameter whose data is `dense`, a view of the buffer (or a DTensor of one)."""
    kind: Any = nn.Parameter if isinstance(dense, DTensor) else UnshardedParameter
    param: nn.Parameter = kind(dense, requires_grad)
    return param


def is_repointed(param: nn.Parameter) -> bool:
    """Return whether `param.data` was set to another tensor."""
    return isinstance(param, UnshardedParameter) and param.is_repointed


def alias_of(param: nn.Parameter) -> Tensor:
    """Return the parameter's data (of a DTensor: the local part) under its version counter."""
    alias = torch.Tensor.detach(param)
    return alias.to_local() if isinstance(alias, DTensor) else alias


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
