"""The formulas of docs/costs.md for what a rank holds, for a model of equal layers and a root unit.

Everything is in the dtype of the parameters, the optimizer has two states, and the peaks are those
of one step without accumulation; activations are not in them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's parts, and the ranks they are shared by.

    Attributes:
        total: P, all parameters.
        layer: u, the parameters of one layer's unit.
        root: r, those of the root unit.
        gradient: g, the largest parameter of the root, whose gradient autograd holds on its own.
        num_ranks: N.
    """

    total: int
    layer: int
    root: int
    gradient: int
    num_ranks: int

    @classmethod
    def of(cls, model: nn.Module, num_ranks: int) -> Sizes:
        """Measure a model with equal `layers`, in which the root's gradients are the largest."""
        layers = [param.nbytes for layer in model.layers for param in layer.parameters()]
        total = sum(param.nbytes for param in model.parameters())
        root = [p.nbytes for name, p in model.named_parameters() if not name.startswith("layers.")]
        return cls(total, sum(layers) // len(model.layers), sum(root), max(root), num_ranks)

    def scratch(self, unit: int) -> float:
        """For a unit's reduction in place on the CPU: a shard of the unit, or all of it."""
        return unit / (2 if self.num_ranks == 2 else 1)

    @property
    def last_moment(self) -> float:
        """Held when the embedding's gradient comes, beyond what there is at rest.

        All but two units are reduced; the root's buffer, and those of the first two layers, are
        still there.
        """
        reduced = (self.total - self.root - self.layer) / self.num_ranks
        # With more than two ranks the terms of the reduction in flight need memory.
        in_flight = self.layer * (1 if self.num_ranks == 2 else 2)
        return reduced + self.root + self.layer + in_flight + self.gradient


Levels = dict[str, float]  # bytes, by stage


def _full(s: Sizes) -> Levels:
    rest = 3 * s.total / s.num_ranks
    return _levels(rest, s.root + 2 * s.layer, s.last_moment, s.total / s.num_ranks)


def _full_keep(s: Sizes) -> Levels:
    rest = 3 * s.total / s.num_ranks
    return _levels(rest, s.total, s.total + s.gradient, s.total / s.num_ranks)


def _gradop(s: Sizes) -> Levels:
    rest = s.total + 2 * s.total / s.num_ranks
    return _levels(rest, 0, s.last_moment, s.total / s.num_ranks)


def _optim(s: Sizes) -> Levels:
    rest = 2 * s.total + 2 * s.total / s.num_ranks + s.scratch(s.layer)
    return _levels(rest, 0, max(s.gradient, s.scratch(s.root)), 0)


def _noshard(s: Sizes) -> Levels:
    return _levels(4 * s.total + s.layer, 0, max(s.gradient, s.root), 0)


def _levels(rest: float, forward: float, backward: float, gradients: float) -> Levels:
    return {
        "peak forward": rest + forward,
        "peak backward": rest + backward,
        "after backward": rest + gradients,
        "peak optimizer": rest + gradients,
        "at rest": rest,
    }


FORMULAS: dict[str, Callable[[Sizes], Levels]] = {
    "ours": _full,
    "ours_raf": _full,
    "ours_keep": _full_keep,
    "ours_gradop": _gradop,
    "ours_optim": _optim,
    "ours_noshard": _noshard,
}
