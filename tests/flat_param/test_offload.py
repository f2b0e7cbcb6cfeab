"""Offload: parameters, gradients and optimizer state in host memory, by numbers and bytes.

The device is the CPU here; copies to and from the host are run late, when they are waited for.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from composable_shard import (
    FlatParamHandle,
    FlatShard,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    clip_grad_norm_,
    fully_shard,
    get_handles,
    lazy_init,
    no_sync,
    register_flat_param,
    register_orig_params,
    reshard,
    set_is_last_backward,
    shard_model,
    shard_optimizer_state,
    unshard,
    unshard_params,
    writeback,
)
from composable_shard.comm.devices import HOST, HostCopies
from composable_shard.comm.groups import ShardGroup
from composable_shard.comm.trace import count_collectives
from composable_shard.flat_param import memory
from composable_shard.flat_param.host_gradient import HostGradient
from composable_shard.tensor import WriteGuard, set_gradient
from tests.harness.assertions import Planned, assert_equal
from tests.harness.memory import peak_bytes
from tests.harness.pairs import pairwise
from tests.harness.ranks import device, distributed
from tests.programs.models import (
    Net,
    assert_at_rest,
    loss_of,
    make_net,
    rank_input,
    replica_mesh,
    shard_blocks,
    wait_for_engine,
)

FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM, NO_SHARD = ShardingStrategy
STRATEGIES = list(ShardingStrategy)
PARAMS, STATE = OffloadPolicy(params=True), OffloadPolicy(optim_state=True)
POLICIES = {"params": PARAMS, "state": STATE}
BF16, F32 = torch.bfloat16, torch.float32


class LateCopies(HostCopies):
    """Runs a copy to the host, and all earlier ones, when somebody waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._queue: list[tuple[Tensor, Tensor]] = []
        self._num_done = 0

    def _start(self, target: Tensor, source: Tensor) -> int:
        self._queue.append((target, source))
        return self._num_done + len(self._queue)

    def _finish(self, event: int) -> None:
        while self._num_done < event:
            target, source = self._queue.pop(0)
            target.copy_(source)
            self._num_done += 1

    def is_done(self, event: int) -> bool:
        return event <= self._num_done

    copy_to_host = _start  # type: ignore[assignment]

    def copy_to_device(self, target: Tensor, host: Tensor) -> int:
        target.copy_(host)  # in the order of the device
        return 0

    wait_on_device = wait_on_host = _finish


@contextmanager
def _late_copies(**patches: Any) -> Iterator[None]:
    """Delay copies; patch `HostGradient` too."""
    with pytest.MonkeyPatch.context() as patch:
        if device().type == HOST.type:  # a device's are late by themselves
            patch.setattr(memory, "copies_for", LateCopies)
        for name, value in patches.items():
            patch.setattr(HostGradient, name, value)
        yield


def _make_offloaded(policy: OffloadPolicy | None = None, **options: Any) -> Net:
    return make_net(2, offload_policy=policy or OffloadPolicy(), **options)


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Any:
    loss = loss_of(model, step)
    loss.backward()
    optimizer.step()
    return loss


