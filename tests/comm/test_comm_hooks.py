"""Hooks that replace a unit's reduction, and sums of low-precision terms."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_shard import (
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    get_handles,
    no_sync,
    register_comm_hook,
    set_gradient_divide_factor,
    set_requires_all_reduce,
)
from composable_shard.comm import (
    ReductionStage,
    algorithms,
    devices,
)
from composable_shard.comm.order import order_of
from composable_shard.comm.trace import count_collectives
from tests.harness.assertions import Planned, assert_equal
from tests.harness.ranks import distributed
from tests.programs.models import (
    assert_at_rest,
    loss_of,
    make_net,
    rank_input,
    wait_for_engine,
)

FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM, NO_SHARD = ShardingStrategy
STRATEGIES = list(ShardingStrategy)
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


class _PlainHook:
    """Does what the library does by default, by way of torch's own functions.

    Attributes:
        stages: What it was called with.
    """

    def __init__(self, *, is_async: bool = False) -> None:
        self.is_async = is_async
        self.stages: list[ReductionStage] = []

    def __call__(self, state: Any, stage: ReductionStage) -> Any:
        assert not torch.is_grad_enabled()
        self.stages.append(stage)
        if state is not None:
            state.append(stage.kind)
        if stage.kind == "all_reduce":
            assert stage.output is stage.gradient
            if self.is_async:
                return dist.all_reduce(stage.gradient, group=stage.group, async_op=True)
            stage.output.copy_(_sum_of(stage.gradient, stage.group))
            return None
        assert stage.gradient.numel() == stage.output.numel() * stage.group.size()
        # In rank order, as the library does it, in the output's precision.
        parts = [torch.empty_like(stage.gradient) for _ in range(stage.group.size())]
        dist.all_gather(parts, stage.gradient, group=stage.group)
        own = slice(*(stage.output.numel() * (stage.group.rank() + i) for i in (0, 1)))
        stage.output.copy_(parts[0][own])
        for part in parts[1:]:
            stage.output.add_(part[own])
        return None


def _train_and_collect(model: nn.Module, num_steps: int = 2) -> tuple[list[Tensor], list[Tensor]]:
    """Return losses and final parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(num_steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    assert_at_rest(model)
    return losses, [param.full_tensor() for param in model.parameters()]


def _assert_same_values(ours: Any, expected: Any, *, is_bitwise: bool = True) -> None:
    for some, others in zip(ours, expected, strict=True):
        for one, other in zip(some, others, strict=True):
            if is_bitwise:
                assert_equal(one, other)
            else:
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "reduced in bf16": MixedPrecisionPolicy(reduce_dtype=BF16),
    "reduced in fp16": MixedPrecisionPolicy(reduce_dtype=F16),
    "bf16, reduced in fp32": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32),
}

# --- the hook's contract ---


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(3)
def test_a_hook_that_sums_trains_as_the_default(strategy: ShardingStrategy, policy: str) -> None:
    """Also with a divide factor: the library divides."""
    seen = []
    for hook in (None, _PlainHook()):
        model = make_net(strategy=strategy, mp_policy=POLICIES[policy])
        set_gradient_divide_factor(model, 3.5)
        if hook is not None:
            register_comm_hook(model, hook)
        seen.append(_train_and_collect(model))
        if hook is None:
            continue
        num_handles = len(get_handles(model))
        assert len(hook.stages) == 2 * num_handles
        kinds = {stage.kind for stage in hook.stages}
        assert kinds == {"all_reduce" if strategy is NO_SHARD else "reduce_scatter"}
        assert len({stage.key for stage in hook.stages}) == num_handles
        for stage in hook.stages:
            assert stage.gradient.dtype == (POLICIES[policy].reduce_dtype or F32)
    _assert_same_values(*seen)


