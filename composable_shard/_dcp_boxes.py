"""What torch.distributed.checkpoint asks a sharded tensor: which boxes of it this rank holds.

[Note: Checkpoint boxes]
A flat range of a tensor is a few axis-aligned boxes, and boxes are what torch's distributed
checkpoints (DCP) write and read. So they hold every tensor in its full shape under its own name,
and any layout can read them. Ranks that hold copies offer the same boxes; DCP writes each once. The
boxes of a parameter of a tensor-parallel mesh are in the coordinates of the logical tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from composable_shard._boxes import Box, boxes_of_range
from composable_shard._shard_spec import ShardSpec, WriteGuard

__all__ = ["Checkpointable"]


class Checkpointable:
    """The protocol by which torch.distributed.checkpoint saves and loads FlatShards."""

    __slots__ = ()

    _local: Tensor
    _shard_spec: ShardSpec
    _guard: WriteGuard | None

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """Return a write item for each box of this rank's slice; no communication."""
        spec = self._shard_spec
        properties = TensorProperties(dtype=self._local.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, spec.shape),
            )
            for chunk, _ in _chunks(spec)
        ]

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


def _chunks(spec: ShardSpec) -> list[tuple[ChunkStorageMetadata, Box]]:
    """Return this rank's boxes, in coordinates of the logical and of the dense tensor."""
    if not spec.shape.numel():
        # Without an entry in the checkpoint a load would miss the tensor.
        nowhere = (0,) * len(spec.shape)
        boxes = [Box(nowhere, tuple(spec.shape), 0)]
        return [(ChunkStorageMetadata(torch.Size(nowhere), spec.shape), boxes[0])]
    corner = _corner(spec)
    return [
        (
            ChunkStorageMetadata(
                torch.Size([low + inner for low, inner in zip(corner, box.offsets, strict=True)]),
                torch.Size(box.sizes),
            ),
            box,
        )
        for box in boxes_of_range(spec.dense_shape, spec.dense_stride, *spec.local_range)
    ]


def _corner(spec: ShardSpec) -> tuple[int, ...]:
    """Return where the dense tensor begins in the logical one."""
    if spec.tensor_parallel is None:
        return (0,) * len(spec.shape)
    mesh, placements = spec.tensor_parallel
    if not all(isinstance(placement, Shard | Replicate) for placement in placements):
        raise NotImplementedError(
            f"parameter '{spec.label.fqn}' has placements {placements} on its tensor-parallel "
            "mesh, and only Shard and Replicate can be saved as boxes. Save "
            "p.full_tensor() instead."
        )
    _, offsets = compute_local_shape_and_global_offset(spec.shape, mesh, placements)
    return tuple(offsets)
