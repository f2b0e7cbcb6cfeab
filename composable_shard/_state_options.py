"""`StateDictOptions`: what a state dict is to hold, and where."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["StateDictOptions"]


@dataclass(frozen=True)
class StateDictOptions:
    """How state dicts are made and loaded, as in torch.distributed.checkpoint.state_dict.

    Attributes:
        full_state_dict: Return whole plain tensors instead of FlatShards.
        cpu_offload: Return tensors in host memory.
        rank0_only: With `full_state_dict`: the first rank alone gets them, by one gather for each
            flat parameter, and the other ranks an empty dict. False: all ranks, by all-gathers.
        broadcast_from_rank0: For loading: the first rank alone passes a dict, of whole tensors, the
            others an empty one; every rank is sent its own part, a unit at a time.
        strict: Raise for names that are missing or unexpected; False ignores them.
        keep_submodule_prefixes: With `submodules`: names begin at the model, not at the submodule.
        init_optimizer_state: For reading: give an optimizer that has not stepped its state, as
            torch's function always does, so that `torch.distributed.checkpoint.load` has something
            to load into. The values mean nothing until something is loaded.
        dtype: Cast floating-point parameters and buffers of a model's state dict to this.
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    rank0_only: bool = True
    broadcast_from_rank0: bool = False
    strict: bool = True
    keep_submodule_prefixes: bool = True
    init_optimizer_state: bool = False
    dtype: torch.dtype | None = None
