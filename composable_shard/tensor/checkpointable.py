"""`Checkpointable`: the protocols by which others read FlatShards.

[Note: Checkpoint boxes]
A flat range of a tensor is a few axis-aligned boxes, and boxes are what torch's distributed
checkpoints (DCP) write and read. So they hold every tensor in its full shape under its own name,
and any layout can read them. Ranks that hold copies offer the same boxes; DCP writes each once. The
boxes of a parameter of a tensor-parallel mesh are in the coordinates of the logical tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from composable_shard.layout import (
    Box,
)
from composable_shard.options import LOAD_FILE, PLACEMENTS, VALUES
from composable_shard.tensor.late_reads import LATE_READS, hand_out
from composable_shard.tensor.shard_spec import ShardSpec
from composable_shard.torch_private import (
    is_traceable_wrapper_subclass,
    running,
)

if TYPE_CHECKING:  # a program that saves imports DCP, and one that does not need not wait for it
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

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
        if LATE_READS.are_there:
            LATE_READS.make(local)  # a load writes to it
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
        hand_out(self._local, self._guard)
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
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # noqa: PLC0415 -- see above

    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def write_items(
    fqn: str, dtype: torch.dtype, shape: torch.Size, chunks: Sequence[ChunkStorageMetadata]
) -> list[WriteItem]:
    """Return write items for parts of a tensor, for DCP."""
    from torch.distributed.checkpoint import metadata, planner  # noqa: PLC0415 -- see above

    properties = metadata.TensorProperties(dtype=dtype)
    return [
        planner.WriteItem(
            index=metadata.MetadataIndex(fqn, chunk.offsets),
            type=planner.WriteItemType.SHARD,
            tensor_data=planner.TensorWriteData(chunk, properties, shape),
        )
        for chunk in chunks
    ]
