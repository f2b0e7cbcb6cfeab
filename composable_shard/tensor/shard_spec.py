"""`ShardSpec`: which flat range of a parameter a `FlatShard` holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from composable_shard.dtensors import are_shards_or_replicas, from_local
from composable_shard.layout import (
    Bounds,
    FlatLayout,
    Region,
    intersect,
    memory_order,
    whole_box,
)
from composable_shard.tensor.labels import ParamLabel
from composable_shard.torch_private import local_shape_and_offset

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """Immutable description of one rank's flat range of one tensor.

    The *dense* tensor is what the ranks of the shard group hold together: the original parameter,
    or its local part where it is a DTensor of a tensor-parallel mesh. Its elements, in memory
    order, are a layout's elements of one parameter from `start` on, or with `index` None of all
    parameters with the padding between them. Compares and hashes by value; `label` is for messages
    only. The attributes below are computed at the first access.

    Attributes:
        numel: Elements of the dense tensor.
        owner: The rank that holds the whole tensor by plan; None if all ranks share it.
        is_whole: This rank holds the whole tensor, by plan or by its strategy.
        is_owned_by_other_rank: Another rank holds the whole tensor, and this one nothing of it.
        local_range: This rank's half-open range of the dense tensor's elements.
        region: This rank's elements in the logical tensor, [Note: Regions].
        stride: Stride of the logical tensor.
        wrapper: `shape` and `stride`; None for a row-major stride, as torch is faster then.
        views: Specs of views, and where they begin in this rank's slice, by the call of a view op.
    """

    shape: torch.Size  # logical shape, what `tensor.shape` says
    dense_shape: torch.Size  # shape of the dense tensor; differs from `shape` for DTensors only
    dense_stride: tuple[int, ...]
    layout: FlatLayout  # places and owners of the handle's parameters
    index: int | None  # of the parameter in `layout`
    rank: int
    group_name: str
    tensor_parallel: tuple[DeviceMesh, tuple[Placement, ...]] | None = None
    plain_gradients: tuple[Placement, ...] | None = None  # modules see the local part, plain
    label: ParamLabel = field(default_factory=lambda: ParamLabel("?"), compare=False)
    start: int = 0  # first element in the parameter; not 0 for some of its rows
    num_components: int = 1  # elements for each element of the layout (2 for `view_as_real`)
    is_split: bool = False  # the strategy shards it, even over one rank: the same ops run

    numel: int = field(init=False, compare=False, repr=False)
    owner: int | None = field(init=False, compare=False, repr=False)
    is_whole: bool = field(init=False, compare=False, repr=False)
    is_owned_by_other_rank: bool = field(init=False, compare=False, repr=False)
    local_range: tuple[int, int] = field(init=False, compare=False, repr=False)
    region: Region = field(init=False, compare=False, repr=False)
    stride: tuple[int, ...] = field(init=False, compare=False, repr=False)
    wrapper: tuple[torch.Size, tuple[int, ...] | None] = field(
        init=False, compare=False, repr=False
    )
    views: dict[Any, tuple[ShardSpec, int]] = field(init=False, compare=False, repr=False)

    def to_plain(self) -> tuple[Any, ...]:
        """Return the spec's fields as plain data, for a pickle that loads safely."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        values |= {"layout": self.layout.as_tuple(), "label": self.label.fqn}
        return tuple(values.values())

    @classmethod
    def from_plain(cls, values: tuple[Any, ...]) -> ShardSpec:
        """Return the spec that `to_plain` was called on."""
        names = (each.name for each in fields(cls) if each.init)
        given = dict(zip(names, values, strict=True))
        given["layout"] = FlatLayout.from_tuple(given["layout"])
        given["label"] = ParamLabel(given["label"])
        return cls(**given)

    @property
    def world_size(self) -> int:
        """Ranks that share the tensor."""
        return self.layout.world_size

    @property
    def numels(self) -> list[int]:
        """Elements that each rank of the shard group holds."""
        return [end - start for start, end in map(self.range_of, range(self.world_size))]

    @property
    def is_shown_as_dtensor(self) -> bool:
        """Whether modules see a DTensor, not a plain tensor."""
        return self.tensor_parallel is not None and self.plain_gradients is None

    @property
    def is_alone(self) -> bool:
        """Whether each rank holds the whole tensor, and its strategy does not shard it."""
        return self.world_size == 1 and not self.is_split

    @property
    def holds_all(self) -> bool:
        """Whether `is_alone`, and the tensor is not one of a tensor-parallel mesh either."""
        return self.is_alone and self.tensor_parallel is None

    def is_owned_as(self, other: ShardSpec) -> bool:
        """Whether one rank holds both tensors whole, laid out alike, wherever units put them."""
        return (
            self.owner is not None
            and (self.owner, self.group_name) == (other.owner, other.group_name)
            and (self.shape, self.tensor_parallel) == (other.shape, other.tensor_parallel)
            and (self.dense_shape, self.dense_stride) == (other.dense_shape, other.dense_stride)
        )

    def __deepcopy__(self, memo: object) -> ShardSpec:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardSpec.from_plain, (self.to_plain(),)

    def range_of(self, rank: int) -> tuple[int, int]:
        """Return the half-open range of the dense tensor's elements that `rank` holds."""
        if self.index is not None:
            start, end = self.layout.param_range(self.index, rank)
        else:
            start, end = self.layout.shard_range(rank)
        first, last = start * self.num_components - self.start, end * self.num_components
        low, high = intersect((0, self.numel), (first, last - self.start))
        return min(low, self.numel), min(high, self.numel)

    def check_has_region(self) -> None:
        """Raise if this rank's elements are no flat range."""

    def flatten(self, dense: Tensor) -> Tensor:
        """Return the dense tensor's elements in memory order, shape `(numel,)`; a view if it can.

        A tensor laid out differently is copied into the recorded layout first.
        """
        if dense.stride() != self.dense_stride:
            laid_out = torch.empty_strided(
                self.dense_shape, self.dense_stride, dtype=dense.dtype, device=dense.device
            )
            dense = laid_out.copy_(dense)
        return dense.as_strided((self.numel,), (1,))

    def slice(self, dense: Tensor) -> Tensor:
        """Return this rank's part of a dense tensor, shape `(end - start,)`; a view if it can."""
        start, end = self.local_range
        return self.flatten(dense)[start:end]

    def arrange(self, flat: Tensor) -> Tensor:
        """Return the dense tensor's elements, of what all ranks hold one after another."""
        return flat

    def unflatten(self, flat: Tensor) -> Tensor:
        """View the elements of the dense tensor, shape `(numel,)`, in its shape and stride.

        For a parameter of a tensor-parallel mesh the result is a DTensor.
        """
        return self.distribute(flat.as_strided(self.dense_shape, self.dense_stride))

    def show(self, flat: Tensor) -> Tensor:
        """View the elements of the dense tensor as modules see it: a DTensor, or a plain part."""
        dense = flat.as_strided(self.dense_shape, self.dense_stride)
        return self.distribute(dense) if self.is_shown_as_dtensor else dense

    def distribute(self, dense: Tensor) -> Tensor:
        """Return the dense tensor as the logical one: as a DTensor, if that is one."""
        if self.tensor_parallel is None:
            return dense
        mesh, placements = self.tensor_parallel
        return from_local(dense, mesh, placements, shape=self.shape, stride=self.stride)


