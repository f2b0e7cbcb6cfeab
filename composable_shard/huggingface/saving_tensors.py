"""Save directories of safetensors files."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composable_shard.checkpoint import byte_view
from composable_shard.comm import HOST, Ranks
from composable_shard.huggingface.files import (
    TensorWriter,
    parse_nbytes,
    require_safetensors,
)
from composable_shard.options import StateDictOptions, check_path_order
from composable_shard.runtime import check_whole
from composable_shard.state_dict import (
    ModelRanks,
    ModelTensors,
    Shares,
    gather_full,
    get_model_state_dict,
)
from composable_shard.tensor import FlatShard
from composable_shard.torch_private import side_store


def save_safetensors(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save parameters and buffers as a Hugging Face `safetensors` directory.

    The first rank writes `model.safetensors`, or `model-00001-of-0000N.safetensors` and so on with
    `model.safetensors.index.json`, as `transformers` does: full tensors under the original names,
    tied ones once. It holds one full unit on its device, and in host memory two units and the
    tensors of one file; the other ranks hold nothing beyond their shards. The files are complete
    when the call returns on any rank, and have temporary names until then; `TensorWriter.publish`
    describes the state after a killed process. Where a unit computes in another dtype, the main
    values are saved.

    One gather for each handle, and two all-gathers of 31 bytes for each process group, three if
    units have different groups, five in `group`; for DTensors one all-gather over their mesh on the
    first data-parallel ranks. Call it on all ranks of the units' meshes, or of `group`. Needs the
    package `safetensors`.

    Args:
        model: A model with sharded units, outside of forward, backward and `unshard_params`.
        directory: Made if it does not exist; files of an earlier save in it are replaced.
        max_shard_size: Limit of a file in bytes, or a text such as "5GB" (10**9) or "500MiB".
        dtype: Cast floating-point tensors to it. Default: keep their dtypes.
        metadata: Text for the header of each file, beside `{"format": "pt"}`.
        group: All ranks that save parts of one model, as pipeline stages do. The first rank of each
            part writes files of its own, and one index names them all. Default: one part alone.

    Raises:
        ImportError: Without the package `safetensors`.
        ValueError: For an invalid size, a model without units, or different tensors under one name
            in two parts. Nothing has been written then.
        NotImplementedError: If the meshes of the units begin with different ranks, so that no rank
            is the first of all. Nothing has been written then.
        RuntimeError: Inside a forward, a backward or `unshard_params`, after `unshard`, if
            parameters are on the meta device, or if no unit manages a trainable parameter that is
            not in any unit's `ignored_params`. On all ranks, if writing fails on the first; files
            of an earlier save are still there.
    """
    check_path_order(model, directory, "save_safetensors(model, directory)")
    require_safetensors()
    max_nbytes = parse_nbytes(max_shard_size)
    tensors = ModelTensors(model, "save_safetensors can't run")
    check_whole(model)
    for handle in tensors.handles:
        handle.check_ready()
    model_ranks = ModelRanks(model)
    model_ranks.check_one_is_first()
    ranks = tensors.ranks(group)
    path = Path(directory)
    writer: TensorWriter | None = None
    with ranks.agreed():
        if model_ranks.is_first:
            if group is None:
                _claim(path)
            writer = TensorWriter(
                path, max_nbytes, dtype=dtype, metadata=metadata, tag=dist.get_rank()
            )
    names = [each.names[0] for each in tensors.all if each.is_persistent]
    part = _Part(None if group is None else ranks, writer, names)
    problem: Exception | None = None
    try:
        with torch.inference_mode(False), torch.no_grad():
            problem = _write_all(tensors, part)
        ranks.agree(problem)
        part.join()
    finally:
        problem = None  # its traceback has this frame
        part.discard()


def save_pretrained(model: nn.Module, directory: str | os.PathLike[str], **options: Any) -> None:
    """Run the `save_pretrained` of a `transformers` model on whole values; call it on all ranks.

    Writes the same files as that method: tensors under its names, the configuration, and so on. The
    first rank holds the whole model in host memory; `save_safetensors` does not. One gather for
    each handle.

    Args:
        model: A sharded model with a method `save_pretrained`.
        directory: Directory for the files.
        options: Options of the method, except `state_dict`.

    Raises:
        ValueError: If the model has peft's adapters in its modules and the method would write them
            under names that `from_pretrained` does not read.
        RuntimeError: On all ranks, if the method fails on the first.
    """
    check_path_order(model, directory, "save_pretrained(model, directory)")
    _check_adapters(model)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=whole)
    ranks = ModelRanks(model)
    with ranks.agreed():
        if ranks.is_first:
            # Any: the method is transformers', whose types are not known here.
            cast(Any, model).save_pretrained(directory, state_dict=state, **options)


