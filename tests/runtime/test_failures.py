"""After an error anywhere in a step, the next step is right without any reset."""

from __future__ import annotations

import copy
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from composable_shard import (
    FlatShard,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    get_handles,
    no_sync,
    unshard_params,
)
from composable_shard.comm import collectives
from composable_shard.comm.algorithms import AllGather, ReduceScatter
from composable_shard.comm.messages import Works, exchange
from composable_shard.comm.order import order_of
from composable_shard.flat_param import full_values, gradients
from composable_shard.flat_param import handle as handle_module
from composable_shard.runtime import backward_pass
from tests.harness.assertions import Planned, assert_equal
from tests.harness.ranks import distributed
from tests.programs.models import (
    CheckpointsBlocks,
    FailingMode,
    Net,
    Tied,
    assert_at_rest,
    assert_is_slice,
    make_net,
    rank_input,
    shard_blocks,
    wait_for_engine,
)


class PlannedInterrupt(BaseException):
    """Like KeyboardInterrupt: it passes by `except Exception`."""


def _fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def _optimizer_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    loss = model(rank_input(4, 5, step=step)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


_NO_POLICY = MixedPrecisionPolicy()


@functools.cache
def _undisturbed_run(
    mp_policy: MixedPrecisionPolicy = _NO_POLICY,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return losses and final parameters of two steps that nothing disturbs."""
    model = make_net(mp_policy=mp_policy)
    optimizer = _fused_adamw(model)
    losses = [_optimizer_step(model, optimizer, step) for step in range(2)]
    return losses, [param.full_tensor() for param in model.parameters()]


def _assert_recovers(
    fail: Callable[[nn.Module], object], error: type[BaseException] = Planned, **options: Any
) -> None:
    """Assert that `fail(model)` after the first step raises, and leaves nothing behind."""
    losses, params = _undisturbed_run(options.get("mp_policy", _NO_POLICY))
    model = make_net(**options)
    optimizer = _fused_adamw(model)
    assert_equal(_optimizer_step(model, optimizer, 0), losses[0], "loss before")
    with pytest.raises(error):
        fail(model)
    wait_for_engine(model)
    # From then on the model shows the parameters that the optimizer holds.
    assert all(isinstance(param, FlatShard) for param in model.parameters())
    optimizer.zero_grad()
    assert_equal(_optimizer_step(model, optimizer, 1), losses[1], "loss after")
    for param, expected in zip(model.parameters(), params, strict=True):
        assert_is_slice(param, expected)
    assert_at_rest(model)


def _forward_and_backward(model: nn.Module) -> None:
    model(rank_input(4, 5, step=7)).square().mean().backward()


def _raising_hook(error: type[BaseException]) -> Callable[..., None]:
    def hook(*_: Any, **__: Any) -> None:
        raise error("planned")

    return hook


@contextmanager
def _hooked(module: nn.Module, position: str, error: type[BaseException]) -> Iterator[None]:
    hook = _raising_hook(error)
    if position == "pre_forward_first":
        handle = module.register_forward_pre_hook(hook, prepend=True)
    elif position == "pre_forward_last":
        handle = module.register_forward_pre_hook(hook)
    elif position == "forward_first":
        handle = module.register_forward_hook(hook, prepend=True)
    elif position == "forward_last":
        handle = module.register_forward_hook(hook)
    else:

        def on_output(*args: Any) -> None:
            args[-1].register_hook(hook)

        handle = module.register_forward_hook(on_output)
    try:
        yield
    finally:
        handle.remove()


_POSITIONS = ["pre_forward_first", "pre_forward_last", "forward_first", "forward_last", "backward"]


@pytest.mark.parametrize("position", _POSITIONS)
@pytest.mark.parametrize("place", ["", "inp", "blocks.0", "blocks.1.up", "blocks.2", "out"])
@distributed(2, on_device=True)
def test_error_in_a_hook_leaves_the_next_step_right(place: str, position: str) -> None:
    """User hooks before and after ours, on units and inside them, and on their outputs."""

    def fail(model: nn.Module) -> None:
        with _hooked(model.get_submodule(place), position, Planned):
            _forward_and_backward(model)

    _assert_recovers(fail)


_MIXED = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, gather_dtype=torch.float16, reduce_dtype=torch.float32
)
POLICIES: dict[str, dict[str, Any]] = {
    "freed": {"reshard_after_forward": True},
    "kept until backward": {"reshard_after_forward": False},
    **{strategy.name: {"strategy": strategy} for strategy in ShardingStrategy},
    **{
        f"{strategy.name}, mixed precision": {"strategy": strategy, "mp_policy": _MIXED}
        for strategy in list(ShardingStrategy)[:3]
    },
    "NO_SHARD, mixed precision": {
        "strategy": ShardingStrategy.NO_SHARD,
        "mp_policy": replace(_MIXED, gather_dtype=None),
    },
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("position", ["forward_last", "backward"])
@distributed(2, on_device=True)
def test_error_leaves_the_next_step_right_with_other_policies(position: str, policy: str) -> None:
    """No stale value is used, kept or not."""

    def fail(model: nn.Module) -> None:
        with _hooked(model.get_submodule("blocks.1"), position, Planned):
            _forward_and_backward(model)

    _assert_recovers(fail, **POLICIES[policy])


@pytest.mark.fast
@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("position", ["pre_forward_last", "forward_first", "backward"])
@distributed(2, on_device=True)
def test_interrupt_leaves_the_next_step_right(position: str, is_checkpointed: bool) -> None:
    """A KeyboardInterrupt passes by the hooks that would have ended the forward."""
    losses, params = _undisturbed_run()
    model: Any = make_net()
    if is_checkpointed:
        model.use_reentrant = False
        model.forward = functools.partial(CheckpointsBlocks.forward, model)
    optimizer = _fused_adamw(model)
    _optimizer_step(model, optimizer, 0)
    with (
        pytest.raises(PlannedInterrupt),
        _hooked(model.get_submodule("blocks.1"), position, PlannedInterrupt),
    ):
        _forward_and_backward(model)
    optimizer.zero_grad()
    assert_equal(_optimizer_step(model, optimizer, 1), losses[1])
    for param, expected in zip(model.parameters(), params, strict=True):
        assert_is_slice(param, expected)
    assert_at_rest(model)


@pytest.mark.parametrize("name", ["inp.weight", "blocks.1.down.bias", "out.bias"])
@distributed(2, on_device=True)
def test_error_in_a_gradient_hook_leaves_the_next_step_right(name: str) -> None:
    """A hook on a parameter runs in the middle of the backward."""

    def fail(model: nn.Module) -> None:
        handle = model.get_parameter(name).register_hook(_raising_hook(Planned))
        try:
            _forward_and_backward(model)
        finally:
            handle.remove()

    _assert_recovers(fail)


class _FailingCall:
    """Stands in for a function and raises at its k-th call."""

    def __init__(self, function: Callable[..., Any], k: int, error: type[BaseException]) -> None:
        self.function, self.k, self.error, self.calls = function, k, error, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, or fail."""
        self.calls += 1
        if self.calls == self.k:
            raise self.error("planned")
        return self.function(*args, **kwargs)


def _fail_every_call(
    monkeypatch: pytest.MonkeyPatch, places: list[Any], name: str, **options: Any
) -> int:
    """Let the k-th call fail for every k of a step; return how many calls a step makes."""
    k = 0
    while True:
        k += 1
        failing = _FailingCall(getattr(places[0], name), k, torch.OutOfMemoryError)

        def fail(model: nn.Module, failing: _FailingCall = failing) -> None:
            with monkeypatch.context() as patch:
                for place in places:  # in a function, which a class makes a method of
                    patch.setattr(place, name, lambda *args, **kwargs: failing(*args, **kwargs))
                _forward_and_backward(model)
            if failing.calls < failing.k:
                raise torch.OutOfMemoryError("there is no k-th call")

        _assert_recovers(fail, torch.OutOfMemoryError, **options)
        if failing.calls < failing.k:
            return failing.calls


@pytest.mark.deadline(240)
@distributed(2, on_device=True, timeout=200)
def test_out_of_memory_in_any_allocation_leaves_the_next_step_right() -> None:
    """The k-th allocation of a unit's storage fails, for every k."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        num_calls = _fail_every_call(
            monkeypatch, [full_values, gradients, handle_module], "alloc_storage"
        )
    assert num_calls >= 7  # at least every gather of a step


_ISSUED_BY: dict[str, tuple[list[Any], str]] = {
    "all_gather": ([AllGather], "start"),
    "reduce_scatter": ([ReduceScatter], "start"),
    "all_reduce": ([collectives], "all_reduce"),
}


@pytest.mark.deadline(240)
@pytest.mark.parametrize("name", _ISSUED_BY)
@distributed(2, timeout=200)
def test_error_in_any_collective_leaves_the_next_step_right(name: str) -> None:
    """The k-th collective fails on all ranks alike, for every k."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        num_calls = _fail_every_call(monkeypatch, *_ISSUED_BY[name])
    assert num_calls >= {"all_gather": 7, "reduce_scatter": 4, "all_reduce": 1}[name]


@distributed(2, on_device=True)
def test_an_error_that_is_kept_leaves_the_next_step_right() -> None:
    """Its traceback keeps alive all that the failed backward knew."""
    kept = []

    def fail(model: nn.Module) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ReduceScatter, "start", _raising_hook(Planned))
            try:
                _forward_and_backward(model)
            except Planned as error:
                kept.append(error)
                raise

    _assert_recovers(fail)
    assert len(kept) == 1


_queue_callback = backward_pass.queue_callback


class _LateEngine:
    """Lets go of its callback late, as an accelerator's thread may that has raised an error."""

    def __init__(self) -> None:
        self._callbacks: list[object] = []

    def queue_callback(self, callback: Callable[[], None]) -> None:
        """Queue it, and keep it for a while."""
        _queue_callback(callback)
        self._callbacks.append(callback)
        threading.Timer(0.3, self._callbacks.clear).start()


@pytest.mark.parametrize("strategy", ShardingStrategy)
@distributed(2)
def test_the_next_step_waits_until_autograd_has_dropped_a_failed_backward(
    strategy: ShardingStrategy,
) -> None:
    """On an accelerator its own thread may do that after backward() has raised."""

    def fail(model: nn.Module) -> None:
        with pytest.MonkeyPatch.context() as patch:
            engine = _LateEngine()
            patch.setattr(backward_pass, "queue_callback", engine.queue_callback)
            with _hooked(model.get_submodule("blocks.1"), "backward", Planned):
                _forward_and_backward(model)

    losses, params = _undisturbed_run()
    model = make_net(strategy=strategy)
    optimizer = _fused_adamw(model)
    assert_equal(_optimizer_step(model, optimizer, 0), losses[0])
    with pytest.raises(Planned):
        fail(model)
    optimizer.zero_grad()
    assert_equal(_optimizer_step(model, optimizer, 1), losses[1])
    for param, expected in zip(model.parameters(), params, strict=True):
        assert_is_slice(param, expected)
    with pytest.raises(Planned):
        fail(model)
    with unshard_params(model):
        assert not any(isinstance(param, FlatShard) for param in model.parameters())
    assert_at_rest(model)


@pytest.mark.deadline(240)
@pytest.mark.parametrize("strategy", list(ShardingStrategy)[1:])
@distributed(2, timeout=200)
def test_error_in_any_collective_leaves_kept_buffers_right(strategy: ShardingStrategy) -> None:
    """What a gather in place, or a reduction in place, left half-done is never used."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            _fail_every_call(monkeypatch, *_ISSUED_BY[name], strategy=strategy)


@distributed(2, on_device=True)
def test_gradients_of_earlier_backwards_survive_an_aborted_one() -> None:
    """What is published stays; the aborted backward's own gradients are dropped as a whole."""
    model = make_net()
    _forward_and_backward(model)
    before = [param.grad.full_tensor() for param in model.parameters()]
    with (
        pytest.raises(Planned),
        _hooked(model.get_submodule("blocks.0"), "backward", Planned),
    ):
        _forward_and_backward(model)
    wait_for_engine(model)
    for param, expected in zip(model.parameters(), before, strict=True):
        assert_is_slice(param.grad, expected)
    _forward_and_backward(model)
    for param, expected in zip(model.parameters(), before, strict=True):
        assert_is_slice(param.grad, 2 * expected)


@distributed(2)
def test_error_on_one_rank_reaches_the_other_within_the_timeout() -> None:
    """The other rank waits for a collective that never comes, for as long as the group allows."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(0)
    model = Net()
    shard_blocks(model, mesh=mesh)
    _forward_and_backward(model)
    begin = time.monotonic()
    if dist.get_rank() == 0:
        with (
            pytest.raises(Planned),
            _hooked(model.get_submodule("blocks.1"), "forward_first", Planned),
        ):
            _forward_and_backward(model)
    else:
        with pytest.raises(RuntimeError, match=r"(?i)time|closed"):
            _forward_and_backward(model)
        assert time.monotonic() - begin < 15
    dist.barrier()  # the other rank's wait must end by the timeout, not by our leaving
    assert all(isinstance(param, FlatShard) for param in model.parameters())


@pytest.mark.fast
@distributed(2)
def test_stepping_during_backward_raises_before_writing() -> None:
    """The gradients are not complete, and the values are still needed."""
    model = make_net()
    optimizer = _fused_adamw(model)
    _forward_and_backward(model)
    before = [param.full_tensor() for param in model.parameters()]
    message = r"parameter '.*' was written while a backward pass that still needs it is running"

    with pytest.raises(RuntimeError, match=message):
        _backward_with(model, optimizer.step)
    for param, expected in zip(model.parameters(), before, strict=True):
        assert_is_slice(param, expected)


def _backward_with(model: nn.Module, action: Callable[[], object]) -> None:
    """Run a step in which `action` happens when the backward has reached the first block."""

    def on_output(*args: Any) -> None:
        args[-1].register_hook(lambda _: action())

    handle = model.get_submodule("blocks.0").register_forward_hook(on_output)
    try:
        _forward_and_backward(model)
    finally:
        handle.remove()


@distributed(2)
def test_writing_between_forward_and_backward_raises_in_backward() -> None:
    """The gradients would be those of other weights."""

    def fail(model: nn.Module) -> None:
        loss = model(rank_input(4, 5)).square().mean()
        with torch.no_grad():
            model.get_parameter("blocks.1.up.weight").mul_(1.0)
        loss.backward()

    _assert_recovers(fail, RuntimeError)
    with pytest.raises(RuntimeError, match=r"unit 'blocks.1' .* between a forward and its"):
        fail(make_net())


@distributed(2)
def test_replaced_parameter_is_refused_by_name_until_it_is_put_back() -> None:
    """Its value would be ignored otherwise."""
    model = make_net()
    originals = dict(model.named_parameters())
    model.out.weight = nn.Parameter(torch.zeros(3, 15))
    with pytest.raises(RuntimeError, match=r"parameter '(out|inp).weight' was replaced"):
        _forward_and_backward(model)
    for name, param in originals.items():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = param
    _forward_and_backward(model)
    assert_at_rest(model)


@distributed(2)
def test_a_tied_parameter_that_was_replaced_is_not_mistaken_for_the_other() -> None:
    """Only the first of the tied ones has a name of its own."""
    model = Tied()
    fully_shard(model)
    model.blocks[1].up.weight = nn.Parameter(torch.zeros(7, 15))
    with pytest.raises(RuntimeError, match=r"'blocks.0.up.weight, or one tied to it' was replaced"):
        _forward_and_backward(model)


@distributed(2)
def test_functional_call_with_other_tensors_is_refused_by_name() -> None:
    """The engine would compute with its own parameters."""
    model = make_net()
    values = {name: torch.zeros(param.shape) for name, param in model.named_parameters()}
    with pytest.raises(RuntimeError, match=r"parameter 'inp.weight' was replaced"):
        torch.func.functional_call(model, values, (rank_input(4, 5),))
    _forward_and_backward(model)
    assert_at_rest(model)


@distributed(2)
def test_ranks_that_shard_differently_get_the_same_error() -> None:
    """The first difference is named, on all ranks alike."""
    torch.manual_seed(0)
    model = Net()
    fully_shard(model.blocks[1], reshard_after_forward=dist.get_rank() == 0)
    fully_shard(model)
    with pytest.raises(RuntimeError, match="the first difference is at parameter") as caught:
        _forward_and_backward(model)
    messages: list[Any] = [None, None]
    dist.all_gather_object(messages, str(caught.value))
    assert messages[0] == messages[1]
    assert "ranks [0]: 'blocks.1.up.weight'" in messages[0]


@distributed(2)
def test_failed_call_leaves_the_module_as_before_and_a_corrected_one_succeeds() -> None:
    """A sparse parameter deep in the tree is found before anything is changed."""
    torch.manual_seed(0)
    model = Net()
    model.blocks[2].count = nn.Parameter(torch.zeros(3).to_sparse(), requires_grad=False)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NotImplementedError, match=r"'blocks.2.count' .* torch.sparse_coo"):
        fully_shard(model)
    assert not get_handles(model)
    assert all(type(param) is nn.Parameter for param in model.parameters())
    for name, value in model.state_dict().items():
        assert_equal(value.to_dense(), before[name].to_dense())
    fully_shard(model, ignored_params={model.blocks[2].count})
    _forward_and_backward(model)
    assert_at_rest_ignoring(model, "blocks.2.count")


def assert_at_rest_ignoring(model: nn.Module, name: str) -> None:
    """Assert that all parameters but one are sharded."""
    kinds = {key: isinstance(param, FlatShard) for key, param in model.named_parameters()}
    assert kinds.pop(name) is False
    assert all(kinds.values())


@pytest.mark.deadline(240)
@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "freed"])
@distributed(2, on_device=True, timeout=200)
def test_error_in_any_operation_leaves_the_next_step_right(policy: str) -> None:
    """Of the model, of autograd and of ours: any of them may run out of memory."""

    def fail(model: nn.Module) -> None:
        with mode:
            _forward_and_backward(model)
        raise torch.OutOfMemoryError("there is no k-th operation")

    # A sample, for each policy another one: all of them would take a minute.
    for k in itertools.count(1 + list(POLICIES).index(policy) * 7 % 48, 48):
        mode = FailingMode(k)
        _assert_recovers(fail, torch.OutOfMemoryError, **POLICIES[policy])
        if mode.calls < k:
            break
    assert k > 100


class _FailingWork:
    """Work that is done, and then raises: the k-th of all that was waited for."""

    def __init__(self, work: Any, counter: _FailingCall) -> None:
        self.work, self.counter = work, counter

    def wait(self) -> None:
        """Wait, or fail after waiting."""
        self.work.wait()
        self.counter()


@pytest.mark.deadline(240)
@pytest.mark.parametrize(
    ("policy", "num_gathers"),
    [
        ("FULL_SHARD", 7),
        ("SHARD_OPTIM", 4),
        ("FULL_SHARD, mixed precision", 7),
        ("SHARD_OPTIM, mixed precision", 4),
    ],
)
@distributed(2, on_device=True, timeout=200)
def test_error_while_waiting_for_any_gather_leaves_the_next_step_right(
    policy: str, num_gathers: int
) -> None:
    """What a gather that failed left in the buffer is never used."""
    start = AllGather.start
    for k in itertools.count(1):
        counter = _FailingCall(lambda: None, k, RuntimeError)

        def fail(model: nn.Module, counter: _FailingCall = counter) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    AllGather, "start", lambda *a, **o: _FailingWork(start(*a, **o), counter)
                )
                _forward_and_backward(model)
            raise RuntimeError("there is no k-th gather")

        _assert_recovers(fail, RuntimeError, **POLICIES[policy])
        if counter.calls < k:
            break
    assert k == num_gathers + 1  # N = 4 units, the root kept


@pytest.mark.parametrize("strategy", list(ShardingStrategy)[:3])
@distributed(2, on_device=True)
def test_error_while_waiting_for_the_use_exchange_drops_all_gradients(
    strategy: ShardingStrategy,
) -> None:
    """It is waited for before any gradient is published."""
    all_reduce = collectives.all_reduce
    counter = _FailingCall(lambda: None, 1, RuntimeError)

    def fail(model: nn.Module) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                collectives,
                "all_reduce",
                lambda *a, **options: _FailingWork(all_reduce(*a, **options), counter),
            )
            try:
                _forward_and_backward(model)
            finally:
                assert counter.calls == 1
                assert all(param.grad is None for param in model.parameters())

    _assert_recovers(fail, RuntimeError, strategy=strategy)


class _FailingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, error: type[BaseException]) -> Tensor:
        """Return the input."""
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Raise."""
        raise ctx.error("planned")


@pytest.mark.parametrize("error", [Planned, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["inp", "blocks.0.up", "blocks.1.down", "blocks.2", "out"])
@distributed(2, on_device=True)
def test_error_in_a_custom_function_leaves_the_next_step_right(
    place: str, error: type[BaseException]
) -> None:
    """In the middle of the root, of a unit, between units; KeyboardInterrupt too."""

    def fail(model: nn.Module) -> None:
        handle = model.get_submodule(place).register_forward_hook(
            lambda *args: _FailingFunction.apply(args[-1], error)
        )
        try:
            _forward_and_backward(model)
        finally:
            handle.remove()

    _assert_recovers(fail, error)


@pytest.mark.parametrize("position", ["pre_forward_last", "forward_first"])
@distributed(2)
def test_interrupted_unit_called_by_itself_uses_new_weights(position: str) -> None:
    """The interrupted call left its full parameters behind; an optimizer has stepped since."""
    model = make_net()
    optimizer = _fused_adamw(model)
    _forward_and_backward(model)
    block = model.blocks[1]
    with pytest.raises(KeyboardInterrupt), _hooked(block, position, KeyboardInterrupt):
        model(rank_input(4, 5))
    optimizer.step()
    plain = Net().blocks[1]
    x = rank_input(4, 15)
    output = block(x)
    with torch.no_grad():
        for (_, param), (name, _) in zip(
            plain.named_parameters(), plain.named_parameters(), strict=True
        ):
            param.copy_(block.get_parameter(name).full_tensor())
    assert_equal(output, plain(x))
    output.sum().backward()
    assert_at_rest(model)


@distributed(2, on_device=True)
def test_error_in_a_forward_inside_a_backward() -> None:
    """Recomputation that fails leaves the next step right."""

    def fail(model: nn.Module) -> None:
        x = model.inp(rank_input(4, 5))
        calls = iter([None, Planned])

        def run(x: Tensor) -> Tensor:
            if error := next(calls):
                raise error
            return model.blocks[0](x)

        checkpoint(run, x, use_reentrant=False).sum().backward()

    def fail_in_root(model: nn.Module) -> None:
        forward, calls = model.blocks[0].forward, iter([None, Planned])

        def run(x: Tensor) -> Tensor:
            if error := next(calls):
                raise error
            return forward(x)

        model.blocks[0].forward = lambda x: checkpoint(run, x, use_reentrant=False)
        try:
            _forward_and_backward(model)
        finally:
            del model.blocks[0].forward

    _assert_recovers(fail_in_root)
    with pytest.raises(RuntimeError):  # `inp` belongs to the root, which was not called
        fail(make_net())


@distributed(2, on_device=True)
def test_error_inside_no_sync_drops_what_it_accumulated() -> None:
    """The aborted backward may have added to some gradients: none of them is used."""

    def fail(model: nn.Module) -> None:
        with no_sync(model):
            _forward_and_backward(model)
            with _hooked(model.get_submodule("blocks.0"), "backward", Planned):
                _forward_and_backward(model)

    _assert_recovers(fail)


@pytest.mark.parametrize("name", ["inp.weight", "blocks.1.down.bias", "out.bias"])
@distributed(2, on_device=True)
def test_error_in_a_post_accumulate_hook_keeps_the_gradients(name: str) -> None:
    """They are complete when such hooks run."""
    model, other = make_net(), make_net()
    _forward_and_backward(other)
    handle = model.get_parameter(name).register_post_accumulate_grad_hook(_raising_hook(Planned))
    with pytest.raises(Planned):
        _forward_and_backward(model)
    handle.remove()
    wait_for_engine(model)
    for param, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert_equal(param.grad.to_local(), expected.grad.to_local())
    assert_at_rest(model)
    _forward_and_backward(model)
    assert_at_rest(model)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("names", [("blocks.0",), ("blocks.2",), ("blocks.0", "blocks.2")])
@distributed(2, on_device=True)
def test_stepping_any_unit_during_backward_raises_before_writing(
    names: tuple[str, ...], options: dict[str, bool]
) -> None:
    """Whether the backward has reached the unit, not reached it, or passed it."""

    def fail(model: nn.Module) -> None:
        params = [p for name in names for p in model.get_submodule(name).parameters()]
        optimizer = torch.optim.SGD(params, lr=1.0, **options)
        before = [param.full_tensor() for param in params]
        _forward_and_backward(model)
        handle = model.blocks[1].register_forward_hook(
            lambda *args: args[-1].register_hook(lambda _: optimizer.step()) and None
        )
        try:
            with pytest.raises(RuntimeError, match="was written while a backward pass"):
                _forward_and_backward(model)
        finally:
            handle.remove()
        for param, expected in zip(params, before, strict=True):
            assert_is_slice(param, expected)
        raise Planned

    _assert_recovers(fail)


@pytest.mark.parametrize("position", ["pre_forward_last", "backward"])
@distributed(2)
def test_allocation_error_on_one_rank_reaches_the_other(position: str) -> None:
    """The rank that ran out of memory issues no more collectives; the other one's waits end."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    torch.manual_seed(0)
    model = Net()
    shard_blocks(model, mesh=DeviceMesh.from_group(group, "cpu"))
    _forward_and_backward(model)
    begin = time.monotonic()
    if dist.get_rank() == 0:
        k = 2 if position == "pre_forward_last" else 7
        failing = _FailingCall(full_values.alloc_storage, k, torch.OutOfMemoryError)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(full_values, "alloc_storage", failing)
            with pytest.raises(torch.OutOfMemoryError):
                _forward_and_backward(model)
    else:
        with pytest.raises(RuntimeError, match=r"(?i)time|closed|not all ranks came"):
            _forward_and_backward(model)
        assert time.monotonic() - begin < 12
    dist.barrier()  # the other rank's wait must end by the timeout, not by our leaving
    assert all(isinstance(param, FlatShard) for param in model.parameters())


class _Group:
    """Notes the tags of messages."""

    group_name = "0"

    def __init__(self) -> None:
        self.tags: list[int] = []

    def send(self, _: list[Tensor], __: int, tag: int) -> Any:
        self.tags.append(tag)
        return Works([], cast(Any, self))

    recv = send


def test_a_new_group_of_the_same_name_is_in_step() -> None:
    """Its ranks need not have communicated equally often in groups that were destroyed."""
    old, new = (cast(Any, _Group()) for _ in range(2))
    for group in (old, old, new, new):
        order = order_of(group)
        order.enter(0)
        exchange([(1, torch.ones(1))], [], group, order).wait()
    assert old.tags[0] != old.tags[1]
    assert new.tags == old.tags


# --- what ranks must agree on ---


def _shard_differently(kind: str) -> nn.Module:
    """Shard a model in a way that differs between ranks."""
    is_first = dist.get_rank() == 0
    model = nn.Sequential(nn.Linear(7, 15), nn.Sequential(nn.Linear(15, 15), nn.Linear(15, 7)))
    if kind == "shape" and is_first:
        model[0] = nn.Linear(15, 7)
    elif kind == "dtype" and is_first:
        model[0].double()
    elif kind == "requires_grad" and is_first:
        model[0].requires_grad_(False)
    elif kind == "missing" and is_first:
        model[0].register_parameter("bias", None)
    elif kind == "units" and is_first:
        fully_shard(model[1][0])
        fully_shard(model[1][1])
    elif kind == "unit_lists" and is_first:
        fully_shard([model[0], model[1]])
    elif kind == "unit_lists":
        fully_shard(model[0])
        fully_shard(model[1])
    elif kind == "policy":
        fully_shard(model[1], reshard_after_forward=is_first)
    return fully_shard(model)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("shape", "0.weight"),
        ("dtype", "0.weight"),
        ("requires_grad", "0.weight"),
        ("missing", "0.bias"),
        ("units", "1.0.weight"),
        ("unit_lists", "1.0.weight"),
        ("policy", "1.0.weight"),
    ],
)
@distributed(2, 3)
def test_difference_between_ranks_is_named_on_all_of_them(kind: str, name: str) -> None:
    """The error comes before anything can hang, and is the same everywhere."""
    model = _shard_differently(kind)
    with pytest.raises(RuntimeError, match="the first difference is at parameter") as caught:
        model(torch.ones(2, 7))
    messages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, str(caught.value))
    assert len(set(messages)) == 1
    assert f"'{name}'" in messages[0]
    fully_shard(nn.Linear(7, 7), check_initial_values=False)(torch.ones(2, 7))  # alike: right


# --- the meta device ---


@distributed(2)
def test_parameters_on_the_meta_device_are_named() -> None:
    """After the error they can be materialised, and the model works."""
    with torch.device("meta"):
        model = Net()
    shard_blocks(model)
    with pytest.raises(RuntimeError, match=r"parameters \['inp.weight', .* on the meta device"):
        model(rank_input(4, 5))
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    _forward_and_backward(model)
    assert_at_rest(model)


@distributed(2)
def test_buffers_without_values_are_named() -> None:
    """A buffer that `to_empty` made and nobody wrote; once written, the model works."""
    with torch.device("meta"):
        model = Net()
        model.blocks[1].register_buffer("scale", torch.ones(3), persistent=False)
    shard_blocks(model)
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    with pytest.raises(RuntimeError, match=r"buffers \['blocks.1.scale'\] were never initialised"):
        model(rank_input(4, 5))
    model.blocks[1].scale.fill_(1.0)
    _forward_and_backward(model)
    assert_at_rest(model)
