"""This rank's part of values that users give for a parameter: whole, or sharded in any way."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from composable_shard._flat_shard import FlatShard
from composable_shard._shard_spec import ShardSpec

__all__ = ["has_fitting_shape", "needs_gather", "slice_given"]


def has_fitting_shape(value: Tensor, spec: ShardSpec) -> bool:
    """Return whether a value has the parameter's shape.

    For a parameter of a tensor-parallel mesh a plain tensor may be its dense local part too; and a
    0-d parameter takes a tensor of one element, as torch's own `load_state_dict` does.
    """
    if value.shape == spec.shape or (not spec.shape and value.numel() == 1):
        return True
    is_plain = not isinstance(value, FlatShard | DTensor)
    return is_plain and spec.tensor_parallel is not None and value.shape == spec.dense_shape


def needs_gather(value: Tensor, spec: ShardSpec) -> bool:
    """Return whether `slice_given` communicates: the value lies on the ranks in another way."""
    if isinstance(value, FlatShard):
        return value._shard_spec != spec
    return isinstance(value, DTensor) and not _lies_alike(value, spec)


def _lies_alike(value: DTensor, spec: ShardSpec) -> bool:
    return spec.tensor_parallel == (value.device_mesh, tuple(value.placements))


def slice_given(value: Tensor, spec: ShardSpec) -> Tensor:
    """Return this rank's part of a value, shape `(end - start,)`; it may share memory.

    One all-gather of the value, over the ranks that it lies on, where `needs_gather`.

    Args:
        value: A plain tensor, the same on all ranks; a DTensor; or a FlatShard of any layout.
        spec: What the part is for.
    """
    if isinstance(value, FlatShard) and value._shard_spec == spec:
        return value._local
    if needs_gather(value, spec):
        value = value.full_tensor()  # type: ignore[attr-defined] # of both classes
    value = value.detach()
    if isinstance(value, DTensor):
        return spec.slice(value.to_local())
    if value.shape != spec.dense_shape or spec.shape == spec.dense_shape:
        value = value.reshape(spec.shape)
        if spec.tensor_parallel is not None:
            mesh, placements = spec.tensor_parallel
            # src_data_rank=None: cut locally, as every rank has the same values.
            whole = distribute_tensor(value, mesh, placements, src_data_rank=None)
            value = whole.to_local()
    return spec.slice(value)
