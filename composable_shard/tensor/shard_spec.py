"""`ShardSpec`: which flat range of a parameter a `FlatShard` holds, and the boxes it covers.

[Note: Checkpoint boxes]
A flat range of a tensor is a few axis-aligned boxes, and boxes are what torch's distributed
checkpoints (DCP) write and read. So they hold every tensor in its full shape under its own name,
and any layout can read them. Ranks that hold copies offer the same boxes; DCP writes each once. The
boxes of a parameter of a tensor-parallel mesh are in the coordinates of the logical tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from composable_shard.layout import (
    Bounds,
    Box,
    FlatLayout,
    Region,
    intersect,
    memory_order,
    whole_box,
)
from composable_shard.options import LOAD_FILE, PLACEMENTS, VALUES
from composable_shard.torch_private import (
    compute_local_shape_and_global_offset,
    is_traceable_wrapper_subclass,
    running,
)


class UnitLabel:
    """The name of a unit in messages, and its number.

    Attributes:
        name: Name of the unit, as seen from the outermost sharded module so far.
        number: Position among the units over the same ranks, in the order of `fully_shard` calls.
            It distinguishes units of one name; a copy of a unit has the same number.
        text: Name and number.
        first_call: Number of the collective that compared the unit, equal on all ranks; 0 if not
            known, as for a copy.
    """

    __slots__ = ("first_call", "name", "number", "text")

    def __init__(self, name: str, number: int = 0) -> None:
        self.number, self.first_call = number, 0
        self.rename(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return UnitLabel, (self.name, self.number)

    def rename(self, name: str) -> None:
        """Take another name."""
        self.name = name
        self.text = f"unit '{name}', number {self.number}"

    def take_number(self, number: int) -> None:
        """Take a number, which stays."""
        self.number = number
        self.rename(self.name)

    def note_call(self, number: int) -> None:
        """Note the number of the collective in which the ranks have compared the unit."""
        self.first_call = self.first_call or number


class ParamLabel:
    """The name of a parameter in messages.

    Mutable on purpose: an inner unit learns its full name only when an outer one is sharded. A
    parameter, its gradients and its optimizer state share one label.
    """

    __slots__ = ("fqn", "is_among_owned", "late_output", "refuses_gathers")

    def __init__(self, fqn: str, is_among_owned: bool = False) -> None:
        self.fqn = fqn
        self.is_among_owned = is_among_owned
        self.refuses_gathers = False
        self.late_output = ""  # what its unit's last forward returned that may read it later

    def rename(self, fqn: str) -> None:
        """Take another name."""
        self.fqn = fqn

    def note_owned(self, flag: bool = True) -> None:
        """Note whether one rank owns some parameters of its tree."""
        self.is_among_owned = flag

    def refuse_gathers(self, flag: bool) -> None:
        """Choose whether operations at rest that would gather raise."""
        self.refuses_gathers = flag

    def note_late_output(self, what: str) -> None:
        """Note what the last forward of its unit returned that may read it afterwards."""
        self.late_output = what

    @property
    def late_remedy(self) -> str:
        """What to do if that is what reads the parameter; empty if there is nothing."""
        what = self.late_output
        if not what:
            return ""
        return (
            f" The last forward of its unit returned {what}: if that reads the parameter, which it "
            "does after the forward, return results instead, as in list(...), or call unshard "
            "before that forward."
        )

    def refuse_gradient_node(self) -> NoReturn:
        """Raise: no graph reaches a node that accumulates the gradient."""
        raise RuntimeError(
            f"the node that accumulates the gradient of the sharded parameter '{self.fqn}' was "
            "asked for (torch.autograd.graph.get_gradient_edge, register_multi_grad_hook, or a "
            "backward that is split into inputs and weights), but forwards compute with its full "
            "values. Call unshard(module, recurse=True) before the forward, and reshard after the "
            "backward: the module's parameters are those of the graph in between."
        )

    def __repr__(self) -> str:
        return self.fqn


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
        wrapper_stride: `stride`; None if row-major, as torch then makes a wrapper faster.
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
    wrapper_stride: tuple[int, ...] | None = field(init=False, compare=False, repr=False)

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
        return DTensor.from_local(
            dense, mesh, placements, run_check=False, shape=self.shape, stride=self.stride
        )


def _region(spec: ShardSpec) -> Region:
    """Return this rank's elements in the logical tensor, [Note: Regions]."""
    spec.check_has_region()
    box = whole_box(spec.shape)
    if spec.tensor_parallel is not None:
        mesh, placements = spec.tensor_parallel
        if not all(isinstance(placement, Shard | Replicate) for placement in placements):
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
    "wrapper_stride": lambda s: None if s.stride == _row_major(s) else s.stride,
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
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple((offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


_OWN_FIELDS = frozenset({"_local", "_shard_spec", "_guard", "_row_tail"})
_NOTES = frozenset({"shard_label", "shard_aliases", "shard_position"})  # of full DTensors


def cloned(tensor: Tensor) -> Tensor:
    """Return a copy; for a wrapper subclass, which may lack `clone`, from copies of its tensors."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.clone()
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name).clone() for name in names}
    kind: Any = type(tensor)
    copy: Tensor = kind.__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
    return copy


def user_attributes(shard: Tensor) -> dict[str, Any]:
    """Return the attributes that are not ours, `_is_param` of nn.Parameter among them."""
    ours = _OWN_FIELDS | _NOTES
    return {name: value for name, value in shard.__dict__.items() if name not in ours}


def copy_attributes(full: Tensor, shard: Tensor) -> None:
    """Give a full parameter the attributes that users have set on the sharded one."""
    for name, value in user_attributes(shard).items():
        full.__dict__.setdefault(name, value)


def share_attributes(full: Tensor, shard: Tensor) -> None:
    """Let a full parameter and the sharded one have one dict of attributes, the latter's.

    A forward, a hook or a schedule that sets one sets that of the parameter, whichever of the two
    objects it holds.
    """
    notes = {name: value for name, value in full.__dict__.items() if name in _NOTES}
    shard.__dict__.update(notes)
    full.__dict__ = shard.__dict__


def _of_whole(name: str) -> Callable[..., Any]:
    """Return `torch.Tensor.<name>`, which reads memory without an op, for shards that are whole."""

    def run(self: Checkpointable, *args: Any, **kwargs: Any) -> Any:
        spec = self._shard_spec
        if not spec.is_whole or spec.tensor_parallel is not None:
            is_load = any(running("safetensors.torch", "load_model"))
            raise RuntimeError(
                f"{name}() can't read the sharded parameter '{spec.label.fqn}' "
                f"{tuple(spec.shape)}. {LOAD_FILE if is_load else VALUES}"
            )
        return getattr(spec.unflatten(self._local), name)(*args, **kwargs)

    run.__name__ = name
    run.__doc__ = f"Run `torch.Tensor.{name}` where this rank holds the whole tensor."
    return run


def _refuse_placements(shard: Checkpointable) -> NoReturn:
    """Raise, with the way to load values: no placement describes a flat range."""
    raise AttributeError(f"'{shard._shard_spec.label.fqn}': {PLACEMENTS}")


class Checkpointable(Tensor):
    """The protocols by which others read FlatShards: checkpoints, `torch.compile`, numpy."""

    __slots__ = ()

    _local: Tensor
    _shard_spec: ShardSpec
    _guard: Any  # the WriteGuard, or None

    numpy = _of_whole("numpy")
    tolist = _of_whole("tolist")
    __dlpack__ = _of_whole("__dlpack__")
    storage = _of_whole("storage")

    placements = device_mesh = property(_refuse_placements)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """Return a write item for each box of this rank's slice; no communication."""
        spec = self._shard_spec
        return write_items(
            fqn, self._local.dtype, spec.shape, [chunk for chunk, _ in _chunks(spec)]
        )

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes to be read into this rank's slice, which counts as a write."""
        spec = self._shard_spec
        if self._guard is not None:
            # DCP writes into the slice without any op that we see.
            self._guard.note_write(spec.label.fqn)
        return [chunk for chunk, _ in _chunks(spec)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the box at `index.offset` as a view of this rank's slice."""
        spec, local = self._shard_spec, self._local
        for chunk, box in _chunks(spec):
            if chunk.offsets == index.offset:
                position = local.storage_offset() + box.start - spec.local_range[0]
                return local.as_strided(box.sizes, spec.dense_stride, position)
        raise ValueError(
            f"expected the offset of a box that this rank holds of '{index.fqn}', "
            f"got {index.offset}"
        )

    @property
    def _taken_apart(self) -> Tensor:
        """The slice, under the name by which `torch.compile` reads it.

        A compiled graph may write to it without any dispatch, so reading counts as a write.
        """
        if self._guard is not None:
            self._guard.note_write(self._shard_spec.label.fqn)
        return self._local

    def __tensor_flatten__(self) -> tuple[list[str], ShardSpec]:
        """Name the tensors inside; marks this as a wrapper for `torch.compile` and `Module.to`."""
        return ["_taken_apart"], self._shard_spec

    @classmethod
    def __tensor_unflatten__(
        cls,
        inner: dict[str, Tensor],
        spec: ShardSpec,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
    ) -> Any:
        """Rebuild what `__tensor_flatten__` took apart."""
        make: Callable[..., Any] = cls
        return make(inner["_taken_apart"], spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the slice and the attributes; the copy has no write guard.

        Copies `.grad` too, except a parameter's, which torch's own deepcopy also leaves out.
        """
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                f"expected a leaf tensor to deep-copy, got one computed from "
                f"'{self._shard_spec.label.fqn}': call detach() first"
            )
        local = cloned(self._local)
        make: Callable[..., Any] = type(self)
        twin = make(local, self._shard_spec, requires_grad=self.requires_grad)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(user_attributes(self), memo))
        # Of torch's own property: a hidden parameter's is another.
        grad = Tensor.grad.__get__(self)  # type: ignore[union-attr]
        if grad is not None and not isinstance(self, nn.Parameter):
            twin.grad = copy.deepcopy(grad, memo)
        return twin


def _chunks(spec: ShardSpec) -> list[tuple[ChunkStorageMetadata, Box]]:
    """Return this rank's boxes, as torch and as this library write them."""
    boxes = spec.region.boxes()
    if not spec.shape.numel():
        # Without an entry in the checkpoint a load would miss the tensor.
        boxes = [Box((0,) * len(spec.shape), tuple(spec.shape), 0)]
    return [(chunk_of(box), box) for box in boxes]


def chunk_of(box: Box) -> ChunkStorageMetadata:
    """Return a box as DCP writes it."""
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def write_items(
    fqn: str, dtype: torch.dtype, shape: torch.Size, chunks: Sequence[ChunkStorageMetadata]
) -> list[WriteItem]:
    """Return write items for parts of a tensor, for DCP."""
    properties = TensorProperties(dtype=dtype)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, shape),
        )
        for chunk in chunks
    ]


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