@pytest.mark.parametrize(
    ("strategy", "shape", "is_async"),
    [
        (FULL_SHARD, (2, 2), True),
        (FULL_SHARD, (4, 1), False),
        (SHARD_GRAD_OP, (2, 2), False),
        (SHARD_OPTIM, (2, 2), True),
    ],
)
@distributed(4)
def test_a_hook_does_both_stages_of_a_2d_mesh(
    strategy: ShardingStrategy, shape: tuple[int, int], is_async: bool
) -> None:
    """Each with its own group; the second one is put off where the user says so."""
    mesh = init_device_mesh("cpu", shape)
    seen = []
    for hook in (None, _PlainHook(is_async=is_async)):
        model = make_net(strategy=strategy, mesh=mesh)
        calls: list[str] = []
        if hook is not None:
            register_comm_hook(model, hook, calls)
        num_handles = len(get_handles(model))
        set_requires_all_reduce(model, False)
        loss_of(model, 5).backward()
        is_put_off = strategy is SHARD_OPTIM or shape[1] == 1
        if hook is not None:
            assert calls == ([] if is_put_off else ["reduce_scatter"] * num_handles)
        set_requires_all_reduce(model, True)
        seen.append(_train_and_collect(model))
        if hook is not None:
            sizes = {(stage.kind, stage.group.size()) for stage in hook.stages}
            both = {("reduce_scatter", shape[1]), ("all_reduce", shape[0])}
            assert sizes == {each for each in both if each[1] > 1}
    _assert_same_values(*seen, is_bitwise=False)


@pytest.mark.fast
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_accumulated_gradients_reach_the_hook_once(strategy: ShardingStrategy) -> None:
    """Under no_sync it is not called; without it, for every microbatch."""
    seen = []
    for hook in (None, _PlainHook()):
        model = make_net(strategy=strategy)
        if hook is not None:
            register_comm_hook(model, hook)
        with no_sync(model):
            loss_of(model, 0).backward()
        assert hook is None or hook.stages == []
        loss_of(model, 1).backward()
        assert hook is None or len(hook.stages) == len(get_handles(model))
        loss_of(model, 2).backward()
        seen.append([[param.grad.full_tensor() for param in model.parameters()]])
    _assert_same_values(*seen)


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_a_key_outlives_new_buffers_and_settings(strategy: ShardingStrategy) -> None:
    """A hook's state by that key goes on when parameters get other data, or a setter runs."""
    hook, model = _PlainHook(), make_net(strategy=strategy)
    register_comm_hook(model, hook)
    loss_of(model).backward()
    for param in model.parameters():
        param.data = param.data.clone()
    loss_of(model).backward()
    set_gradient_divide_factor(model, 2.0)
    loss_of(model).backward()
    assert len({stage.key for stage in hook.stages}) == len(get_handles(model))
    assert len(hook.stages) == 3 * len(get_handles(model))


@distributed(1)
def test_one_rank_alone_calls_no_hook() -> None:
    """There is nothing to send; training is as without."""
    hook, seen = _PlainHook(), []
    for each in (None, hook):
        model = make_net()
        register_comm_hook(model, each)
        seen.append(_train_and_collect(model))
    _assert_same_values(*seen)
    assert hook.stages == []


@distributed(2)
def test_hooks_differ_between_units_and_can_be_taken_away() -> None:
    """recurse=False reaches one unit; a copy has no hook."""
    first, second = _PlainHook(), _PlainHook()
    model = make_net()
    register_comm_hook(model.blocks[1], first)
    register_comm_hook(model, second, recurse=False)
    for each in (model, copy.deepcopy(model)):
        loss_of(each).backward()
        assert (len(first.stages), len(second.stages)) == (1, 1)
    register_comm_hook(model, None)
    loss_of(model).backward()
    assert (len(first.stages), len(second.stages)) == (1, 1)
    register_comm_hook(model, first)
    loss_of(model).backward()
    assert len(first.stages) == 5