def _accumulating(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Any:
    for part in range(3):
        loss_of(model, 10 * step + part).backward()
    optimizer.step()


def _unsynchronised(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Any:
    loss_of(model, 10 * step).backward()
    with no_sync(model):
        loss_of(model, 10 * step + 1).backward()
    loss_of(model, 10 * step + 2).backward()
    optimizer.step()


def _deferred(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Any:
    set_is_last_backward(model, False)
    loss_of(model, 10 * step).backward()
    set_is_last_backward(model, True)
    loss_of(model, 10 * step + 1).backward()
    optimizer.step()


def _clipped(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Any:
    for part in range(2):
        loss_of(model, 10 * step + part).backward()
    norm = clip_grad_norm_(model, 0.1)
    optimizer.step()
    return norm


def _partly_frozen(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Any:
    model.blocks.requires_grad_(step % 2 == 0)
    return _plain_step(model, optimizer, step)


def _with_scope(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Any:
    loss_of(model, step).backward()
    with unshard_params(model, with_grads=True), torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
            param.grad.mul_(2)
    optimizer.step()
    with unshard_params(model, rank0_only=True, with_grads=True), torch.no_grad():
        for param in model.parameters() if dist.get_rank() == 0 else ():
            param.add_(0.25)
    with unshard_params(model, writeback=False, offload_to_cpu=True, rank0_only=True):
        pass
    return torch.cat([p.full_tensor().flatten() for p in model.parameters()])


def _by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Any:
    unshard(model, recurse=True)
    with torch.no_grad():
        model.inp.weight.mul_(0.5)
        model.blocks[0].up.weight.add_(1)
    writeback(model, recurse=True)
    reshard(model, recurse=True)
    return _plain_step(model, optimizer, step)


STEPS: dict[str, Callable[..., Any]] = {
    "plain": _plain_step,
    "accumulation": _accumulating,
    "no_sync": _unsynchronised,
    "clip": _clipped,
    "frozen": _partly_frozen,
    "scope": _with_scope,
    "by hand": _by_hand,
}


def _train_with(model: Net, step: Callable[..., Any], num_steps: int = 2) -> list[Tensor]:
    """Return all that can be compared: what each step returns, this rank's gradients, parameters.

    The ranks of two models cut them in the same places.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    seen = []
    for number in range(num_steps):
        optimizer.zero_grad(set_to_none=number != 1)
        result = step(model, optimizer, number)
        seen += [] if result is None else [result.detach()]
        for param in model.parameters():
            seen += [] if param.grad is None else [param.grad.to_local().clone()]
    return seen + [param.to_local().clone() for param in model.parameters()]


def _assert_same_lists(actual: list[Tensor], expected: list[Tensor]) -> None:
    __tracebackhide__ = True
    assert len(actual) == len(expected)
    for number, pair in enumerate(zip(actual, expected, strict=True)):
        assert_equal(*(each.cpu() for each in pair), f"tensor {number}")


def _device_addresses(handle: FlatParamHandle) -> set[int]:
    """Return the addresses of device storages of a handle."""
    found = [handle.unsharded, handle.grads._memory.buffer, handle.grads._memory.result]
    found += [] if handle.shard.device_copy is None else [handle.shard.device_copy]
    storages = [tensor.untyped_storage() for tensor in found]
    return {each.data_ptr() for each in storages if each.nbytes()}


def _assert_on_host(model: nn.Module) -> None:
    """Assert that shards and gradients are not in the memory that stands for the device's."""
    there = set().union(*map(_device_addresses, get_handles(model)))
    for param in model.parameters():
        assert param.to_local().untyped_storage().data_ptr() not in there
        if param.grad is not None:
            assert param.grad.to_local().untyped_storage().data_ptr() not in there


# --- numbers ---


@pytest.mark.parametrize(*pairwise(step=STEPS, strategy=STRATEGIES, policy=POLICIES))
@distributed(2, on_device=True)
def test_every_kind_of_step_equals_the_one_without_offload(
    step: str, strategy: ShardingStrategy, policy: str
) -> None:
    """Bitwise, though no copy runs before somebody waits for it."""
    expected = _train_with(_make_offloaded(strategy=strategy), STEPS[step])
    with _late_copies():
        model = _make_offloaded(POLICIES[policy], strategy=strategy)
        _assert_same_lists(_train_with(model, STEPS[step]), expected)
    _assert_on_host(model)
    assert_at_rest(model)


MIXED = {
    "compute": MixedPrecisionPolicy(param_dtype=BF16),
    "reduce": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32),
    "wire": MixedPrecisionPolicy(gather_dtype=BF16),
    "main": MixedPrecisionPolicy(main_dtype=torch.float64, param_dtype=F32, reduce_dtype=BF16),
}
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"mp_policy": policy} for name, policy in MIXED.items()},
    "flat": {"use_orig_params": False},
    "flat compute": {"use_orig_params": False, "mp_policy": MIXED["compute"]},
}


@pytest.mark.parametrize(*pairwise(options=OPTIONS, strategy=STRATEGIES, policy=POLICIES))
@distributed(2)
def test_other_options_keep_their_meaning(
    options: str, strategy: ShardingStrategy, policy: str
) -> None:
    """Dtypes, and one flat parameter instead of many, under every strategy."""
    given = {"strategy": strategy, **OPTIONS[options]}
    expected = _train_with(_make_offloaded(**given), _clipped)
    with _late_copies():
        model = _make_offloaded(POLICIES[policy], **given)
        _assert_same_lists(_train_with(model, _clipped), expected)
    _assert_on_host(model)


@distributed(4)
def test_meshes_with_copies_and_small_groups() -> None:
    """An all-reduce of the shard, at once or put off, comes before the copy to the host."""
    mesh = replica_mesh(2, 2)
    cases: list[dict[str, Any]] = [{"strategy": s, "mesh": mesh} for s in STRATEGIES]
    cases += [{"reshard_after_forward": 2}, {"mesh": replica_mesh(4, 1)}]
    policies = itertools.cycle(POLICIES.values())  # in turn: each with each step
    for options in cases:
        for step in (_deferred, _with_scope)[: 1 + ("mesh" in options)]:
            expected = _train_with(_make_offloaded(**options), step)
            with _late_copies():
                model = _make_offloaded(next(policies), **options)
                _assert_same_lists(_train_with(model, step), expected)
        next(policies)


@distributed(1)
def test_one_rank_alone_offloads_too() -> None:
    """Where nothing is gathered or reduced, autograd's own gradients are copied."""
    for options in ({}, OPTIONS["compute"], OPTIONS["flat"]):
        for step in (_accumulating, _with_scope, _by_hand)[: 1 if "mp_policy" in options else 3]:
            expected = _train_with(_make_offloaded(**options), step)
            for policy in POLICIES.values():
                with _late_copies():
                    model = _make_offloaded(policy, **options)
                    _assert_same_lists(_train_with(model, step), expected)
                _assert_on_host(model)


@distributed(2)
def test_gradients_that_were_dropped_in_part_do_not_share_memory_with_what_comes() -> None:
    """`.grad = None` for some parameters between the backward passes of one step."""

    def run(model: Net) -> list[Tensor]:
        for number in range(4):
            loss_of(model, number).backward()
            if number == 0:
                model.inp.weight.grad = None
        return [param.grad.full_tensor() for param in model.parameters()]

    with _late_copies():
        _assert_same_lists(run(_make_offloaded(PARAMS)), run(_make_offloaded()))


@pytest.mark.fast
@distributed(2)
def test_units_with_and_without_offload_mix() -> None:
    """One clip and one optimizer for shards that lie here and there."""

    def mixed() -> Net:
        torch.manual_seed(0)
        model = Net(2)
        for block, policy in zip(model.blocks, (PARAMS, STATE), strict=True):
            fully_shard(block, offload_policy=policy)
        return fully_shard(model)

    with _late_copies():
        _assert_same_lists(_train_with(mixed(), _clipped), _train_with(_make_offloaded(), _clipped))


# --- who waits for what ---


def _never(*_: Any) -> None:
    """Stand in for a wait that was forgotten."""


@distributed(2)
def test_without_the_wait_that_guards_the_optimizer_the_numbers_are_wrong() -> None:
    """The race of pytorch#180666, seen by the numbers: the test above can fail."""
    for strategy in STRATEGIES:
        expected = _train_with(_make_offloaded(strategy=strategy), _plain_step)
        with _late_copies(wait=_never):
            actual = _train_with(_make_offloaded(PARAMS, strategy=strategy), _plain_step)
        assert any(not torch.equal(*pair) for pair in zip(actual, expected, strict=True))


@distributed(2, on_device=True)
def test_gradients_are_complete_for_an_optimizer_in_the_backward() -> None:
    """A post-accumulate hook steps on what `.grad` holds, unit by unit."""

    def run(model: Net) -> list[Tensor]:
        optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

        def step(param: Tensor) -> None:
            optimizers[param].step()
            param.grad = None

        for param in optimizers:
            param.register_post_accumulate_grad_hook(step)
        for number in range(3):
            loss_of(model, number).backward()
        return [param.full_tensor() for param in model.parameters()]

    for strategy in (FULL_SHARD, SHARD_OPTIM):
        with _late_copies():
            actual = run(_make_offloaded(PARAMS, strategy=strategy))
        _assert_same_lists(actual, run(_make_offloaded(strategy=strategy)))


class _LoggedCopies(HostCopies):
    """Notes which copies are waited for on the host."""

    def __init__(self, device: torch.device) -> None:
        self.waited: list[str] = []

    def copy_to_device(self, target: Tensor, host: Tensor) -> Any:
        target.copy_(host)
        return "to device"

    def copy_to_host(self, host: Tensor, source: Tensor) -> Any:
        host.copy_(source)
        return "to host"

    def wait_on_host(self, event: Any) -> None:
        self.waited.append(event)


@distributed(2)
def test_a_write_to_a_shard_waits_for_the_copies_that_read_it() -> None:
    """A forward without backward leaves copies to the device under way when Python goes on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "copies_for", _LoggedCopies)
        model = _make_offloaded(PARAMS)
        with torch.no_grad():
            model(rank_input(4, 5))
            waited = [handle.shard.copies.waited for handle in get_handles(model)]
            assert not any(waited)
            model.blocks[0].up.weight.mul_(2)
            assert [len(each) for each in waited].count(1) == 1
            with unshard_params(model):
                pass
            assert all(waited)


def test_a_guard_waits_for_each_copy_once() -> None:
    """Copies that nobody waited for do not pile up."""
    guard, waited = WriteGuard(), []
    for number in range(9):
        guard.add_read(partial(waited.append, number))
    assert waited == list(range(5))
    guard.note_write("p")
    guard.note_write("p")
    assert sorted(waited) == list(range(9))


@distributed(2)
def test_memory_of_a_reduction_waits_for_its_copy_before_it_is_written_again() -> None:
    """Under SHARD_OPTIM a second round of a backward packs into what is being copied."""
    _assert_rounds_agree(expect_equal=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostGradient, "reuse_sources", _never)
        _assert_rounds_agree(expect_equal=False)


def _assert_rounds_agree(*, expect_equal: bool) -> None:
    results = []
    for policy in (OffloadPolicy(), PARAMS):
        with _late_copies():
            model = _make_offloaded(policy, strategy=SHARD_OPTIM)
            (handle,) = [h for h in get_handles(model.blocks[0])]
            lazy_init(model)
            for value in (1.0, 2.0):
                # What a late gradient does: pack, reduce, and pack again before publishing.
                for index, entry in enumerate(handle.entries):
                    set_gradient(entry.unsharded, torch.full(entry.spec.shape, value))
                    handle.grads.pack(index, may_overwrite=False)
                context = fully_shard.state(model.blocks[0]).context
                handle.grads.issue(None, context.scratch, keeps_values=False, is_deferred=False)
                handle.grads.add_result()
            handle.grads.publish([True] * len(handle.entries))
            results.append([entry.sharded.grad.full_tensor() for entry in handle.entries])
    is_equal = all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert is_equal is expect_equal


# --- memory ---


def _shard_nbytes(model: nn.Module) -> int:
    return sum(handle.local_shard.nbytes for handle in get_handles(model))


def _gradient_nbytes(hosts: Iterable[Any]) -> int:
    return sum(buffer.nbytes for host in hosts for buffer in host._memory)


def _device_nbytes(model: nn.Module) -> int:
    handles = get_handles(model)
    held = [h.unsharded for h in handles] + [
        h.shard.device_copy for h in handles if h.shard.device_copy is not None
    ]
    held += [
        t for h in get_handles(model) for t in (h.grads._memory.buffer, h.grads._memory.result)
    ]
    return sum(tensor.untyped_storage().size() for tensor in held)


@pytest.mark.parametrize("policy", POLICIES)
@distributed(2)
def test_at_rest_the_device_holds_nothing_or_a_copy_of_the_shard(policy: str) -> None:
    """FULL_SHARD: parameters, gradients and state are on the host, each once."""
    model = _make_offloaded(POLICIES[policy])
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        _plain_step(model, optimizer, step)
    shard_nbytes = _shard_nbytes(model)
    assert _device_nbytes(model) == (0 if policy == "params" else shard_nbytes)
    assert _gradient_nbytes(h.grads.host for h in get_handles(model)) == shard_nbytes
    assert all(h.grads.reduced is None and not h.grads.host._in_flight for h in get_handles(model))


@distributed(2)
def test_host_memory_is_allocated_once() -> None:
    """S0.5: The first backward allocates gradients, the first that adds to some a second buffer."""
    model = _make_offloaded(PARAMS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lazy_init(model)
    nbytes, growth = _shard_nbytes(model), []
    hosts = [handle.grads.host for handle in get_handles(model)]
    addresses = set()
    for step in range(3):
        _accumulating(model, optimizer, step)
        addresses.add(tuple(b.data_ptr() for host in hosts for b in host._memory))
        growth.append(_gradient_nbytes(hosts))
        optimizer.zero_grad()
    assert growth == [2 * nbytes] * 3
    assert len(addresses) == 1


class _TwoEqualUnits(nn.Module):
    """Two equal units, larger than all else a step needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 256, bias=False) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x).sum() + self.layers[1](x).sum()


