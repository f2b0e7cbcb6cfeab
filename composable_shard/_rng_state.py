"""The random number generators of this process, as values that JSON can hold."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import Tensor

__all__ = ["check_rng_state", "get_rng_state", "set_rng_state"]


def get_rng_state() -> dict[str, Any]:
    """Return the states of Python, of torch, of its accelerator, and of numpy if it is loaded."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "torch": _to_bytes(torch.get_rng_state()),
    }
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and torch.accelerator.is_available():
        module: Any = torch.get_device_module(accelerator)
        state["accelerator"] = _to_bytes(module.get_rng_state())
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (str(kind), keys.tolist(), *rest)
    return state


def check_rng_state(state: dict[str, Any]) -> None:
    """Check that generators can take the states; changes none.

    Raises:
        ValueError: If one of them is no such state.
    """
    try:
        random.Random().setstate(state["python"])
        torch.Generator().set_state(_to_tensor(state["torch"]))
        numpy: Any = sys.modules.get("numpy")
        if "numpy" in state and numpy is not None:
            numpy.random.RandomState().set_state(state["numpy"])
    except Exception as error:
        raise ValueError(f"no state of a random number generator: {error}") from error


def set_rng_state(state: dict[str, Any]) -> None:
    """Go on with these states; a generator that is not in them, or not here, stays as it is."""
    random.setstate(state["python"])
    torch.set_rng_state(_to_tensor(state["torch"]))
    accelerator = torch.accelerator.current_accelerator()
    if "accelerator" in state and accelerator is not None and torch.accelerator.is_available():
        module: Any = torch.get_device_module(accelerator)
        module.set_rng_state(_to_tensor(state["accelerator"]))
    numpy: Any = sys.modules.get("numpy")
    if "numpy" in state and numpy is not None:
        numpy.random.set_state(state["numpy"])


def _to_bytes(state: Tensor) -> bytes:
    return bytes(state.cpu().tolist())


def _to_tensor(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
