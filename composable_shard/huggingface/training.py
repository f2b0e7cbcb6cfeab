"""Helpers that let `transformers.Trainer` and `accelerate` train a sharded model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from composable_shard.huggingface.loading_tensors import load_safetensors
from composable_shard.module_api import register_forward_method
from composable_shard.options import StateDictOptions
from composable_shard.runtime import get_states
from composable_shard.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

_M = TypeVar("_M", bound=nn.Module)

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)

_FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def keep_unwrapped(model: _M, accelerator: Any) -> _M:
    """Prepare a sharded model for `accelerator.prepare`, which then puts no DDP around it.

        model, optimizer = accelerator.prepare(keep_unwrapped(model, accelerator), optimizer)

    The forward runs under the accelerator's autocast and compiler, as in DDP. `mp_policy` of
    `fully_shard` differs from that: with it the gathers and reductions are in 16 bits too.
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
    """Raise in `accelerator.save_state` and `load_state`, which can't handle sharded optimizers."""
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
        if self.args.should_save:
            self._save(output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:  # on all ranks: it saves once more
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
