"""What lets `transformers.Trainer` and `accelerate` train a sharded model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from composable_shard.huggingface.api import load_safetensors
from composable_shard.options import StateDictOptions
from composable_shard.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

_M = TypeVar("_M", bound=nn.Module)
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def keep_unwrapped(model: _M) -> _M:
    """Let `accelerator.prepare(model)` return a sharded model as it is, and not in DDP.

    Autocast is left out with the wrapper: pass `mp_policy` to `fully_shard` for mixed precision.

    Args:
        model: The model, which is returned.
    """
    model._is_accelerate_prepared = True  # type: ignore[assignment] # nn.Module: tensors and modules
    return model


class TrainerMixin:
    """Lets a `Trainer` of transformers train, save and resume a sharded model.

        class ShardedTrainer(TrainerMixin, Trainer): ...

        fully_shard(model)
        ShardedTrainer(model, args, train_dataset=...).train()

    Put it first. The model is not wrapped, checkpoints hold whole models and whole optimizer
    states, which the first rank writes, and load at any world size. Gradients of each microbatch
    are reduced.
    """

    model: nn.Module
    args: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any
    _save: Callable[..., None]

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return super()._wrap_model(keep_unwrapped(model), *args, **kwargs)  # type: ignore[misc] # Trainer's

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model as Trainer does; called on all ranks."""
        state = get_model_state_dict(self.model, options=_WHOLE)
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