def _region(spec: ShardSpec) -> Region:
    """Return this rank's elements in the logical tensor, [Note: Regions]."""
    spec.check_has_region()
    box = whole_box(spec.shape)
    if spec.tensor_parallel is not None:
        mesh, placements = spec.tensor_parallel
        if not are_shards_or_replicas(placements):
            raise NotImplementedError(
                f"parameter '{spec.label.fqn}' has placements {placements} on its "
                "tensor-parallel mesh, and only Shard and Replicate can be saved or loaded in "
                "parts. Save p.full_tensor() instead."
            )
        box = local_box(spec.shape, mesh, placements)
    return Region(box, memory_order(spec.dense_shape, spec.dense_stride), *spec.local_range)


def _row_major(spec: ShardSpec) -> tuple[int, ...]:
    return torch.empty(spec.shape, device="meta").stride()


def _owner(spec: ShardSpec) -> int | None:
    owners = spec.layout.owners
    return owners[spec.index] if owners and spec.index is not None else None


_COMPUTED: dict[str, Callable[[ShardSpec], Any]] = {
    "numel": lambda spec: spec.dense_shape.numel(),
    "owner": _owner,
    "is_whole": lambda spec: spec.is_alone or spec.owner == spec.rank,
    "is_owned_by_other_rank": lambda spec: spec.owner not in (None, spec.rank),
    "local_range": lambda spec: spec.range_of(spec.rank),
    "region": _region,
    "stride": lambda s: s.dense_stride if s.tensor_parallel is None else _row_major(s),
    "wrapper": lambda s: (s.shape, None if s.stride == _row_major(s) else s.stride),
    "views": lambda _: {},
}


def _compute(spec: ShardSpec, name: str) -> Any:
    """Compute an attribute at its first access."""
    if name not in _COMPUTED:
        raise AttributeError(f"'ShardSpec' object has no attribute '{name}'")
    value = _COMPUTED[name](spec)
    object.__setattr__(spec, name, value)  # from now on read without a call
    return value


# Slots take a fifth of a dict that `cached_property` fills. Not in the class, where mypy would take
# it to mean that a spec has any attribute.
ShardSpec.__getattr__ = _compute  # type: ignore[attr-defined]


def local_box(shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]) -> Bounds:
    """Return this rank's box of a tensor that lies on a mesh as shards and replicas."""
    sizes, offsets = local_shape_and_offset(shape, mesh, placements)
    return tuple((offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def flat_spec(specs: Sequence[ShardSpec], name: str) -> ShardSpec:
    """Return the spec of the flat parameter that holds parameters of these specs, of one layout."""
    first, layout = specs[0], specs[0].layout
    refuse_flat_dtensors([spec.label.fqn for spec in specs if spec.tensor_parallel])
    return ShardSpec(
        shape=torch.Size([layout.end]),
        dense_shape=torch.Size([layout.end]),
        dense_stride=(1,),
        layout=layout,
        index=None,
        rank=first.rank,
        group_name=first.group_name,
        label=ParamLabel(name, first.label.is_among_owned),
        is_split=first.is_split,
    )


def refuse_flat_dtensors(fqns: Sequence[str]) -> None:
    """Raise if any parameters are those of a tensor-parallel mesh."""
    if fqns:
        raise RuntimeError(
            f"the parameters {list(fqns)} are DTensors of a tensor-parallel mesh, so they can't be "
            "part of one flat parameter. Pass use_orig_params=True."
        )
