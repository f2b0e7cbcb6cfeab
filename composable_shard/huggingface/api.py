"""Load and save `safetensors` directories; what lets `transformers.Trainer` and `accelerate` train.

[Note: Own ranges]
A rank reads only the elements of its own shards. A shard is a range of the dense tensor's elements
in memory order, and the dense tensor is a box of the whole one. The rows that the range touches are
one slice of the file's tensor, which is mapped and not copied. The range is copied out of the slice
and cast at the same time.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from composable_shard.checkpoint import byte_view
from composable_shard.comm import HOST, Ranks
from composable_shard.flat_param import FlatParamHandle
from composable_shard.huggingface.files import (
    Source,
    TensorFiles,
    TensorWriter,
    find_sources,
    parse_nbytes,
    require_safetensors,
)
from composable_shard.module_api import register_forward_method
from composable_shard.options import StateDictOptions, check_path_order
from composable_shard.runtime import check_whole, get_states
from composable_shard.state_dict import (
    ManagedParam,
    ModelRanks,
    ModelTensors,
    OtherTensor,
    Shares,
    gather_full,
    get_model_state_dict,
    get_optimizer_state_dict,
    materialize,
    mesh_groups,
    set_optimizer_state_dict,
)
from composable_shard.tensor import region_of
from composable_shard.torch_private import IncompatibleKeys, side_store


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
        names: Where tensors of the model are in the directory, by their names in the model: a name
            there, or a `Joined` of several. Default: for a model of `transformers` what that
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
    ranks = _ranks_of(tensors, group)
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


def _ranks_of(tensors: ModelTensors, group: dist.ProcessGroup | None) -> Ranks:
    groups = mesh_groups(tensors.handles) if group is None else [group]
    return Ranks(groups, tensors.handles[0].shard_group.device)


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
    group: dist.ProcessGroup | None = None,
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
        handle.check_materialized()
    model_ranks = ModelRanks(model)
    model_ranks.check_one_is_first()
    ranks = _ranks_of(tensors, group)
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

    Writes what that method writes: its names of tensors, the configuration, and so on. The first
    rank holds the whole model in host memory; `save_safetensors` does not. One gather for each
    handle.

    Args:
        model: A sharded model with a method `save_pretrained`.
        directory: For the files.
        options: Of the method, without `state_dict`.

    Raises:
        RuntimeError: On all ranks, if the method fails on the first.
    """
    check_path_order(model, directory, "save_pretrained(model, directory)")
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=whole)
    ranks = ModelRanks(model)
    with ranks.agreed():
        if ranks.is_first:
            # Any: the method is transformers', whose types are not known here.
            cast(Any, model).save_pretrained(directory, state_dict=state, **options)


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
    """What one writer adds to a directory, alone or with those of other ranks.

    A tensor that several have must be equal, as in [Note: Owners]; the lowest rank writes it.
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
        """Compare what several parts have, and give the files of all parts their names.

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
    """Gather everything, and write it on the rank with a writer; return an error in writing.

    The gathers continue after it, because the other ranks wait in them.
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
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            yield other.names[0], whole.to(HOST, copy=True)


_M = TypeVar("_M", bound=nn.Module)
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def keep_unwrapped(model: _M, accelerator: Any) -> _M:
    """Prepare a sharded model for `accelerator.prepare`, which then puts no DDP around it.

        model, optimizer = accelerator.prepare(keep_unwrapped(model, accelerator), optimizer)

    The forward runs under the accelerator's autocast and compiler, as in DDP. `mp_policy` of
    `fully_shard` is another matter: with it the gathers and reductions are in 16 bits too.
    `accelerator.get_state_dict` and `save_model` make the model whole on the first rank; call them
    on all ranks. `save_state` and `load_state` raise.

    Args:
        model: The model, which is returned, compiled if the accelerator compiles.
        accelerator: The `accelerate.Accelerator` that will train it.

    Raises:
        ValueError: If the model has no unit: its gradients would not be reduced.
    """
    if not get_states(model):
        raise ValueError(
            "expected a model with sharded units. Call fully_shard or shard_model on it before."
        )
    if getattr(model, "_is_accelerate_prepared", False):
        return model
    # Autocast and the compiler, without a wrapper.
    kept: _M = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    kept._is_accelerate_prepared = True  # type: ignore[assignment] # nn.Module: tensors and modules
    get_state_dict = accelerator.get_state_dict

    def get_whole(model: nn.Module, unwrap: bool = True) -> Any:
        is_ours = bool(get_states(model))
        return _get_whole(model) if is_ours else get_state_dict(model, unwrap=unwrap)

    accelerator.get_state_dict = get_whole
    accelerator.register_save_state_pre_hook(_refuse_state)
    accelerator.register_load_state_pre_hook(_refuse_state)
    return kept


def _get_whole(model: nn.Module) -> dict[str, Any]:
    """Return the whole state dict in host memory of the first rank."""
    return get_model_state_dict(model, options=_WHOLE)


def _refuse_state(*_: Any) -> None:
    """Raise in `accelerator.save_state` and `load_state`, which know no sharded optimizer state."""
    raise NotImplementedError(
        "accelerate would save and load the optimizer state of one rank. Call "
        "save_checkpoint(path, model, optimizer, step=step) and load_checkpoint(path, model, "
        "optimizer), with accelerator.scaler as scaler= in fp16; or let accelerate shard the model "
        "itself: composable_shard.fsdp2.install() before FullyShardedDataParallelPlugin("
        "fsdp_version=2)."
    )


class TrainerMixin:
    """Lets a `Trainer` of transformers train, save and resume a sharded model.

        class ShardedTrainer(TrainerMixin, Trainer): ...

        fully_shard(model)
        ShardedTrainer(model, args, train_dataset=...).train()

    Put it first. The model is not wrapped; with `bf16=True` and `fp16=True` it computes under
    autocast, as in DDP. Checkpoints hold whole models and whole optimizer states, which the first
    rank writes, and load at any world size. Gradients of each microbatch are reduced.
    """

    model: nn.Module
    args: Any
    accelerator: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any
    _save: Callable[..., None]

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if hasattr(model, "generate"):  # as Trainer does with FSDP
            register_forward_method(model, "generate")
        kept = keep_unwrapped(model, self.accelerator)
        return super()._wrap_model(kept, *args, **kwargs)  # type: ignore[misc] # Trainer's

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model as Trainer does; called on all ranks."""
        state = _get_whole(self.model)
        if not self.args.should_save:
            return
        self._save(output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            trainer: Any = self
            trainer.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _load_from_checkpoint(self, checkpoint: str, model: nn.Module | None = None) -> None:
        if Path(checkpoint, "adapter_model.safetensors").is_file():  # peft's, which takes it
            super()._load_from_checkpoint(checkpoint, model)  # type: ignore[misc] # Trainer's
            return
        load_safetensors(self.model if model is None else model, checkpoint)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = get_optimizer_state_dict(self.model, self._unwrapped_optimizer(), options=_WHOLE)
        if self.args.should_save:
            torch.save(state, Path(output_dir, "optimizer.pt"))
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, "scheduler.pt"))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not Path(checkpoint, "optimizer.pt").is_file():
            return
        state = {}
        if self.args.should_save:
            state = torch.load(Path(checkpoint, "optimizer.pt"), weights_only=True)
        optimizer = self._unwrapped_optimizer()
        set_optimizer_state_dict(self.model, optimizer, state, options=_FROM_FIRST)
        schedule = torch.load(Path(checkpoint, "scheduler.pt"), weights_only=True)
        self.lr_scheduler.load_state_dict(schedule)

    def _unwrapped_optimizer(self) -> Optimizer:
        """Return torch's optimizer, which accelerate may have wrapped."""
        optimizer: Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return optimizer
