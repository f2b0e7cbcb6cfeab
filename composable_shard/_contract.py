"""States on modules, entered in torch's own registry of composable distributed APIs.

`replicate`, `checkpoint` and torch's `fully_shard` look there too, so each sees the others. The
state itself has a key of its own: torch's is random in each process and would not survive a pickle.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

__all__ = ["attach_state", "find_applied", "read_state"]

_API_NAME = "fully_shard"
_STATE_KEY = "_composable_shard_state"


def read_state(module: nn.Module) -> Any | None:
    """Return the state attached to `module` itself, or None; writes nothing."""
    return module.__dict__.get(_STATE_KEY)


def attach_state(module: nn.Module, state: Any) -> None:
    """Attach `state` to `module`. Nothing in it can fail, so it is the last thing a call does."""
    module.__dict__[_STATE_KEY] = state
    module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())[_API_NAME] = RegistryItem()


def find_applied(module: nn.Module) -> str | None:
    """Return the name of a composable API applied to `module` that excludes ours, or None."""
    registry = module.__dict__.get(REGISTRY_KEY, {})
    return next((name for name in (_API_NAME, "replicate") if name in registry), None)
