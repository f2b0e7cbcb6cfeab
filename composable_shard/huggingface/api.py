"""Load and save sharded models as Hugging Face `safetensors` directories.

[Note: Own ranges]
A rank reads only the elements of its own shards. A shard is a range of the dense tensor's elements
in memory order, and the dense tensor is a box of the whole one. The rows that the range touches are
one slice of the file's tensor, which is mapped and not copied. The range is copied out of the slice
and cast at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable_shard.comm import HOST, Ranks
from composable_shard.flat_param import FlatParamHandle
from composable_shard.huggingface.files import (
    TensorFiles,
    TensorWriter,
    parse_nbytes,
    require_safetensors,
)
from composable_shard.runtime import check_whole
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
from composable_shard.torch_private import IncompatibleKeys


def load_safetensors(
    model: nn.Module, directory: str | os.PathLike[str], *, strict: bool = True
) -> IncompatibleKeys:
    """Load parameters and buffers from a Hugging Face `safetensors` directory.

    Each rank reads only its own shards from the files, which every rank must be able to open, and
    casts them to the model's dtypes. No device ever holds a full parameter. Parameters and buffers
    on the meta device get memory on the mesh's device, so that a model built on meta and sharded
    loads with a peak of its shards and one unit. One name of a tied parameter is enough.

    One all-gather of 31 bytes for each process group; call it on all ranks of the units' meshes.
    Needs the extra `safetensors`.

    Args:
        model: A model with sharded units, outside of forward, backward and `unshard_params`.
        directory: Holds `model.safetensors`, or an index and its files, or a single file or index
            of another name; or the path of such a file.
        strict: Raise if the model has a tensor that the checkpoint lacks, or the reverse.

    Returns:
        The names that don't match, where `strict` is False.

    Raises:
        ImportError: Without the package `safetensors`.
        ValueError: If the model has no unit. On all ranks, with the model unchanged: if a file is
            missing, damaged or of another kind, naming it; if tensors are missing, unexpected or
            wrongly shaped, naming them; if the checkpoint lacks tensors on the meta device.
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


def _compare(tensors: ModelTensors, files: TensorFiles) -> IncompatibleKeys:
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
    return IncompatibleKeys(missing, [name for name in files.tensors if name not in wanted])


def _check_complete(
    tensors: ModelTensors, files: TensorFiles, keys: IncompatibleKeys, strict: bool
) -> None:
    """Check that all tensors on the meta device will be loaded, or all tensors if strict.

    Raises:
        ValueError: Naming the tensors that will not.
        NotImplementedError: For a DTensor with placements other than Shard and Replicate.
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
    tensors of one file; the other ranks hold nothing beyond their shards. The files are complete
    when the call returns on any rank, and have temporary names until then; `TensorWriter.publish`
    says what a killed process leaves. Where a unit computes in another dtype, the main values are
    saved.

    One gather for each handle, and two all-gathers of 31 bytes for each process group, three if
    units have different groups; for DTensors one all-gather over their mesh on the first
    data-parallel ranks. Call it on all ranks of the units' meshes. Needs the extra `safetensors`.

    Args:
        model: A model with sharded units, outside of forward, backward and `unshard_params`.
        directory: Made if it does not exist; files of an earlier save in it are replaced.
        max_shard_size: Limit of a file in bytes, or a text such as "5GB" (10**9) or "500MiB".
        dtype: Cast floating-point tensors to it. Default: keep their dtypes.
        metadata: Text for the header of each file, beside `{"format": "pt"}`.

    Raises:
        ImportError: Without the package `safetensors`.
        ValueError: For an invalid size, or a model without units. Nothing has been written then.
        NotImplementedError: If the meshes of the units begin with different ranks, so that no rank
            is the first of all. Nothing has been written then.
        RuntimeError: Inside a forward, a backward or `unshard_params`, after `unshard`, if
            parameters are on the meta device, or if no unit manages a trainable parameter that is
            not in any unit's `ignored_params`. On all ranks, if writing fails on the first; files
            of an earlier save are still there.
    """
    require_safetensors()
    max_nbytes = parse_nbytes(max_shard_size)
    tensors = ModelTensors(model, "save_safetensors can't run")
    check_whole(model)
    for handle in tensors.handles:
        handle.check_materialized()
    ranks = ModelRanks(model)
    ranks.check_one_is_first()
    writer: TensorWriter | None = None
    with ranks.agreed():
        if ranks.is_first:
            writer = TensorWriter(Path(directory), max_nbytes, dtype=dtype, metadata=metadata)
    problem: Exception | None = None
    try:
        with torch.inference_mode(False), torch.no_grad():
            problem = _write_all(tensors, writer)
        ranks.agree(problem)
    finally:
        problem = None  # its traceback has this frame
        if writer is not None:
            writer.discard()


def _write_all(tensors: ModelTensors, writer: TensorWriter | None) -> Exception | None:
    """Gather everything, and write it on the rank with a writer.

    Returns:
        An error in writing. The gathers continue after it, because the other ranks wait in them.
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
    if writer is not None and problem is None:
        try:
            writer.publish()
        except Exception as error:
            problem = error
    return problem


def _full_tensors(tensors: ModelTensors) -> Iterator[tuple[str, Tensor]]:
    """Gather unit by unit; yield every tensor of the state dict once, in host memory.

    Ranks other than the first yield only tensors that no unit manages.
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
