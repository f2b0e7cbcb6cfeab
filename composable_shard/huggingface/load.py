"""Load sharded models from Hugging Face `safetensors` directories.

[Note: Own ranges]
A rank reads what its own shards hold, and no more. A shard of a parameter is a range of its dense
tensor's elements in memory order; the rows that the range touches are one slice of the file's
tensor, mapped and not copied, and the range is copied out of it, cast on the way. A DTensor's dense
tensor is a box of the whole, so its rows are too.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from composable_shard.comm import Ranks
from composable_shard.flat_param import FlatParamHandle
from composable_shard.huggingface.files import TensorFiles, require_safetensors
from composable_shard.state_dict import (
    ManagedParam,
    ModelTensors,
    OtherTensor,
    materialize,
    mesh_groups,
)
from composable_shard.tensor import region_of

__all__ = ["load_safetensors"]


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
