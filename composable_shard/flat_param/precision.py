"""`Precision`: the dtypes of a flat parameter's values and gradients.

[Note: Reduce dtype]
The buffer of gradients may have another dtype than the parameters: packing casts. Gradients of
microbatches that are not reduced then add up in it too, under every strategy. The result is cast
once, to the main dtype. Where that takes memory of its own, persistent gradients have it
persistently.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from composable_shard.flat_param.extended_gathers import Extension
from composable_shard.options import PRECISIONS, MixedPrecisionPolicy


@dataclass(frozen=True)
class Precision:
    """Dtypes that differ, or may come to differ, from the local shard's.

    None follows another dtype, also through `module.to(dtype)`.
    """

    main_dtype: torch.dtype | None = None  # of the local shard; None: any
    param_dtype: torch.dtype | None = None  # of the unsharded buffer; None: the local shard's
    # Dtype in which shards travel; None: the unsharded buffer's
    gather_dtype: torch.dtype | None = None
    # Dtype in which gradients travel; None: the unsharded buffer's
    reduce_dtype: torch.dtype | None = None
    # The form in which the class of the only parameter is gathered, if it has one
    extension: Extension | None = None

    @classmethod
    def of(cls, policy: MixedPrecisionPolicy, dtype: torch.dtype, *, is_kept: bool) -> Precision:
        """Return the dtypes of a flat parameter; is_kept: a module computes in their main dtype."""
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
        """Return the smallest element size of the buffers, from which the alignment follows."""
        used = (main, self.computes_in(main), self.reduces_in(main), self.travels_in(main))
        return min(dtype.itemsize for dtype in used)
