"""Save sharded models as Hugging Face `safetensors` directories."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable_shard.comm import HOST
from composable_shard.huggingface.files import TensorWriter, parse_nbytes, require_safetensors
from composable_shard.state_dict import ModelRanks, ModelTensors, Shares, gather_full

__all__ = ["save_safetensors"]


def save_safetensors(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Save parameters and buffers as a Hugging Face `safetensors` directory.

    The first rank writes `model.safetensors`, or `model-00001-of-0000N.safetensors` and so on with
    `model.safetensors.index.json`, as `transformers` does: full tensors under the original names,
    tied ones once. It holds one full unit on its device, and in host memory two units and the
    tensors of one file; the other ranks hold nothing beyond their shards. When the call returns,
    on any rank, the files are complete. They are written under temporary names; see
    `TensorWriter.publish` for what a reader finds if the process is killed. Values are the main
    ones where a unit computes in another dtype.

    One gather for each handle, and twice an all-gather of 31 bytes for each process group, three
    times where units have different ones; for DTensors an all-gather over their mesh among the
    first data-parallel ranks. Call it on all ranks of the units' meshes. Needs the extra
    `safetensors`.

    Args:
        model: A model with sharded units, outside of forward, backward and `unshard_params`.
        directory: Where to; made if need be. What an earlier save wrote there is replaced.
        max_shard_size: The most bytes in a file, or a text such as "5GB" (10**9) or "500MiB".
        dtype: What floating-point tensors are cast to. Default: as they are.
        metadata: Text for the header of each file, beside `{"format": "pt"}`.

    Raises:
        ImportError: Without the package `safetensors`.
        ValueError: For a size or a model that can't be. Nothing has been written then.
        NotImplementedError: If units' meshes begin with different ranks, of which none has all
            values. Nothing has been written then.
        RuntimeError: Inside a forward, a backward or `unshard_params`, after `unshard`, or if
            parameters are on the meta device. On all ranks, if writing fails on the first; what was
            there before is still there.
    """
    require_safetensors()
    max_nbytes = parse_nbytes(max_shard_size)
    tensors = ModelTensors(model, "save_safetensors can't run")
    for handle in tensors.handles:
        handle.check_materialized()
    ranks = ModelRanks(model)
    ranks.check_one_is_first()
    writer: TensorWriter | None = None
    with ranks.agreed():
        if ranks.is_first:
            writer = TensorWriter(Path(directory), max_nbytes, dtype=dtype, metadata=metadata)
    try:
        with torch.inference_mode(False), torch.no_grad(), ranks.agreed():
            _write_all(tensors, writer)
    finally:
        if writer is not None:
            writer.discard()


def _write_all(tensors: ModelTensors, writer: TensorWriter | None) -> None:
    """Gather everything, and write it where this rank is the writer.

    What fails in writing is raised at the end: the other ranks wait in the gathers.
    """
    problem: Exception | None = None
    for name, tensor in _full_tensors(tensors):
        if writer is not None and problem is None:
            try:
                writer.add(name, tensor)
            except Exception as error:
                problem = error
                writer.discard()
        del tensor  # before the next unit is gathered
    try:
        if problem is not None:
            raise problem
        if writer is not None:
            writer.publish()
    finally:
        problem = None  # its traceback has this frame


def _full_tensors(tensors: ModelTensors) -> Iterator[tuple[str, Tensor]]:
    """Gather unit by unit and yield every tensor of the state dict once, in host memory.

    On ranks other than the first only what every rank has is yielded.
    """
    names = {(each.handle, each.index): each.names[0] for each in tensors.sharded}
    for shares, values in gather_full(map(Shares, tensors.handles), to_first=True, device=HOST):
        for index, value in values.items():
            if (shares.handle, index) in names:
                yield names[shares.handle, index], value
        del values  # before the next unit is gathered
    for other in tensors.others:
        if other.is_persistent:
            value = other.tensor.detach()
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            yield other.names[0], whole.to(HOST, copy=True)