@distributed(2)
def test_a_step_keeps_no_memory() -> None:
    """Counted bytes: a step frees what it allocates, which is no more than without offload."""
    peaks = []
    for policy in (OffloadPolicy(), PARAMS):
        model = _TwoEqualUnits()
        for layer in model.layers:
            fully_shard(layer, offload_policy=policy)
        optimizer = torch.optim.SGD(fully_shard(model).parameters(), lr=0.1)
        _wide_step(model, optimizer)
        with peak_bytes() as memory:
            _wide_step(model, optimizer)
        assert memory.current <= 2  # the last flags that ranks exchanged, on their way
        peaks.append(memory.peak)
        with count_collectives() as log:
            _wide_step(model, optimizer)
        assert (log.count("all_gather"), log.count("reduce_scatter")) == (4, 2)
    assert peaks[1] <= peaks[0]


def _wide_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 64)).backward()
    optimizer.step()
    optimizer.zero_grad()


@distributed(2)
def test_a_device_copy_of_the_shard_is_renewed_once_for_each_step() -> None:
    """What the second policy is for: forward and backward gather from device memory."""
    counts = {}
    for name, policy in POLICIES.items():
        copied: list[int] = []

        class Counting(HostCopies):
            def copy_to_device(
                self, target: Tensor, host: Tensor, copied: list[int] = copied
            ) -> Any:
                copied.append(host.numel())
                return super().copy_to_device(target, host)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "copies_for", lambda _, kind=Counting: kind())
            model = _make_offloaded(policy, reshard_after_forward=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            _accumulating(model, optimizer, 0)
            counts[name] = len(copied)
    assert counts == {"params": 3 * 2 * 3, "state": 3}


# --- life of a module ---


@pytest.mark.parametrize("policy", POLICIES)
@distributed(2, on_device=True)
def test_copies_and_conversions_stay_offloaded(policy: str) -> None:
    """deepcopy, `.to(dtype)` and back, with equal training afterwards."""
    changes: list[Callable[[nn.Module], nn.Module]] = [
        copy.deepcopy,
        lambda model: model.double().float(),
    ]
    for change in changes:
        models = [_make_offloaded(), _make_offloaded(POLICIES[policy])]
        for model in models:
            _train_with(model, _plain_step, 1)
        models = [change(model) for model in models]
        assert all(h.memory.offload == POLICIES[policy] for h in get_handles(models[1]))
        assert all(h.shard.is_offloaded for h in get_handles(models[1]))
        expected, actual = (_train_with(model, _accumulating, 1) for model in models)
        _assert_same_lists(actual, expected)
        _assert_on_host(models[1])


@distributed(2)
def test_a_model_from_the_meta_device() -> None:
    """`to_empty(device="cpu")` gives the shards host memory; without it the error says so."""

    def make(policy: OffloadPolicy) -> Net:
        with torch.device("meta"):
            model = Net()
        shard_blocks(model, offload_policy=policy)
        return model

    models = [make(OffloadPolicy()), make(PARAMS)]
    with pytest.raises(RuntimeError, match=r"meta device. Call model.to_empty\(device='cpu'\) and"):
        lazy_init(models[1])
    for model in models:
        model.to_empty(device="cpu")
        torch.manual_seed(3)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
    expected, actual = (_train_with(model, _accumulating) for model in models)
    _assert_same_lists(actual, expected)
    _assert_on_host(models[1])


@distributed(2)
def test_gradients_move_between_both_forms_on_the_host() -> None:
    """register_flat_param and back between backward passes."""

    def run(model: Net) -> list[Tensor]:
        loss_of(model, 0).backward()
        register_flat_param(model)
        loss_of(model, 1).backward()
        register_orig_params(model)
        loss_of(model, 2).backward()
        return [param.grad.full_tensor() for param in model.parameters()]

    with _late_copies():
        model = _make_offloaded(PARAMS)
        _assert_same_lists(run(model), run(_make_offloaded()))
    _assert_on_host(model)


def _raise_planned(_: Tensor) -> None:
    raise Planned


def _fail_in_backward(module: nn.Module, args: Any, output: Tensor) -> None:
    output.register_hook(_raise_planned)


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2, on_device=True)
def test_after_an_aborted_backward_training_goes_on(strategy: ShardingStrategy) -> None:
    """Copies that were under way are dropped as a whole, published gradients stay."""

    def run(model: Net) -> list[Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        seen = []
        for number in range(3):
            loss_of(model, number).backward()
            hook = model.blocks[0].register_forward_hook(_fail_in_backward)
            with pytest.raises(Planned):
                loss_of(model, 7).backward()
            hook.remove()
            wait_for_engine(model)
            loss_of(model, 10 + number).backward()
            seen += [param.grad.full_tensor() for param in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    expected = run(_make_offloaded(strategy=strategy))
    for policy in POLICIES.values():
        with _late_copies():
            model = _make_offloaded(policy, strategy=strategy)
            _assert_same_lists(run(model), expected)
        assert_at_rest(model)


@distributed(2)
def test_a_copy_that_fails_leaves_the_unit_as_it_was() -> None:
    """The next step works, and equals one without the failure."""
    for name in ("copy_to_device", "copy_to_host"):
        with _late_copies():
            model = _make_offloaded(PARAMS)
            expected = _train_with(_make_offloaded(PARAMS), _plain_step)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(LateCopies, name, lambda *_: _raise_planned(_[1]))
                with pytest.raises(Planned):
                    loss_of(model).backward()
            _assert_same_lists(_train_with(model, _plain_step), expected)


# --- errors ---


def test_fields_of_a_policy_are_flags_of_which_one_implies_another() -> None:
    """An optimizer makes its state where the parameters are."""
    with pytest.raises(ValueError, match="expected params to be True or False, got 'cpu'"):
        OffloadPolicy(params="cpu")  # type: ignore[arg-type] # the point of the test
    assert OffloadPolicy() == OffloadPolicy(False, False)
    assert OffloadPolicy(params=True) == OffloadPolicy(True, True)
    with pytest.raises(ValueError, match="an optimizer steps where its parameters are"):
        OffloadPolicy(params=True, optim_state=False)
    assert not OffloadPolicy().is_active
    assert PARAMS.is_active
    assert STATE.is_active


@distributed(2)
def test_a_wrong_value_changes_nothing() -> None:
    """Checked up front by both functions."""
    model = Net()
    for shard in (fully_shard, partial(shard_model, rules=[])):
        with pytest.raises(ValueError, match="expected offload_policy to be a composable_shard"):
            shard(model, offload_policy=True)
    assert not any(isinstance(param, FlatShard) for param in model.parameters())
    shard_model(model, [("blocks.*", {"offload_policy": STATE})], offload_policy=PARAMS)
    assert {handle.memory.offload for handle in get_handles(model)} == {PARAMS, STATE}


@distributed(2)
def test_ranks_that_disagree_raise() -> None:
    """The policy is part of what the ranks compare."""
    model = _make_offloaded(PARAMS if dist.get_rank() else STATE)
    with pytest.raises(RuntimeError, match=r"offload_policy=OffloadPolicy\(params=False"):
        lazy_init(model)


@distributed(2)
def test_a_shard_on_another_device_is_named() -> None:
    """S0.5: As after `model.cuda()`; the remedy works."""
    model = _make_offloaded(PARAMS)
    expected = _train_with(_make_offloaded(), _plain_step)
    kept = {param: param._local for param in model.parameters()}
    with FakeTensorMode(allow_non_fake_inputs=True):
        for param, local in kept.items():
            param._local = torch.empty(local.shape, device="cuda")
    with pytest.raises(
        RuntimeError,
        match=r"'inp\.weight' of unit 'Net' on the CPU.*got cuda:0.*Call model.cpu\(\)",
    ):
        loss_of(model)
    for param, local in kept.items():
        param._local = local.clone()
    _assert_same_lists(_train_with(model, _plain_step), expected)


@distributed(2)
def test_state_made_before_sharding_goes_to_the_host() -> None:
    """shard_optimizer_state puts it where the parameter is."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    shard_blocks(model, offload_policy=PARAMS)
    shard_optimizer_state(optimizer)
    for param in model.parameters():
        assert optimizer.state[param]["sum"].device == param.device


def test_groups_for_an_accelerator_only_are_refused() -> None:
    """Norms of gradients on the host need a backend for the CPU."""

    class Group:
        group_name = "dp"

        def _get_backend(self, device: torch.device) -> None:
            raise RuntimeError(f"no backend for {device}")

    group: Any = ShardGroup(Group(), 0, 2, torch.device("cuda:0"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'dp' is for cuda only. Call init_process_group\('cpu:g"):
        group.check_host_collectives()


# --- on a GPU ---


def _init_single(tmp_path: Any) -> None:
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_on_a_gpu_shards_and_gradients_are_pinned(policy: str, tmp_path: Any) -> None:
    """S0.5: Shards, gradients and state on the host; the unit computes on the GPU."""
    _init_single(tmp_path)
    try:
        model = _make_offloaded(POLICIES[policy])
        optimizer = torch.optim.AdamW(model.parameters())
        loss = model(rank_input(4, 5).cuda()).square().mean()
        loss.backward()
        optimizer.step()
        assert loss.is_cuda
        for handle in get_handles(model):
            assert handle.local_shard.is_pinned()
            assert handle.grads.host.memory.is_pinned()
            assert handle.unsharded.is_cuda
        for param in model.parameters():
            assert {param.device.type, param.grad.device.type} == {"cpu"}
            assert optimizer.state[param]["exp_avg"].device.type == "cpu"
        model.cuda()
        with pytest.raises(RuntimeError, match=r"got cuda:0.*Call model.cpu\(\)"):
            model(rank_input(4, 5).cuda())
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_on_a_gpu_the_optimizer_reads_complete_gradients(policy: str, tmp_path: Any) -> None:
    """Large units, steps at once after backward, and forwards without one: equal to no overlap."""
    _init_single(tmp_path)
    try:
        results = []
        for is_blocking in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6)))
            for layer in model:
                fully_shard(layer, offload_policy=POLICIES[policy])
            optimizer = torch.optim.SGD(fully_shard(model).parameters(), lr=0.1, momentum=0.9)
            for step in range(5):
                torch.manual_seed(step)
                x = torch.randn(512, 2048, device="cuda")
                model(x).square().mean().backward()
                if is_blocking:
                    torch.cuda.synchronize()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    model(x)
                    if is_blocking:
                        torch.cuda.synchronize()
                    for param in model.parameters():
                        param.mul_(0.99)
            results.append([param.detach().to_local().clone() for param in model.parameters()])
        _assert_same_lists(*results)
    finally:
        dist.destroy_process_group()
