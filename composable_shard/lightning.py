"""A strategy for Lightning: `Trainer(strategy=ShardedStrategy(...))` shards any module."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch import callbacks
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from composable_shard.checkpoint import load_checkpoint, save_checkpoint
from composable_shard.module_api import register_forward_method
from composable_shard.planning import shard_model, transformer_blocks
from composable_shard.runtime import get_states
from composable_shard.state_dict import get_model_state_dict
from composable_shard.tensor import FlatShard

_AVERAGING = getattr(callbacks, "WeightAveraging", ())  # not in old versions
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_OWN = "the model of this checkpoint"  # stands for the module's own state dict


class ShardedStrategy(DDPStrategy):  # type: ignore[misc]  # Lightning's types are not known here
    """Shard the module's parameters, gradients and optimizer state over all ranks.

        Trainer(strategy=ShardedStrategy(), precision="bf16-mixed", gradient_clip_val=1.0)

    The module is sharded as `shard_model` does, unless its `configure_model` has done so, and
    optimizers are configured after that. Its steps run as forwards of the root unit. Precision
    plugins and clipping by norm and value are Lightning's. Checkpoints are directories of
    `save_checkpoint`: each rank writes its part, and they load at any number of ranks.

    Args:
        rules: Which modules are units. Default: the repeated blocks, as `transformer_blocks` finds
            them, or the module as one unit if there are none.
        process_group_backend: As in `DDPStrategy`.
        timeout: As in `DDPStrategy`.
        options: Of `fully_shard`, for all units: `strategy`, `mp_policy`, `offload_policy`, ...

    Raises:
        NotImplementedError: At the start of a fit with `automatic_optimization = False` where
            `configure_model` shards nothing: a backward inside of `training_step` would run in the
            root unit's forward.
    """

    def __init__(
        self,
        rules: Any = None,
        *,
        process_group_backend: str | None = None,
        timeout: Any = None,
        **options: Any,
    ) -> None:
        given = {} if timeout is None else {"timeout": timeout}
        super().__init__(process_group_backend=process_group_backend, **given)
        self._rules, self._options = rules, options
        self._own_state: dict[str, Any] = {}

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Load into the shards."""
        return True

    def setup_environment(self) -> None:
        """Make the process group; shard now if a callback will copy the module."""
        super().setup_environment()
        # A callback of Lightning's copies the module before `setup`.
        if any(isinstance(each, _AVERAGING) for each in self.lightning_module.trainer.callbacks):
            self._shard()

    def setup(self, trainer: Any) -> None:
        """Shard the module, then configure optimizers."""
        self.accelerator.setup(trainer)
        self._shard()
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _shard(self) -> None:
        module: nn.Module = self.lightning_module
        if not get_states(module):
            self.precision_plugin.convert_module(module)
            self.model_to_device()
            if not self.lightning_module.automatic_optimization:
                raise NotImplementedError(
                    "with automatic_optimization = False training_step calls backward itself, "
                    "which can't run inside the forward of the root unit. Shard the modules that "
                    "training_step calls in configure_model: shard_model(self.net, rules)."
                )
            shard_model(module, self._find_rules(module), **self._options)
            for name in _STEPS:
                if is_overridden(name, module):
                    register_forward_method(module, name)

    def _find_rules(self, module: nn.Module) -> Any:
        if self._rules is not None:
            return self._rules
        try:
            return transformer_blocks(module)
        except ValueError:  # no blocks that repeat
            return {}

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the shards of the model."""
        self._own_state = get_model_state_dict(self.lightning_module)
        return self._own_state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: `save_checkpoint` saves it."""
        return {}

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Do nothing: `load_checkpoint` has loaded it."""

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Do nothing: `load_checkpoint` has loaded it."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save model and optimizers as `save_checkpoint` does, and everything else as its `extra`.

        Called on all ranks. Shards of other models in it, such as an average of the weights, are
        gathered one by one into host memory.
        """
        has_optimizers = checkpoint.pop("optimizer_states", None) is not None
        extra = {
            key: _OWN if value is self._own_state else _whole(value)
            for key, value in checkpoint.items()
        }
        save_checkpoint(
            self.broadcast(os.fspath(filepath)),
            self.lightning_module,
            self._by_number() if has_optimizers else {},
            step=checkpoint["global_step"],
            keep_last=1,
            extra=extra,
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Load model and optimizers into their shards; return everything else."""
        module = self.lightning_module
        path = self.broadcast(os.fspath(checkpoint_path))
        optimizers = self._by_number() if module.trainer.state.fn == "fit" else {}
        found = load_checkpoint(path, module, optimizers, strict=module.strict_loading)
        own = get_model_state_dict(module)
        extra = {key: own if _is_own(value) else value for key, value in found.extra.items()}
        return {**extra, "optimizer_states": []}  # which says that they are restored

    def _by_number(self) -> dict[str, Any]:
        return {str(number): each for number, each in enumerate(self.optimizers)}


def _is_own(value: Any) -> bool:
    return isinstance(value, str) and value == _OWN


def _whole(value: Any) -> Any:
    """Return nested dicts with whole tensors on the host for shards."""
    if isinstance(value, FlatShard):
        return value.full_tensor().detach().cpu()
    if isinstance(value, dict):
        return {key: _whole(each) for key, each in value.items()}
    return value
