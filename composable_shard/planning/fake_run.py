"""A step of a plain model on fake tensors: what it holds beside parameters and gradients, and when.

[Note: Fake run]
A fake tensor has shape, dtype and device, and no memory. Operations on fake tensors compute nothing
but shapes, so a model of any size runs, also one on the meta device. Every storage that an
operation returns counts from then until it dies. Parameters, buffers and the batch don't count; a
gradient counts until it is complete, for then it goes into a buffer of its unit. Activation
checkpointing, tied weights and modules that run twice are seen as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from composable_shard.options import MixedPrecisionPolicy
from composable_shard.runtime import cast_arguments, cast_output, iter_tensors
from composable_shard.torch_private import (
    DEPENDS_ON_VALUES,
    FakeTensorMode,
    TorchDispatchMode,
    buffers_of,
    packet_of,
    parameters_of,
    tree_map_only,
)

Event = Literal["start", "forward", "returned", "backward"]


@dataclass(frozen=True)
class Moment:
    """A stretch of a step, which begins with an event.

    Attributes:
        event: A unit's forward begins, or returns, or its backward begins; or the step does.
        module: The unit's module; the model for the step.
        peak_nbytes: The most bytes of activations and unfinished gradients until the next event.
    """

    event: Event
    module: nn.Module
    peak_nbytes: int


@dataclass(frozen=True)
class FakeRun:
    """What a step has done.

    Attributes:
        moments: Its stretches, in order.
        activation_nbytes: Held when the forward has returned.
        num_flops: Floating-point operations of forward and backward, a multiplication and an
            addition as two.
    """

    moments: tuple[Moment, ...]
    activation_nbytes: int
    num_flops: int


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages from the operation that returns them until they die, and flops.

    Not by torch's `FlopCounterMode`, whose hooks on modules keep graphs that a backward has done.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = self.peak = self.num_flops = 0
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
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if formula := flop_registry.get(packet_of(func)):
            self.num_flops += formula(*args, **kwargs, out_val=result)
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

    The model is as before. If its output has a `loss` that is differentiated, a scalar output is
    too, and of any other the sum of all floating-point tensors in it.

    Args:
        model: On any device.
        policies: The modules that become units, each with its dtypes.
        batch: A tensor, a tuple of arguments, or a dict of keyword arguments.

    Raises:
        ValueError: If nothing in the output depends on parameters, or what the model does depends
            on values, which fake tensors don't have.
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
    return FakeRun(moments, activation_nbytes, run.live.num_flops)


class _Run:
    def __init__(self, model: nn.Module) -> None:
        self.live = _LiveBytes()
        self.is_backward = False
        self._moments: list[tuple[Event, nn.Module]] = []
        self._peaks: list[int] = []
        self._depths: dict[nn.Module, int] = {}

    def note(self, event: Event, module: nn.Module) -> None:
        """Begin a new stretch."""
        if self._moments:
            self._peaks.append(self.live.restart_peak())
        self._moments.append((event, module))

    def finish(self) -> tuple[Moment, ...]:
        """End the last stretch."""
        self._peaks.append(self.live.restart_peak())
        pairs = zip(self._moments, self._peaks, strict=True)
        return tuple(Moment(event, module, peak) for (event, module), peak in pairs)

    @contextmanager
    def watch(self, module: nn.Module, policy: MixedPrecisionPolicy) -> Iterator[None]:
        """Note what a unit does, and cast what goes in and comes out."""

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


@contextmanager
def _fake_values(
    model: nn.Module, policies: Mapping[nn.Module, MixedPrecisionPolicy]
) -> Iterator[Iterable[Tensor]]:
    """Put fake parameters and buffers into the modules, in the dtypes in which they compute.

    Until the end of the backward, which may run parts of the forward again.
    """
    dtypes: dict[Tensor, torch.dtype | None] = {}
    for module in model.modules():  # outer units first: inner ones override
        if module in policies:
            dtypes.update(dict.fromkeys(module.parameters(), policies[module].param_dtype))
    fakes: dict[Tensor, Tensor] = {}
    for each in [*model.parameters(), *model.buffers()]:
        dtype = dtypes.get(each) if each.is_floating_point() else None
        fakes[each] = fake = torch.empty(each.shape, dtype=dtype or each.dtype)
        if isinstance(each, nn.Parameter):
            fakes[each] = nn.Parameter(fake, each.requires_grad)
        if each.requires_grad:
            fakes[each].register_post_accumulate_grad_hook(_drop_gradient)
    places: list[tuple[dict[str, Any], str, Tensor]] = [
        (values, name, tensor)
        for module in model.modules()
        for values in (parameters_of(module), buffers_of(module))
        for name, tensor in values.items()
        if tensor is not None
    ]
    try:
        for values, name, tensor in places:
            values[name] = fakes[tensor]
        yield fakes.values()
    finally:
        for values, name, tensor in places:
            values[name] = tensor


def _fake_like(tensor: Tensor) -> Tensor:
    """Return one as large, on the device of the fake parameters."""
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
