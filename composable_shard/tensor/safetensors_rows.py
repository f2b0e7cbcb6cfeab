"""Whole rows of a sharded tensor, for DCP's writers of safetensors.

[Note: Whole rows]
`HuggingFaceStorageWriter` keeps tensors under their FQNs, so a rank's file has room for one box of
a tensor; of several boxes it would keep the last, silently. A range that begins or ends inside a
row has several. For this writer, the rank that holds the first element of a row therefore writes
the row, and gets the rest of it from the ranks that follow. DCP tells a tensor neither the writer
nor the format; the interpreter's frames name both.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from composable_shard.comm import all_gather_uneven, resolve_group
from composable_shard.tensor.checkpointable import Checkpointable, chunk_of, write_items
from composable_shard.tensor.shard_spec import ShardSpec
from composable_shard.torch_private import running

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

_REMEDY = (
    "save_safetensors(model, directory), called on all ranks, writes safetensors of any sharding."
)


class RowCheckpointable(Checkpointable):
    """Gives DCP whole rows for safetensors, and boxes for other formats. [Note: Whole rows]"""

    __slots__ = ()

    # While a save of safetensors runs: the elements that complete the last row, shape (n,).
    _row_tail: Tensor

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """Return a write item for each box of this rank's slice, or one for its whole rows.

        Boxes take no communication. For safetensors a tensor whose rows are cut takes one
        all-gather of the cut rows; a collective.
        """
        _forget_rows(self)
        spec, save = self._shard_spec, _safetensors_save()
        if save is None or not spec.shape.numel():
            return super().__create_write_items__(fqn, object)
        _check_all_is_written(save, spec)
        self.__dict__["_row_tail"] = _gather_tail(self._local, spec)
        chunks = [chunk_of(box) for box in spec.region.whole_rows().boxes()]
        return write_items(fqn, self._local.dtype, spec.shape, chunks)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes to be read into this rank's slice, which counts as a write."""
        _forget_rows(self)
        if not self._shard_spec.is_alone:
            _refuse_torch_save_reader(self._shard_spec)
        return super().__create_chunk_list__()

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the box at `index.offset`: a view of this rank's slice, or a copy of its rows."""
        tail = self.__dict__.get("_row_tail")
        if tail is None:
            return super().__get_tensor_shard__(index)
        _forget_rows(self)
        spec = self._shard_spec
        rows = spec.region.whole_rows()
        flat = torch.cat([self._local[rows.start - spec.region.start :], tail])
        # Safetensors takes row-major tensors alone.
        return flat.as_strided(rows.boxes()[0].sizes, spec.dense_stride).contiguous()


def _forget_rows(shard: Tensor) -> None:
    # A save that failed leaves them, and what is loaded later must not be written to a copy.
    shard.__dict__.pop("_row_tail", None)


def _safetensors_save() -> Mapping[str, Any] | None:
    """Return the arguments of DCP's save if one runs on this thread and writes safetensors."""
    save = next(running("torch.distributed.checkpoint.state_dict_saver", "_save_state_dict"), None)
    if save is None:
        return None
    kind = getattr(save["storage_writer"], "serialization_format", None)
    return save if getattr(kind, "value", None) == "safetensors" else None


def _check_all_is_written(save: Mapping[str, Any], spec: ShardSpec) -> None:
    """Raise where the writer would lose values without a word."""
    writer = save["storage_writer"]
    is_alone = save["no_dist"] or dist.get_world_size(save["process_group"]) == 1
    has_own_files = getattr(writer, "save_distributed", True) and save["use_collectives"]
    if not has_own_files and not (is_alone and spec.is_alone):
        raise ValueError(
            "expected HuggingFaceStorageWriter(..., save_distributed=True), and a save with "
            f"collectives, for the sharded parameter '{spec.label.fqn}': else all ranks write one "
            f"file, and what one of them writes last is left. {_REMEDY}"
        )
    if not spec.shape and getattr(writer, "enable_consolidation", False):
        raise NotImplementedError(
            "HuggingFaceStorageWriter(..., enable_consolidation=True) writes 0 for tensors without "
            f"dims, and '{spec.label.fqn}' is one. {_REMEDY}"
        )


def _refuse_torch_save_reader(spec: ShardSpec) -> None:
    """Raise in a load by `BroadcastingTorchSaveReader`, whose plans count from this rank's part."""
    if any(running("torch.distributed.checkpoint.format_utils", "set_up_planner")):
        raise NotImplementedError(
            "torch's BroadcastingTorchSaveReader and DynamicMetaLoadPlanner can't read into the "
            f"sharded parameter '{spec.label.fqn}'. Load the file with torch.load on the first "
            "rank, and call set_model_state_dict(model, values, options=StateDictOptions("
            "broadcast_from_rank0=True)) on all ranks, with {} on the others; or convert it "
            "with torch_save_to_dcp, and call dcp.load."
        )


def _gather_tail(local: Tensor, spec: ShardSpec) -> Tensor:
    """Return the elements that complete the last row that begins in this rank's range."""
    ranges = [
        spec.region._replace(start=start, end=end)
        for start, end in map(spec.range_of, range(spec.world_size))
    ]
    # What each rank holds of a row that begins on an earlier rank.
    heads = [min(each.whole_rows().start, each.end) - each.start for each in ranges]
    if not any(heads):
        return local.new_empty(0)
    group = _group_to_gather(spec)
    what = f"rows of '{spec.label.fqn}' for safetensors"
    with torch.no_grad():
        gathered = all_gather_uneven(local[: heads[spec.rank]], heads, group, what=what)
    rows = ranges[spec.rank].whole_rows()
    lacking = rows.end - ranges[spec.rank].end if rows.numel else 0
    return gathered[sum(heads[: spec.rank + 1]) :][:lacking].clone()


def _group_to_gather(spec: ShardSpec) -> dist.ProcessGroup:
    """Return the shard group; raise in a background save, where its collectives can't run."""
    # From a second thread they would mix with those of training. A second process has no groups
    # but a new one of all ranks.
    is_in_thread = threading.current_thread() is not threading.main_thread()
    try:
        group = None if is_in_thread else resolve_group(spec.group_name)
    except RuntimeError:
        group = None
    if group is None:
        raise NotImplementedError(
            f"expected a save on the main thread, got one in the background: '{spec.label.fqn}' "
            f"{tuple(spec.shape)} is cut inside a row, HuggingFaceStorageWriter takes whole rows, "
            "and the ranks can't exchange them in the background. Call dcp.save in place of "
            f'dcp.async_save, or shard with granularity="row". {_REMEDY}'
        )
    return group
