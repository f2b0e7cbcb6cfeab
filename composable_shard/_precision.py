"""The dtypes of one flat parameter: what a policy makes of the dtype its parameters had.

[Note: Reduce dtype]
The buffer of gradients may have another dtype than the parameters: packing casts. Gradients of
microbatches that are not reduced then add up in it too, under every strategy. The result is cast
once, to the main dtype. Where that takes memory of its own, persistent gradients have it
persistently.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from composable_shard.api import PRECISIONS, MixedPrecisionPolicy

__all__ = ["Precision"]


@dataclass(frozen=True)
class Precision:
    """Dtypes that differ, or may come to differ, from that of the local shard.

    None follows another dtype, also through `module.to(dtype)`.

    Attributes:
        main_dtype: What the local shard must have; None: whatever it has.
        param_dtype: Of the unsharded buffer; None: that of the local shard.
        gather_dtype: In which shards travel; None: that of the unsharded buffer.
        reduce_dtype: In which gradients travel; None: that of the unsharded buffer.
    """

    main_dtype: torch.dtype | None = None
    param_dtype: torch.dtype | None = None
    gather_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    @classmethod
    def of(cls, policy: MixedPrecisionPolicy, dtype: torch.dtype, *, is_kept: bool) -> Precision:
        """Return the dtypes of a flat parameter.

        Args:
            policy: Of its unit.
            dtype: Of its original parameters.
            is_kept: Whether they are in a module that computes in their main dtype.
        """
        if dtype not in PRECISIONS:
            return cls()
        if is_kept:
            return cls(policy.main_dtype)
        param_dtype = policy.param_dtype
        if param_dtype is None and policy.main_dtype is not None:
            param_dtype = dtype  # the model computes as it did
        return cls(policy.main_dtype, param_dtype, policy.gather_dtype, policy.reduce_dtype)

    def computes_in(self, main: torch.dtype) -> torch.dtype:
        """Return the dtype of the unsharded buffer, where the local shard's is `main`."""
        return self.param_dtype or main

    def reduces_in(self, main: torch.dtype) -> torch.dtype:
        """Return the dtype of the reduce buffer."""
        return self.reduce_dtype or self.computes_in(main)

    def travels_in(self, main: torch.dtype) -> torch.dtype:
        """Return the dtype in which shards are gathered."""
        return self.gather_dtype or self.computes_in(main)

    def itemsize(self, main: torch.dtype) -> int:
        """Return the smallest size of an element in any of the buffers, which alignment is for."""
        used = (main, self.computes_in(main), self.reduces_in(main), self.travels_in(main))
        return min(dtype.itemsize for dtype in used)
