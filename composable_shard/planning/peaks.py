"""How much a step holds at its peaks, beyond what is held at rest.

[Note: Peaks]
At every moment of a step a rank holds, beside parameters at rest and the optimizer's state,

- units that are gathered: the one that computes, those around it, those gathered ahead;
- in a backward, the gradients of each unit that it has reached: in the place of values where dtypes
  and strategy let them, else beside these; the buffer of the reduction in flight, one at a time;
  and the shards of gradients that were reduced before;
- activations, and a gradient that is not complete, [Note: Fake run].

Terms that are summed on the CPU take memory there, [Note: Low-precision sums].
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from composable_shard.comm import MAX_EXCHANGE_SIZE
from composable_shard.planning.costs import Cost, RankCounts
from composable_shard.planning.fake_run import Moment


@dataclass(frozen=True)
class StepMemory:
    """What one unit takes while a step runs, in bytes.

    Attributes:
        gathered: Its full parameters, beyond those at rest.
        packed: Its full gradients, which are freed when they are reduced.
        shard: What is left of them then.
        terms: Of the sum, where it is taken on the CPU.
        kept_terms: Likewise, of gradients that have a buffer for good; all units share this memory.
        is_in_place: Gradients take the place of values.
        is_freed: The full parameters are freed when its forward has returned.
        prefetch_nbytes: The unit's option.
    """

    gathered: int
    packed: int = 0
    shard: int = 0
    terms: int = 0
    kept_terms: int = 0
    is_in_place: bool = False
    is_freed: bool = True
    prefetch_nbytes: int = 0

    @classmethod
    def of(
        cls, cost: Cost, ranks: RankCounts, *, is_freed: bool, prefetch_nbytes: int, is_cpu: bool
    ) -> StepMemory:
        """Return what a unit of these costs takes."""
        packed, size = cost.packed_nbytes, max((ranks.shard, *ranks.replicate))
        is_exchange = is_cpu and 1 < size <= MAX_EXCHANGE_SIZE
        kept = cost.grad_nbytes if is_exchange and not packed else 0
        return cls(
            gathered=cost.gathered_nbytes,
            packed=packed,
            shard=cost.grad_nbytes if packed else 0,
            # Of two ranks the output receives the other's term, unless it is a part of the buffer.
            terms=packed if is_exchange and ranks.shard > 2 else 0,
            kept_terms=kept // 2 if ranks.shard == 2 else kept,
            is_in_place=packed == cost.gathered_nbytes,
            is_freed=is_freed,
            prefetch_nbytes=prefetch_nbytes,
        )


def moments_of(model: nn.Module, units: Container[nn.Module]) -> list[Moment]:
    """Return a step in which units run in the order of the modules, without activations."""
    moments = [Moment("start", model, 0)]
    _visit(model, units, moments, set())
    returned = [each.module for each in moments if each.event == "returned"]
    return [*moments, *(Moment("backward", module, 0) for module in reversed(returned))]


def _visit(
    module: nn.Module, units: Container[nn.Module], moments: list[Moment], seen: set[nn.Module]
) -> None:
    if module in seen:
        return
    seen.add(module)
    if module in units:
        moments.append(Moment("forward", module, 0))
    for child in module.children():
        _visit(child, units, moments, seen)
    if module in units:
        moments.append(Moment("returned", module, 0))


def find_peaks(units: Mapping[nn.Module, StepMemory], moments: Sequence[Moment]) -> tuple[int, int]:
    """Return the most bytes held in the forward and in the backward, see [Note: Peaks]."""
    step = _Step(units, moments)
    forward = backward = 0
    for place, moment in enumerate(moments):
        if moment.event == "forward":
            step.enter(moment.module)
        elif moment.event == "returned":
            step.leave(moment.module)
        elif moment.event == "backward":
            step.reach(moment.module, place)
        held = step.nbytes + moment.peak_nbytes
        if moment.event == "backward":
            backward = max(backward, held)
        else:
            forward = max(forward, held)
    return forward, backward


class _Step:
    """The units that are gathered, and the gradients that are held, as a step goes on."""

    def __init__(self, units: Mapping[nn.Module, StepMemory], moments: Sequence[Moment]) -> None:
        self._units = units
        self._forward = _Order(moments, "forward")
        self._backward = _Order(moments, "backward")
        self._starts = _first_places(moments, "forward")
        self._returns = _first_places(moments, "returned")
        self._gathered: dict[nn.Module, None] = {}
        self._ahead: set[nn.Module] = set()
        self._open: dict[nn.Module, None] = {}  # units whose backward runs
        self._ended: set[nn.Module] = set()
        self._in_flight = self._reduced = 0

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        beside = (self._units[each] for each in self._open)
        return (
            sum(self._units[each].gathered for each in self._gathered)
            + sum(unit.packed for unit in beside if not unit.is_in_place)
            + self._in_flight
            + self._reduced
        )

    def enter(self, module: nn.Module) -> None:
        """Gather a unit for its forward, and others ahead."""
        self._gather(module, self._forward)

    def leave(self, module: nn.Module) -> None:
        """Free a unit whose forward has returned, if it is."""
        if self._units[module].is_freed:
            self._gathered.pop(module, None)

    def reach(self, module: nn.Module, place: int) -> None:
        """End the units that are over, and gather one for its backward, and others ahead."""
        if module in self._ended:
            return
        end = self._returns.get(module, place)
        over = [each for each in self._open if self._starts.get(each, -1) > end]
        for each in over:
            self._end(each)
        self._open[module] = None
        self._gather(module, self._backward)

    def _end(self, module: nn.Module) -> None:
        unit = self._units[module]
        del self._open[module]
        self._ended.add(module)
        self._gathered.pop(module, None)
        self._in_flight = unit.packed + unit.terms
        self._reduced += unit.shard

    def _gather(self, module: nn.Module, order: _Order) -> None:
        """Gather a unit, and those that go along, see [Note: Gathers of small units]."""
        self._gathered[module] = None
        self._ahead.discard(module)
        nbytes = 0
        batch: list[nn.Module] = []
        for place in range(order.places[module] + 1, len(order.modules)):
            following = order.modules[place]
            if not batch and following in self._ahead:
                break
            nbytes += self._units[following].gathered
            if batch and nbytes > self._units[module].prefetch_nbytes:
                break
            batch.append(following)
        self._ahead.update(batch)
        self._gathered.update(dict.fromkeys(batch))


class _Order:
    """The units in the order in which they come the first time."""

    def __init__(self, moments: Sequence[Moment], event: str) -> None:
        names = (each.module for each in moments if each.event == event)
        self.modules = list(dict.fromkeys(names))
        self.places = {module: place for place, module in enumerate(self.modules)}


def _first_places(moments: Sequence[Moment], event: str) -> dict[nn.Module, int]:
    places: dict[nn.Module, int] = {}
    for place, each in enumerate(moments):
        if each.event == event:
            places.setdefault(each.module, place)
    return places
