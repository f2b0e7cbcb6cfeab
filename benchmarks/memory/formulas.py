"""The formulas of docs/costs.md for what a rank holds, for a model of equal layers and a root unit.

The optimizer has two states, and the peaks are those of one step without accumulation; activations
are not in them. `FORMULAS` are for the CPU, with everything in the dtype of the parameters;
`DEVICE_FORMULAS` for an accelerator, whose sums need no memory of ours except in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's parts in fp32, and the ranks they are shared by.

    Attributes:
        total: P, all parameters.
        layer: u, the parameters of one layer's unit.
        root: r, those of the root unit.
        gradient: g, the largest parameter of the root, whose gradient autograd holds on its own.
        num_ranks: N.
        layer_gradient: The largest parameter of a layer.
        values: Bytes of an element in the compute dtype, divided by those in the parameters' dtype.
        reduced: Likewise in the dtype of the reductions.
    """

    total: int
    layer: int
    root: int
    gradient: int
    num_ranks: int
    layer_gradient: int = 0
    values: float = 1.0
    reduced: float = 1.0

    @classmethod
    def of(cls, model: nn.Module, num_ranks: int) -> Sizes:
        """Measure a model with equal `layers`, in which the root's gradients are the largest."""
        layers = [param.nbytes for layer in model.layers for param in layer.parameters()]
        total = sum(param.nbytes for param in model.parameters())
        root = [p.nbytes for name, p in model.named_parameters() if not name.startswith("layers.")]
        layer = sum(layers) // len(model.layers)
        return cls(total, layer, sum(root), max(root), num_ranks, max(layers))

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


def _terms(s: Sizes, unit: float) -> float:
    """16-bit terms are summed in fp32 by each rank, which needs memory for all of a unit's."""
    return unit * s.reduced if s.reduced < 1 else 0


def _in_flight(s: Sizes, unit: int) -> float:
    """Held until a unit's reduction is done, beside the shard that it ends in."""
    return unit * s.reduced + _terms(s, unit)


def _end_of_backward(s: Sizes, root: float, layer: float, ahead: float) -> float:
    """Beyond what there is at rest, as the last two layers and the root are reduced.

    Args:
        s: The sizes.
        root: What the root holds.
        layer: What the layer holds whose backward runs.
        ahead: What the layer after it holds.
    """
    flying = root + layer + _in_flight(s, s.layer)
    second = (s.total - s.root - 2 * s.layer) / s.num_ranks + ahead + s.layer_gradient * s.values
    last = (s.total - s.root - s.layer) / s.num_ranks + s.gradient * s.values
    gradients = s.root * s.reduced
    cast = root + gradients if root < gradients else 0
    root_end = max(_in_flight(s, s.root) + s.root / s.num_ranks, cast)
    end = (s.total - s.root) / s.num_ranks + root_end
    return max(flying + second, flying + last, end)


def _device_full(s: Sizes) -> Levels:
    values = s.layer * s.values
    backward = _end_of_backward(s, s.root * s.values, values, values)
    rest = 3 * s.total / s.num_ranks
    return _levels(rest, s.root * s.values + 2 * values, backward, s.total / s.num_ranks)


def _device_keep(s: Sizes) -> Levels:
    whole, values = s.total * s.values, s.layer * s.values
    end = _end_of_backward(s, s.root * s.values, values, values)
    # The last layer's gradients take the place of its values, or are cast and these are freed.
    start = whole + s.gradient * s.values
    cast = whole + _in_flight(s, s.layer) if s.values != s.reduced else 0
    second = whole - values + _in_flight(s, s.layer) + s.layer / s.num_ranks
    start = max(start, cast, second + s.layer_gradient * s.values)
    rest = 3 * s.total / s.num_ranks
    return _levels(rest, s.total * s.values, max(start, end), s.total / s.num_ranks)


def _device_kept_values(s: Sizes) -> float:
    return s.total if s.values == 1 else s.total * s.values + s.total / s.num_ranks


def _device_gradop(s: Sizes) -> Levels:
    rest = _device_kept_values(s) + 2 * s.total / s.num_ranks
    backward = _end_of_backward(s, s.root * s.reduced, s.layer * s.reduced, 0)
    return _levels(rest, 0, backward, s.total / s.num_ranks)


def _device_optim(s: Sizes) -> Levels:
    gradients = s.total if s.reduced == 1 else s.total * s.reduced + s.total / s.num_ranks
    rest = _device_kept_values(s) + gradients + 2 * s.total / s.num_ranks + _terms(s, s.layer)
    root = _terms(s, s.root) if s.root > s.layer else 0  # else that of a layer is enough
    return _levels(rest, 0, max(max(s.gradient, s.layer_gradient) * s.values, root), 0)


def _device_noshard(s: Sizes) -> Levels:
    values = s.total * (1 if s.values == 1 else 1 + s.values)
    gradients = s.total * (1 if s.reduced == 1 else 1 + s.reduced)
    rest = values + gradients + 2 * s.total
    return _levels(rest, 0, max(s.gradient, s.layer_gradient) * s.values, 0)


DEVICE_FORMULAS: dict[str, Callable[[Sizes], Levels]] = {
    "ours": _device_full,
    "ours_keep": _device_keep,
    "ours_gradop": _device_gradop,
    "ours_optim": _device_optim,
    "ours_noshard": _device_noshard,
}
