"""A step of a plain model on fake tensors, and what a rank holds at the peaks of a step.

[Note: Fake run]
A fake tensor has a shape, a dtype and a device, but no memory. Operations on fake tensors compute
only shapes, so a model of any size runs, also one on the meta device. Every storage that an
operation returns counts until it is freed. Parameters, buffers and the batch don't count. A
gradient counts until it is complete; then it goes into a buffer of its unit. Activation
checkpointing, tied weights and modules that run twice are seen as they are.

[Note: Peaks]
At every moment of a step a rank holds, in addition to parameters at rest and optimizer state,

- units that are gathered: the one that computes, the units around it, and units gathered ahead;
- in a backward, the gradients of each unit that it has reached (in the memory of the values where
  dtypes and strategy allow it, otherwise in addition to the values); the buffer of the one
  reduction in flight; and the shards of gradients that were reduced before;
- activations, and a gradient that is not complete, [Note: Fake run].

Terms that are summed on the CPU take memory there, [Note: Low-precision sums]. On an accelerator
gradients of small units wait for others, [Note: Launched reductions].
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from composable_shard.comm import MAX_EXCHANGE_SIZE, MAX_LAUNCH_NBYTES
from composable_shard.options import MixedPrecisionPolicy
from composable_shard.planning.costs import Cost, RankCounts
from composable_shard.runtime import cast_arguments, cast_output, divide_in_runs, iter_tensors
from composable_shard.torch_private import (
    DEPENDS_ON_VALUES,
    FakeTensorMode,
    TorchDispatchMode,
    buffers_of,
    modules_in,
    parameters_of,
    tree_map_only,
)

Event = Literal["start", "forward", "returned", "backward"]


@dataclass(frozen=True)
class Moment:
    """A part of a step, from one event to the next."""

    event: Event  # a unit's forward begins, or returns, or its backward begins; or the step does
    module: nn.Module  # the unit's module; the model for the step
    peak_nbytes: int  # the most bytes of activations and unfinished gradients until the next event


@dataclass(frozen=True)
class FakeRun:
    """The record of one step."""

    moments: tuple[Moment, ...]  # its parts, in order
    activation_nbytes: int  # held when the forward has returned


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages from the operation that returns them until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Don't count these."""
        for tensor in tensors:
            self._remember(tensor.untyped_storage(), 0)

    def restart_peak(self) -> int:
        """Return the most bytes since the last call."""
        peak, self.peak = self.peak, self.nbytes
        return peak

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in iter_tensors(result):
            storage = tensor.untyped_storage()
            if id(storage) not in self._known:
                self._remember(storage, storage.nbytes())
        return result

    def _remember(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        key = id(storage)

        def forget(_: object) -> None:
            del self._known[key]
            self.nbytes -= nbytes

        self._known[key] = weakref.ref(storage, forget)
        self.nbytes += nbytes
        self.peak = max(self.peak, self.nbytes)


def run_fake_step(
    model: nn.Module, policies: Mapping[nn.Module, MixedPrecisionPolicy], batch: Any
) -> FakeRun:
    """Run a forward and a backward of a model that is not sharded, see [Note: Fake run].

    The model stays unchanged. The backward starts from the output's `loss` if it has one, from a
    scalar output, or else from the sum of all floating-point tensors in the output. Modules that
    become units compute in the dtypes of their policies.
    """
    try:
        return _run(model, policies, *_as_arguments(batch))
    except DEPENDS_ON_VALUES as error:
        raise ValueError(
            f"what {type(model).__name__} does depends on the values of tensors (`.item()`, an "
            f"`if`, an index by a mask): {error}. Fake tensors have none. Leave out the batch, and "
            "add activations by hand."
        ) from error


def _run(
    model: nn.Module,
    policies: Mapping[nn.Module, MixedPrecisionPolicy],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> FakeRun:
    run = _Run(model)
    with FakeTensorMode(allow_non_fake_inputs=True), ExitStack() as hooks:
        values = hooks.enter_context(_fake_values(model, policies))
        args, kwargs = tree_map_only(Tensor, _fake_like, (args, kwargs))
        run.live.leave_out([*values, *iter_tensors((args, kwargs))])
        for module, policy in policies.items():
            hooks.enter_context(run.watch(module, policy))
        run.note("start", model)
        with run.live:
            output = model(*args, **kwargs)
            loss = _loss_of(output)
            del output
            activation_nbytes = run.live.nbytes
            run.is_backward = True
            loss.backward()
            moments = run.finish()
    return FakeRun(moments, activation_nbytes)


class _Run:
    def __init__(self, model: nn.Module) -> None:
        self.live = _LiveBytes()
        self.is_backward = False
        self._moments: list[tuple[Event, nn.Module]] = []
        self._peaks: list[int] = []
        self._depths: dict[nn.Module, int] = {}

    def note(self, event: Event, module: nn.Module) -> None:
        """Begin a new part of the step."""
        if self._moments:
            self._peaks.append(self.live.restart_peak())
        self._moments.append((event, module))

    def finish(self) -> tuple[Moment, ...]:
        """End the last part."""
        self._peaks.append(self.live.restart_peak())
        pairs = zip(self._moments, self._peaks, strict=True)
        return tuple(Moment(event, module, peak) for (event, module), peak in pairs)

    @contextmanager
    def watch(self, module: nn.Module, policy: MixedPrecisionPolicy) -> Iterator[None]:
        """Record a unit's forward and backward, and cast its inputs and outputs."""

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._enter(module)
            if policy.param_dtype is None or not policy.cast_forward_inputs:
                return None
            return cast_arguments(args, kwargs, policy.param_dtype)

        def leave(_: nn.Module, args: object, output: Any) -> Any:
            if policy.output_dtype is not None:
                output = cast_output(output, policy.output_dtype)
            self._leave(module, output)
            return output

        handles = [
            module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
            module.register_forward_hook(leave),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module) -> None:
        depth = self._depths.get(module, 0)
        self._depths[module] = depth + 1
        if depth == 0:
            self.note("backward" if self.is_backward else "forward", module)

    def _leave(self, module: nn.Module, output: Any) -> None:
        self._depths[module] -= 1
        if self._depths[module] > 0 or self.is_backward:
            return
        self.note("returned", module)
        for tensor in iter_tensors(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda _: self.note("backward", module))


def _places_in(
    model: nn.Module, values_of: Callable[[nn.Module], dict[str, Any]]
) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Return where a module and those in it register tensors: dict, name, tensor."""
    return [
        (values, name, tensor)
        for values in map(values_of, modules_in(model))
        for name, tensor in values.items()
        if tensor is not None
    ]


@contextmanager
def _fake_values(
    model: nn.Module, policies: Mapping[nn.Module, MixedPrecisionPolicy]
) -> Iterator[Iterable[Tensor]]:
    """Put fake parameters and buffers into the modules, in the dtypes in which they compute.

    They stay until the end of the backward, which may run parts of the forward again.
    """
    dtypes: dict[Tensor, torch.dtype | None] = {}
    for module in modules_in(model):  # outer units first: inner ones override
        if module in policies:
            for _, _, param in _places_in(module, parameters_of):
                dtypes[param] = policies[module].param_dtype
    places = _places_in(model, parameters_of) + _places_in(model, buffers_of)
    fakes: dict[Tensor, Tensor] = {}
    for each in dict.fromkeys(tensor for _, _, tensor in places):
        dtype = dtypes.get(each) if each.is_floating_point() else None
        fakes[each] = fake = torch.empty(each.shape, dtype=dtype or each.dtype)
        if isinstance(each, nn.Parameter):
            fakes[each] = nn.Parameter(fake, each.requires_grad)
        if each.requires_grad:
            fakes[each].register_post_accumulate_grad_hook(_drop_gradient)
    try:
        for values, name, tensor in places:
            values[name] = fakes[tensor]
        yield fakes.values()
    finally:
        for values, name, tensor in places:
            values[name] = tensor


def _fake_like(tensor: Tensor) -> Tensor:
    """Return a fake tensor like it, on the device of the fake parameters."""
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return fake.requires_grad_(tensor.requires_grad)


def _drop_gradient(param: Tensor) -> None:
    param.grad = None


def _as_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    tensors = [t for t in iter_tensors(output) if t.is_floating_point() and t.requires_grad]
    if not tensors:
        raise ValueError(
            "expected the model to return floating-point tensors that depend on its parameters, "
            f"got {type(output).__name__}. Give `estimate` a batch for which it does, or none."
        )
    first, *others = [tensor if tensor.dim() == 0 else tensor.sum() for tensor in tensors]
    return sum(others, first)


@dataclass(frozen=True)
class StepMemory:
    """What one unit takes while a step runs, in bytes."""

    gathered: int  # its full parameters, beyond those at rest
    packed: int = 0  # its full gradients, which are freed when they are reduced
    shard: int = 0  # what remains of them after that
    terms: int = 0  # memory of the sum, if it is computed on the CPU
    # Likewise, for gradients that have a buffer that stays; all units share this memory
    kept_terms: int = 0
    is_in_place: bool = (
        False  # gradients lie in the memory of the values, as they are or until cast
    )
    is_freed: bool = True  # the full parameters are freed when its forward has returned
    prefetch_nbytes: int = 0
    is_launched: bool = False  # its collectives may be issued with those of its neighbours

    @classmethod
    def of(
        cls,
        cost: Cost,
        ranks: RankCounts,
        *,
        is_freed: bool,
        prefetch_nbytes: int,
        is_cpu: bool,
        is_launched: bool,
    ) -> StepMemory:
        """Return the memory of a unit with these costs."""
        packed, copies = cost.packed_nbytes, max(ranks.replicate, default=1)
        is_exchange = is_cpu and (1 < ranks.shard <= MAX_EXCHANGE_SIZE or copies == 2)
        kept = cost.grad_nbytes if is_exchange and not packed else 0
        return cls(
            gathered=cost.gathered_nbytes,
            packed=packed,
            shard=cost.grad_nbytes if packed else 0,
            # With two ranks the output receives the other's term, unless it is a part of the
            # buffer.
            terms=packed if is_exchange and ranks.shard > 2 else 0,
            kept_terms=kept // 2 if ranks.shard == 2 else kept,
            is_in_place=0 < cost.gathered_nbytes <= packed,
            is_freed=is_freed,
            prefetch_nbytes=prefetch_nbytes,
            is_launched=is_launched,
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
    are_launched = all(unit.is_launched for unit in units.values())
    step = (_LaunchedStep if are_launched else _Step)(units, moments)
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
        """Gather a unit for its forward, and other units ahead."""
        self._gather(module, self._forward)

    def leave(self, module: nn.Module) -> None:
        """Free a unit whose forward has returned, if its options say so."""
        if self._units[module].is_freed:
            self._gathered.pop(module, None)

    def reach(self, module: nn.Module, place: int) -> None:
        """End finished units; gather a unit for its backward, and other units ahead."""
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
        """Gather a unit, and the units gathered with it, see [Note: Gathers of small units]."""
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


class _LaunchedStep(_Step):
    """Likewise where the backend groups collectives, as NCCL does."""

    def __init__(self, units: Mapping[nn.Module, StepMemory], moments: Sequence[Moment]) -> None:
        super().__init__(units, moments)
        self._runs = {order: self._runs_of(order) for order in (self._forward, self._backward)}
        self._waiting = 0  # gradients that wait for others

    def _runs_of(self, order: _Order) -> deque[tuple[int, int, int]]:
        of_order = [self._units[module] for module in order.modules]
        sizes, limits = (
            [each.gathered for each in of_order],
            [each.prefetch_nbytes for each in of_order],
        )
        return deque(divide_in_runs(sizes, limits))

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return super().nbytes + self._waiting

    def _end(self, module: nn.Module) -> None:
        in_flight, unit = self._in_flight, self._units[module]
        super()._end(module)
        limit = min(MAX_LAUNCH_NBYTES, unit.prefetch_nbytes // 2)
        if unit.packed > limit:
            self._waiting = 0  # ends before this one begins
        elif self._waiting + unit.packed <= limit:
            self._in_flight = in_flight
            self._waiting += unit.packed
        else:
            self._in_flight, self._waiting = self._waiting, unit.packed

    def _gather(self, module: nn.Module, order: _Order) -> None:
        self._gathered[module] = None
        runs = self._runs[order]
        while runs and runs[0][0] <= order.places[module]:
            _, start, end = runs.popleft()
            self._gathered.update(dict.fromkeys(order.modules[start:end]))


class _Order:
    """The units in the order of their first use."""

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