def _check_adapters(model: nn.Module) -> None:
    """Refuse a model inside peft's, of which `from_pretrained` would initialise weights anew."""
    if hasattr(model, "get_base_model") or getattr(model, "_hf_peft_config_loaded", False):
        return  # writes its adapter alone
    ends = (".base_layer", ".modules_to_save")
    adapted = [name for name, _ in model.named_modules() if name.endswith(ends)]
    if adapted:
        raise ValueError(
            f"{type(model).__name__} has peft's adapters in it. Its weights have names such as "
            f"'{adapted[0]}.weight', so from_pretrained would initialise them anew without an "
            "error. Pass the model that get_peft_model returned, which saves the adapter. "
            "PeftModel.from_pretrained(...).merge_and_unload() merges it in one process."
        )


def _claim(path: Path) -> None:
    """Note in the job's store which rank writes a directory, so that no part replaces another."""
    store = side_store()
    if store is None:
        return
    mine = str(dist.get_rank())
    with suppress(RuntimeError, NotImplementedError):  # a store that can't compare
        key = f"composable_shard/safetensors/{path.absolute()}"
        found = store.compare_set(key, "", mine).decode()
        if found != mine:
            raise ValueError(
                f"rank {found} of this job has saved into '{path}', and rank {mine} would replace "
                "that. Pass group=torch.distributed.group.WORLD on all ranks to save the parts "
                "that ranks own as one model, or give each its own directory."
            )


class _Part:
    """The tensors that one writer adds to a directory, alone or beside other ranks' writers.

    A tensor that several ranks have must be equal, as in [Note: Owners]; the lowest rank writes it.
    """

    def __init__(self, ranks: Ranks | None, writer: TensorWriter | None, names: list[str]) -> None:
        self._ranks = ranks
        self._writer = writer
        told: list[Any] = []
        if ranks is not None:
            told = ranks.all_messages([dist.get_rank(), names] if writer else None)
        self._others = {rank: set(each) for rank, each in filter(None, told)}
        own = self._others.pop(dist.get_rank(), set())
        self._copies = {n for n in own for each in self._others.values() if n in each}
        self._sums: dict[str, int] = {}
        self._is_first = writer is not None and all(dist.get_rank() < each for each in self._others)

    @property
    def has_writer(self) -> bool:
        """Whether this rank writes."""
        return self._writer is not None

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, unless a lower rank does."""
        assert self._writer is not None
        if name in self._copies:
            self._sums[name] = zlib.crc32(byte_view(tensor.contiguous()))
            if any(r < dist.get_rank() and name in each for r, each in self._others.items()):
                return
        self._writer.add(name, tensor)

    def finish(self) -> None:
        """Write the last file, and, if this is the only part, give all files their names."""
        if self._writer is not None:
            self._writer.finish()
            if self._ranks is None:
                self._writer.publish()

    def discard(self) -> None:
        """Remove files that still have temporary names."""
        if self._writer is not None:
            self._writer.discard()

    def join(self) -> None:
        """Compare the tensors of several parts, and give the files of all parts their names.

        Nothing has changed if different tensors have one name.
        """
        if self._ranks is None:
            return
        mine = [dist.get_rank(), self._sums, self._writer.finish()] if self._writer else None
        told: list[Any] = [each for each in self._ranks.all_messages(mine) if each]
        seen: dict[str, set[int]] = {}
        for _, sums, _ in told:
            for name, number in sums.items():
                seen.setdefault(name, set()).add(number)
        different = sorted(name for name, numbers in seen.items() if len(numbers) > 1)
        with self._ranks.agreed():
            if different:
                self.discard()
                raise ValueError(
                    f"different tensors have one name on ranks {[rank for rank, *_ in told]}: "
                    f"{different[:8]}. Keep the whole model's names in pipeline stages, and number "
                    "experts over all ranks."
                )
            if self._writer is not None and self._is_first:
                self._writer.publish([each for rank, _, each in told if rank != dist.get_rank()])


def _write_all(tensors: ModelTensors, part: _Part) -> Exception | None:
    """Gather all tensors, and write them on the rank with a writer; return an error in writing.

    The gathers continue after an error, because the other ranks wait in them.
    """
    problem: Exception | None = None
    for name, tensor in _full_tensors(tensors):
        if part.has_writer and problem is None:
            try:
                part.add(name, tensor)
            except Exception as error:
                problem = error
                part.discard()
        del tensor  # before the next unit is gathered
    if problem is None:
        try:
            part.finish()
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
            # FlatShards: `model` may be a part of a unit.
            whole = value.full_tensor() if isinstance(value, DTensor | FlatShard) else value
            yield other.names[0], whole.to(HOST, copy=True)