@pytest.mark.fast
@distributed(2)
def test_wrong_registrations_are_refused() -> None:
    """Each names the remedy and changes nothing."""
    model = make_net()
    hook = _PlainHook()
    with pytest.raises(ValueError, match=r"expected hook to be a function hook\(state, stage\)"):
        register_comm_hook(model, "sum", hook)
    with pytest.raises(ValueError, match="expected no state where hook is None"):
        register_comm_hook(model, None, hook)
    with pytest.raises(ValueError, match="sharded"):
        register_comm_hook(nn.Linear(2, 2), hook)
    with pytest.raises(ValueError, match="sharded"):
        register_comm_hook(model.inp, hook)
    register_comm_hook(model.blocks[2], hook)
    with pytest.raises(RuntimeError, match=r"has the comm hook _PlainHook already\. Take it away"):
        register_comm_hook(model, hook)
    model.out.register_forward_hook(lambda *_: register_comm_hook(model.blocks[0], hook))
    with pytest.raises(RuntimeError, match=r"can't be registered or taken away inside the forward"):
        loss_of(model)
    model.out._forward_hooks.clear()
    loss = loss_of(model)
    model.blocks[1].up.weight.register_hook(lambda _: register_comm_hook(model, None))
    with pytest.raises(RuntimeError, match="inside a backward pass"):
        loss.backward()
    assert [handle.settings.hook_name for handle in get_handles(model)] == [
        *[None] * 3,
        "_PlainHook",
    ]


@distributed(2)
def test_ranks_with_different_hooks_are_told() -> None:
    """At the first forward, on all ranks alike."""
    model = make_net()
    register_comm_hook(model, _FailingHook(0, False) if dist.get_rank() else _PlainHook())
    with pytest.raises(RuntimeError, match=r"comm_hook=_PlainHook.*comm_hook=_FailingHook"):
        loss_of(model)


class _FailingHook(_PlainHook):
    """Fails the k-th time, at once or when it is waited for."""

    def __init__(self, k: int, is_late: bool) -> None:
        super().__init__()
        self.k, self.is_late = k, is_late

    def __call__(self, state: Any, stage: ReductionStage) -> Any:
        super().__call__(state, stage)
        if len(self.stages) != self.k:
            return None
        if self.is_late:
            return self
        raise Planned

    def wait(self) -> None:
        raise Planned


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2, on_device=True)
def test_error_in_a_hook_leaves_the_next_step_right(
    strategy: ShardingStrategy, is_late: bool
) -> None:
    """For every call of a step, in the hook or in what it returned."""
    expected = _train_and_collect(make_net(strategy=strategy))
    for k in range(1, 5):
        model = make_net(strategy=strategy)
        register_comm_hook(model, _FailingHook(k, is_late))
        with pytest.raises(Planned):
            loss_of(model, 7).backward()
        wait_for_engine(model)
        assert all(param.grad is None for param in model.parameters())
        _assert_same_values(_train_and_collect(model), expected)


@distributed(2)
def test_a_hook_that_returns_something_else_is_told() -> None:
    """A tensor, for example, as in other libraries; the next step is right."""
    model = make_net()
    register_comm_hook(model, lambda _, stage: stage.output)
    with pytest.raises(TypeError, match=r"return None or an object with wait\(\), got tensor"):
        loss_of(model).backward()
    register_comm_hook(model, None)
    _assert_same_values(_train_and_collect(model), _train_and_collect(make_net()))


