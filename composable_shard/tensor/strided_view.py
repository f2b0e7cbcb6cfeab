"""`StridedView`, a view of a shard whose elements are no flat range.

[Note: Strided views]
A column of a parameter, or rows of several steps, lie on several ranks in pieces. Such a view holds
no values: it names its base and which elements it selects. An op on it gathers the base, runs on
the view of the whole tensor, and cuts what it wrote again, so that writes reach the parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from composable_shard.tensor.direct_ops import DIRECT_OPS
from composable_shard.tensor.flat_shard import FlatShard
from composable_shard.tensor.rule_table import NeedsWhole
from composable_shard.torch_private import OpOverload, make_wrapper


@dataclass(frozen=True)
class Geometry:
    """Which elements of a dense tensor a view selects, in memory order."""

    shape: torch.Size
    stride: tuple[int, ...]
    start: int

    def apply(
        self, func: OpOverload, base: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Geometry | list[Geometry] | None:
        """Return the geometry after a view op on elements of `base`, worked out without data.

        A list for an op with several results; None if it reinterprets the elements.
        """
        empty = torch.empty(base.numel(), dtype=base.dtype, device="meta")
        found = func(empty.as_strided(self.shape, self.stride, self.start), *args, **kwargs)
        views = found if isinstance(found, list | tuple) else [found]
        if any(view.dtype != base.dtype or view.is_neg() or view.is_conj() for view in views):
            return None
        after = [Geometry(view.shape, view.stride(), view.storage_offset()) for view in views]
        return after if isinstance(found, list | tuple) else after[0]

    @property
    def is_one_run(self) -> bool:
        """Whether the elements lie side by side in memory, each once."""
        expected = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size != 1 and self.shape.numel():
                if stride != expected:
                    return False
                expected *= size
        return True


class StridedView(FlatShard):
    """A view of a shard that is no flat range, see [Note: Strided views]."""

    base: FlatShard
    geometry: Geometry

    @staticmethod
    def __new__(cls: type[StridedView], base: FlatShard, geometry: Geometry) -> StridedView:
        """Make a view; it has the base's name and write guard, and no values."""
        self: StridedView = make_wrapper(
            cls, geometry.shape, geometry.stride, dtype=base.dtype, device=base.device
        )
        # For names and groups only: another object than any other shard's.
        spec = replace(
            base._shard_spec,
            shape=geometry.shape,
            dense_shape=geometry.shape,
            dense_stride=geometry.stride,
            tensor_parallel=None,
        )
        self._shard_spec, self._guard, self.base, self.geometry = spec, base._guard, base, geometry
        return self

    @property
    def _local(self) -> NoReturn:  # type: ignore[override] # no values
        """Raise, and so make every rule leave the op to whole tensors."""
        raise NeedsWhole(
            f"a view of '{self._shard_spec.label.fqn}' selects elements {tuple(self.shape)} that "
            "are no flat range, so this rank has no slice of it."
        )

    def of_whole(self, whole: Tensor) -> Tensor:
        """Return the view of the base's whole tensor; it shares memory."""
        at_start = whole.storage_offset() + self.geometry.start
        return whole.as_strided(self.geometry.shape, self.geometry.stride, at_start)

    def gathered(self) -> Tensor:
        """Gather the base and return the elements of the view; a collective, for all ranks."""
        return self.of_whole(self.base.gathered()).clone(memory_format=torch.contiguous_format)

    def data_ptr(self) -> int:
        """Return the address of the base and the view's place in it."""
        return self.base.data_ptr() + self.geometry.start * self.element_size()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # as FlatShard's
        """Describe the view; no communication."""
        return f"StridedView('{self._shard_spec.label.fqn}', shape={tuple(self.shape)})"


for _name in DIRECT_OPS:  # they would read the slice
    setattr(StridedView, _name, getattr(Tensor, _name))
