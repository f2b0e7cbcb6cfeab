"""Save directories of safetensors files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composable_shard.comm import HOST
from composable_shard.dtensors import is_dtensor
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
    get_model_state_dict,
    iter_full_params,
)
from composable_shard.torch_private import side_store


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
    tied ones once. Each rank holds one full unit on its device, and the first one in host memory
    two units and the tensors of one file. The files are complete
    when the call returns on any rank, and have temporary names until then; `TensorWriter.publish`
    describes the state after a killed process. Where a unit computes in another dtype, the main
    values are saved.

    One all-gather for each handle, and two of 31 bytes for each process group, three if
    units have different groups; for DTensors one all-gather over their mesh on the first
    data-parallel ranks. Call it on all ranks of the units' meshes. Pipeline stages need a directory
    each: `save_checkpoint` and `python -m composable_shard convert` make one of all. Needs the
    package `safetensors`.

    Args:
        model: A model with sharded units, outside of forward, backward and `unshard_params`.
        directory: Made if it does not exist; files of an earlier save in it are replaced.
        max_shard_size: Limit of a file in bytes, or a text such as "5GB" (10**9) or "500MiB".
        dtype: Cast floating-point tensors to it. Default: keep their dtypes.
        metadata: Text for the header of each file, beside `{"format": "pt"}`.

    Raises:
        ImportError: Without the package `safetensors`.
        ValueError: For an invalid size, a model without units, or a directory that another rank of
            the job has saved into. Nothing has been written then.
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
    ranks = ModelRanks(model)
    ranks.check_one_is_first()
    path = Path(directory)
    writer: TensorWriter | None = None
    with ranks.agreed():
        if ranks.is_first:
            _claim(path)
            writer = TensorWriter(path, max_nbytes, dtype=dtype, metadata=metadata)
    problem: Exception | None = None
    try:
        with torch.inference_mode(False), torch.no_grad():
            problem = _write_all(model, tensors, writer)
        ranks.agree(problem)
    finally:
        problem = None  # its traceback has this frame
        if writer is not None:
            writer.discard()


def save_pretrained(model: nn.Module, directory: str | os.PathLike[str], **options: Any) -> None:
    """Run the `save_pretrained` of a `transformers` model on whole values; call it on all ranks.

    Writes the same files as that method: tensors under its names, the configuration, and so on. The
    first rank holds the whole model in host memory; `save_safetensors` does not. One
    all-gather for each handle.

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
                "that. Give the parts that ranks own a directory each, or save the run by "
                "save_checkpoint and convert it by python -m composable_shard convert."
            )


def _write_all(
    model: nn.Module, tensors: ModelTensors, writer: TensorWriter | None
) -> Exception | None:
    """Gather all tensors, and write them on the rank with a writer; return an error in writing.

    The gathers continue after an error, because the other ranks wait in them.
    """
    problem: Exception | None = None
    for name, tensor in _full_tensors(model, tensors):
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


def _full_tensors(model: nn.Module, tensors: ModelTensors) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the state dict once, in host memory, parameters first.

    Ranks other than the first yield buffers alone.
    """
    yield from iter_full_params(model, device=HOST, rank0_only=True)
    for other in tensors.others:
        if other.is_persistent and not isinstance(other.tensor, nn.Parameter):
            value = other.tensor.detach()
            whole = value.full_tensor() if is_dtensor(value) else value
            yield other.names[0], whole.to(HOST, copy=True)