def _sum_of(term: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Add up terms in rank order in fp32."""
    terms = [torch.empty_like(term) for _ in range(dist.get_world_size(group))]
    dist.all_gather(terms, term.contiguous(), group=group)
    total = terms[0].float()
    for other in terms[1:]:
        total += other
    return total


# --- sums of low-precision terms ---


@contextmanager
def _sums_by(path: str) -> Iterator[None]:
    """Choose how a group of this size reduces: as small, as larger, and as very large ones do."""
    limits = {"exchange": (8, 64), "all-to-all": (0, 64), "backend": (0, 0)}[path]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "MAX_EXCHANGE_SIZE", limits[0])
        patch.setattr(algorithms, "_MAX_ALL_TO_ALL_SIZE", limits[1])
        yield


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("path", ["exchange", "all-to-all"])
@distributed(3)
def test_low_precision_terms_are_sent_as_they_are_and_added_up_in_fp32(
    path: str, dtype: torch.dtype
) -> None:
    """1 + eps/4 + eps/4 is 1 where each addition is rounded; the output may be wide or narrow."""
    group = dist.group.WORLD
    assert group is not None
    eps = torch.finfo(dtype).eps
    value = 1.0 if dist.get_rank() == 0 else eps / 4
    input = torch.full((3 * 16,), value, dtype=dtype)
    with _sums_by(path), count_collectives() as log:
        for output_dtype in (F32, dtype):
            output = torch.empty(16, dtype=output_dtype)
            reduction = algorithms.ReduceScatter(group, dtype, input.device)
            num_parts = reduction.scratch_parts(in_place=True)
            assert num_parts == 3
            scratch = input.new_empty(num_parts * 16)
            reduction.start(output, input, scratch, 2.0).finish()
            exact = torch.full((16,), 1 + eps / 2)
            assert_equal(output, exact.to(output_dtype) * 2)
    assert log.count("reduce_scatter") == 2
    assert log.nbytes("reduce_scatter") == 2 * input.nbytes


@distributed(3)
def test_sums_are_not_narrower_than_their_terms() -> None:
    """A bf16 model that is reduced in fp32 rounds the mean once."""
    for strategy in STRATEGIES:
        policy = MixedPrecisionPolicy(reduce_dtype=F32)
        model = fully_shard(
            nn.Linear(33, 65, bias=False, dtype=BF16), strategy=strategy, mp_policy=policy
        )
        x = rank_input(1, 33, dtype=BF16)
        model(x).float().sum().backward()
        mean = _sum_of(x.float().flatten()) / dist.get_world_size()
        assert_equal(model.weight.grad.full_tensor(), mean.to(BF16).expand(65, 33))


@distributed(3)
def test_a_backend_rounds_every_addition() -> None:
    """Which is what the other ways are for."""
    group = dist.group.WORLD
    assert group is not None
    value = 1.0 if dist.get_rank() == 0 else 2.0**-9
    input, output = torch.full((3 * 16,), value, dtype=BF16), torch.empty(16)
    with _sums_by("backend"):
        reduction = algorithms.ReduceScatter(group, BF16, input.device)
        assert reduction.scratch_parts(in_place=True) == 0
        reduction.start(output, input, None).finish()
    assert bool((output == 1).all())


@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM])
@pytest.mark.parametrize("policy", ["fp16", "reduce only"])
@distributed(3)
def test_all_to_all_trains_as_the_exchange_does(strategy: ShardingStrategy, policy: str) -> None:
    """Bitwise: both add up the same terms in rank order."""
    mp_policy = {
        "fp16": MixedPrecisionPolicy(param_dtype=F16, main_dtype=F32),
        "reduce only": MixedPrecisionPolicy(reduce_dtype=BF16),
    }[policy]
    seen = []
    for path in ("exchange", "all-to-all"):
        with _sums_by(path):
            model = make_net(strategy=strategy, mp_policy=mp_policy)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            for step in range(3):
                loss_of(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            seen.append([param.full_tensor() for param in model.parameters()])
    for ours, expected in zip(*seen, strict=True):
        assert_equal(ours, expected)


@pytest.mark.parametrize("is_async", [False, True])
@distributed(2)
def test_an_error_of_the_backend_in_a_hook_is_explained(is_async: bool) -> None:
    """Order: the watch has closed the group's connections, and the hook waits in its own way."""

    class Work:
        def wait(self) -> None:
            raise RuntimeError("Application timeout caused pair closure")

    def hook(_: object, stage: ReductionStage) -> Work | None:
        return Work() if is_async else Work().wait()

    group = dist.new_group()
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    for module in (model[0], model):
        fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu"))
    register_comm_hook(model, hook)
    order_of(group).failure = "the ranks are not in step: rank 0 is here; rank 1 is there"
    loss = model(torch.ones(1, 4)).sum()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match=r"^the ranks are not in step: rank 0 is here"):
            loss.backward()
        gc.collect()
    assert not [each for each in told if "a backward failed" in str(each.message)]
    with pytest.raises(RuntimeError, match=r"^stopped by an earlier error: the ranks are not"):
        model(torch.ones(1, 4)).sum().backward()
    dist.destroy_process_group(group)
