"""Load and save sharded models as Hugging Face `safetensors` directories.

[Note: Own ranges]
A rank reads what its own shards hold, and no more. A shard of a parameter is a range of its dense
tensor's elements in memory order; the rows that the range touches are one slice of the file's
tensor, mapped and not copied, and the range is copied out of it, cast on the way. A DTensor's dense
tensor is a box of the whole, so its rows are too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from composable_shard.comm import HOST, Ranks
from composable_shard.flat_param import FlatParamHandle
from composable_shard.huggingface.files import (
    TensorFiles,
    TensorWriter,
    parse_nbytes,
    require_safetensors,
)
from composable_shard.state_dict import (
    ManagedParam,
    ModelRanks,
    ModelTensors,
    OtherTensor,
    Shares,
    gather_full,
    materialize,
    mesh_groups,
)
from composable_shard.tensor import region_of

__all__ = ["load_safetensors", "save_safetensors"]


def load_safetensors(
    model: nn.Module, directory: str | os.PathLike[str], *, strict: bool = True
) -> _IncompatibleKeys:
    """Load parameters and buffers from a Hugging Face `safetensors` directory.

    Each rank reads its own shards straight from the files, which every rank must be able to open,
    cast to the model's dtypes. No parameter is ever there in full, on any device. Parameters and
    buffers on the meta device get memory on the mesh's device and are loaded, so a model can be
    built on meta, sharded, and loaded with a peak of its shards and one unit. Of tied parameters
    any one name is enough.

    One all-gather of 31 bytes for each process group; call it on all ranks of the units' meshes.
    Needs the extra `safetensors`.

    Args:
        model: A model with sharded units, outside of forward, backward and `unshard_params`.
        directory: Holds `model.safetensors`, or an index and the files it names, or the only file
            or index of another name; or a path of such a file.
        strict: Raise if the model has a tensor that the checkpoint has not, or the reverse.

    Returns:
        The names that don't match, where `strict` is False.

    Raises:
        ImportError: Without the package `safetensors`.
        ValueError: On all ranks alike: if a file is missing, damaged or of another kind, naming it;
            for missing, unexpected and wrongly shaped tensors, naming them; if the model has
            parameters or buffers on the meta device that the checkpoint has not. Nothing has been
            changed then. If the model has no unit.
        RuntimeError: Inside a forward, a backward or `unshard_params`, or after `unshard`.
    """
    require_safetensors()
    tensors = ModelTensors(model, "load_safetensors can't run")
    ranks = Ranks(mesh_groups(tensors.handles), tensors.handles[0].shard_group.device)
    with ExitStack() as stack:
        with ranks.agreed():
            files = stack.enter_context(TensorFiles(Path(directory)))
            keys = _compare(tensors, files)
            _check_complete(tensors, files, keys, strict)
        with torch.inference_mode(False), torch.no_grad():
            _read_all(tensors, files)
    return keys


def _name_in(files: TensorFiles, tensor: ManagedParam | OtherTensor) -> str | None:
    """Return the first of a tensor's names that the checkpoint has."""
    return next((name for name in tensor.names if name in files.tensors), None)


def _compare(tensors: ModelTensors, files: TensorFiles) -> _IncompatibleKeys:
    """Return the names that don't match.

    Raises:
        ValueError: For shapes that differ.
    """
    wanted = tensors.by_name()
    wrong = [
        f"'{name}' {info.shape} (the model's is {tuple(wanted[name].shape)})"
        for name, info in files.tensors.items()
        if name in wanted and info.shape != tuple(wanted[name].shape)
    ]
    if wrong:
        raise ValueError(f"expected tensors of the model's shapes, found {', '.join(wrong)}")
    missing = [name for name, each in wanted.items() if _name_in(files, each) is None]
    return _IncompatibleKeys(missing, [name for name in files.tensors if name not in wanted])


def _check_complete(
    tensors: ModelTensors, files: TensorFiles, keys: _IncompatibleKeys, strict: bool
) -> None:
    """Check that everything on the meta device will be loaded, and if strict everything at all.

    Raises:
        ValueError: Naming what is wrong.
        NotImplementedError: For placements of a DTensor that are neither shards nor copies.
    """
    if strict and (keys.missing_keys or keys.unexpected_keys):
        lists = {"missing": keys.missing_keys, "unexpected": keys.unexpected_keys}
        text = "; ".join(f"{kind}: {names}" for kind, names in lists.items() if names)
        raise ValueError(
            f"the checkpoint does not have the model's tensors; {text}. Pass strict=False to load "
            "those that both have."
        )
    tensors.check_none_stays_meta(files.tensors)
    for each in tensors.sharded:
        assert len(each.entry.spec.region.box) == len(each.shape)


def _read_all(tensors: ModelTensors, files: TensorFiles) -> None:
    written: set[FlatParamHandle] = set()
    for each in tensors.sharded:
        name = _name_in(files, each)
        if name is None:
            continue
        if each.handle not in written:
            written.add(each.handle)
            if each.is_meta:
                materialize(each.handle)
            each.handle.guard.note_write(each.names[0])
        _read_shard(files, name, each)
    for other in tensors.others:
        if other.is_persistent and (name := _name_in(files, other)) is not None:
            _read_other(files, name, other, tensors.handles[0].shard_group.device)


def _read_shard(files: TensorFiles, name: str, tensor: ManagedParam) -> None:
    """Copy this rank's range of a parameter into its shard; see [Note: Own ranges]."""
    spec, target = tensor.entry.spec, tensor.entry.shard_view
    assert target is not None
    start, end = spec.local_range
    if start == end:
        return
    index, skipped = spec.region.covering_rows()
    elements = files.read(name, index).permute(spec.region.order).flatten()
    target.copy_(elements[start - skipped : end - skipped])


def _read_other(files: TensorFiles, name: str, other: OtherTensor, device: torch.device) -> None:
    values, tensor = files.read(name, ()), other.tensor
    if tensor.is_meta:
        tensor = other.materialize(device)
    if isinstance(tensor, DTensor):
        values = values[tuple(slice(*bounds) for bounds in region_of(tensor).box)]
        tensor = tensor.to_local()
    tensor.detach().copy_(values)


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
