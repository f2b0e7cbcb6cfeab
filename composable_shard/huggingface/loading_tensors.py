"""Load directories of safetensors files.

[Note: Own ranges]
A rank reads only the elements of its own shards. A shard is a range of the dense tensor's elements
in memory order, and the dense tensor is a box of the whole one. The rows that the range touches are
one slice of the file's tensor, which is mapped and not copied. The range is copied out of the slice
and cast at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from composable_shard.comm import Ranks
from composable_shard.dtensors import is_dtensor
from composable_shard.flat_param import FlatParamHandle
from composable_shard.huggingface.files import (
    Source,
    TensorFiles,
    find_sources,
    require_safetensors,
)
from composable_shard.options import check_path_order
from composable_shard.state_dict import (
    ManagedParam,
    ModelTensors,
    OtherTensor,
    materialize,
)
from composable_shard.tensor import region_of
from composable_shard.torch_private import IncompatibleKeys


def load_safetensors(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    strict: bool = True,
    names: Mapping[str, Source] | None = None,
    group: dist.ProcessGroup | None = None,
) -> IncompatibleKeys:
    """Load parameters and buffers from a Hugging Face `safetensors` directory.

    Each rank reads only its own shards from the files, which every rank must be able to open, and
    casts them to the model's dtypes. No device ever holds a full parameter. Parameters and buffers
    on the meta device get memory on the mesh's device, so that a model built on meta and sharded
    loads with a peak of its shards and one unit. One name of a tied parameter is enough.

    Buffers that are in no checkpoint are computed by their module's own initialisation.

    Three all-gathers of 31 bytes for each process group; call it on all ranks of the units' meshes,
    or of `group`. Needs the package `safetensors`.

    Args:
        model: A model with sharded units, outside of forward, backward and `unshard_params`.
        directory: Holds `model.safetensors`, or an index and its files, or a single file or index
            of another name; or the path of such a file.
        strict: Raise if the model has a tensor that the checkpoint lacks, or the reverse.
        names: Places of the model's tensors in the directory, by their names in the model: a name
            there, or a `Joined` of several. Default: for a model of `transformers` as that
            library's own loader does, for any other the model's names.
        group: All ranks that load parts of one model, as pipeline stages do. Default: each stage
            alone, for which the others' tensors are unexpected.

    Returns:
        The names that don't match, where `strict` is False.

    Raises:
        ImportError: Without the package `safetensors`.
        ValueError: If the model has no unit. On all ranks, with the model unchanged: if a file is
            missing, damaged, of another kind or not the same on all ranks, naming it; if tensors
            are missing, unexpected or wrongly shaped, naming them; if the checkpoint lacks tensors
            on the meta device.
        NotImplementedError: If `transformers` computes a tensor in a way other than joining parts.
        RuntimeError: Inside a forward, a backward or `unshard_params`, or after `unshard`.
    """
    check_path_order(model, directory, "load_safetensors(model, directory)")
    require_safetensors()
    tensors = ModelTensors(model, "load_safetensors can't run")
    ranks = tensors.ranks(group)
    with ExitStack() as stack:
        with ranks.agreed():
            files = stack.enter_context(TensorFiles(Path(directory)))
            stored = list(files.tensors)
            files.rename(find_sources(model, tensors.by_name(), stored) if names is None else names)
        _check_same_files(ranks, files, Path(directory))
        with ranks.agreed():
            keys = _compare(tensors, files)
        told: list[list[str]] = ranks.all_messages(keys.unexpected_keys)
        nobodys = set.intersection(*map(set, told))
        unexpected = [name for name in keys.unexpected_keys if name in nobodys]
        keys = IncompatibleKeys(keys.missing_keys, unexpected)
        with ranks.agreed():
            _check_complete(tensors, files, keys, strict)
        with torch.inference_mode(False), torch.no_grad():
            _read_all(tensors, files)
    return keys


def _check_same_files(ranks: Ranks, files: TensorFiles, directory: Path) -> None:
    """Check that all ranks have opened the same files, by size, header and some of the values."""
    told: list[dict[str, str]] = ranks.all_messages(files.digests)
    names = sorted({name for digests in told for name in digests})
    odd = [name for name in names if len({digests.get(name) for digests in told}) > 1]
    if odd:
        raise ValueError(
            f"the ranks have different files in '{directory}': {odd[:8]} differ in size, header, "
            "values or index, or are not there on every rank. Give all ranks the same directory, "
            "or equal copies."
        )


def _name_in(files: TensorFiles, tensor: ManagedParam | OtherTensor) -> str | None:
    """Return the first of a tensor's names that the checkpoint has."""
    return next((name for name in tensor.names if name in files.tensors), None)


def _compare(tensors: ModelTensors, files: TensorFiles) -> IncompatibleKeys:
    """Return the names that don't match."""
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
    """Check that all tensors on the meta device will be loaded, or all tensors if strict."""
    if strict and (keys.missing_keys or keys.unexpected_keys):
        lists = {"missing": keys.missing_keys, "unexpected": keys.unexpected_keys}
        text = "; ".join(f"{kind}: {names}" for kind, names in lists.items() if names)
        raise ValueError(
            f"the checkpoint does not have the model's tensors; {text}. Pass strict=False to load "
            "those that both have, names={...} if they have other names there, and group= if other "
            "ranks load the rest."
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
        # Once, for memory that is made anew is empty. The write is noted before the first byte:
        # after an interrupt full values count as stale.
        if each.handle not in written:
            written.add(each.handle)
            if each.is_meta:
                materialize(each.handle)
            each.handle.guard.note_write(each.names[0])
        _read_shard(files, name, each)
    device = tensors.handles[0].shard_group.device
    for other in tensors.others:
        if other.is_persistent and (name := _name_in(files, other)) is not None:
            _read_other(files, name, other, device)
    tensors.fill_computed(device)


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
    if is_dtensor(tensor):
        values = values[tuple(slice(*bounds) for bounds in region_of(tensor).box)]
        tensor = tensor.to_local()
    tensor.detach().copy_(values)
