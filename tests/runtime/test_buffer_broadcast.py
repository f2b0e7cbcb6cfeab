"""Buffers in training: as DistributedDataParallel has them, with one broadcast for a unit."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from composable_shard import (
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    get_handles,
    get_states,
    lazy_init,
    no_sync,
    set_is_last_backward,
    set_requires_all_reduce,
    unshard_params,
)
from composable_shard.comm import collectives
from tests.harness.assertions import Planned, assert_equal
from tests.harness.ranks import distributed
from tests.harness.versions import needs_torch
from tests.programs.models import (
    CheckpointsBlocks,
    Net,
    assert_at_rest,
    assert_is_slice,
    collectives_of,
    loss_of,
    shard_blocks,
    shard_mixed,
)

FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM, NO_SHARD = ShardingStrategy
STRATEGIES = list(ShardingStrategy)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


class _Block(nn.Module):
    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.norm = nn.BatchNorm1d(dim)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x)))


class _BatchNormed(nn.Module):
    """Batch norms in units of their own; buffers of many kinds, which training moves, in the root.

    `blocks[2]` has no buffer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 6)
        self.blocks = nn.ModuleList([_Block(), _Block(), nn.Linear(6, 6)])
        self.out = nn.Linear(6, 3)
        # Odd numbers of bytes first, so that alignment tells.
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("halves", torch.zeros(5, dtype=F16), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("moment", torch.zeros(2, 3, dtype=torch.complex64).t())
        self.register_buffer("total", torch.zeros(3, dtype=torch.float64), persistent=False)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("nothing", None)
        self.inp.register_buffer("alias", self.total)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        x = self.out(x)
        if self.training:
            self._note(x.detach())
        return x

    @torch.no_grad()
    def _note(self, x: Tensor) -> None:
        self.flags.logical_xor_(x.sum(0) > 0)
        self.halves.add_(x.mean().half())
        self.calls.add_(1 + dist.get_rank())
        self.moment.add_(x.float().mean() * 1j)
        self.total.add_(x.mean(0))


def _make_normed(strategy: ShardingStrategy = FULL_SHARD, **options: Any) -> Any:
    torch.manual_seed(0)
    model = _BatchNormed()
    shard_blocks(model, strategy=strategy, broadcast_buffers=True, **options)
    return model


def _as_ddp(module: nn.Module, *, broadcasts: bool = True) -> DistributedDataParallel:
    ddp = DistributedDataParallel(module)
    ddp.broadcast_buffers = broadcasts
    return ddp


def _assert_same_buffers(ours: nn.Module, theirs: nn.Module) -> None:
    __tracebackhide__ = True
    for (name, buffer), expected in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        assert_equal(buffer, expected, name)


def _assert_same_tensors(ours: nn.Module, theirs: nn.Module) -> None:
    __tracebackhide__ = True
    _assert_same_buffers(ours, theirs)
    for (name, param), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert_is_slice(param, expected, name)


def _drifts(buffer: Tensor) -> bool:
    """Return whether a buffer differs between two ranks."""
    both = [torch.empty_like(buffer) for _ in range(2)]
    dist.all_gather(both, buffer)
    return not torch.equal(*both)


# --- parity with DDP ---

TREES: dict[str, Callable[..., None]] = {
    **{
        each.name: lambda model, strategy=each, **options: shard_blocks(
            model, strategy=strategy, **options
        )
        for each in STRATEGIES
    },
    "mixed": shard_mixed,
}


@pytest.mark.parametrize("broadcasts", [True, False])
@pytest.mark.parametrize("tree", TREES)
@distributed(2, on_device=True)
def test_batch_norm_trains_as_under_ddp(tree: str, broadcasts: bool) -> None:
    """S2.15, S2.17: parameters and buffers bitwise, with accumulation and evaluation in between."""
    torch.manual_seed(0)
    plain = _BatchNormed()
    model = copy.deepcopy(plain)
    TREES[tree](model, broadcast_buffers=broadcasts)
    ddp = _as_ddp(plain, broadcasts=broadcasts)
    optimizers = [
        torch.optim.AdamW(each.parameters(), lr=0.05, foreach=True) for each in (model, ddp)
    ]
    drifted = []
    for step in range(4):
        num_microbatches = 1 + step % 2 * 2
        for micro in range(num_microbatches):
            is_last = micro == num_microbatches - 1
            for each, unsynced in ((model, lambda: no_sync(model)), (ddp, ddp.no_sync)):
                with nullcontext() if is_last else unsynced():
                    loss = loss_of(each, 10 * step + micro)
                    loss.backward()
            _assert_same_buffers(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        _assert_same_tensors(model, plain)
        drifted.append(_drifts(model.blocks[0].norm.running_mean))
        for each in (model, ddp):
            each.eval()
        with torch.no_grad():
            for turn in range(2):
                assert_equal(loss_of(model, turn), loss_of(ddp, turn))
        drifted.append(_drifts(model.blocks[0].norm.running_mean))
        for each in (model, ddp):
            each.train()
    assert drifted == ([True, False] if broadcasts else [True, True]) * 4
    assert_at_rest(model)


@needs_torch("2.13", "before, DDP's second broadcast fails the backward")
@pytest.mark.parametrize("tree", TREES)
@distributed(2)
def test_two_forwards_then_one_backward(tree: str) -> None:
    """The second broadcast writes what the first graph saved, as batch norm's own update does."""
    torch.manual_seed(0)
    plain = _BatchNormed()
    model = copy.deepcopy(plain)
    TREES[tree](model, broadcast_buffers=True)
    ddp = _as_ddp(plain)
    for turn in range(2):
        for each in (model, ddp):
            each.train(turn == 0)
            each.zero_grad()
            (loss_of(each, turn) + loss_of(each, turn + 1)).backward()
        _assert_same_tensors(model, plain)
        for ours, param in zip(model.parameters(), plain.parameters(), strict=True):
            assert_is_slice(ours.grad, param.grad)


@pytest.mark.fast
@distributed(2)
def test_two_optimizers_over_one_model_equal_ddp() -> None:
    """S2.17: each steps its own parameters, in turn and together."""
    torch.manual_seed(0)
    plain = _BatchNormed()
    model = copy.deepcopy(plain)
    shard_mixed(model, broadcast_buffers=True)
    ddp = _as_ddp(plain)
    pairs = []
    for each in (model, plain):
        blocks = list(each.blocks.parameters())
        rest = [param for param in each.parameters() if all(param is not p for p in blocks)]
        pairs.append([torch.optim.SGD(blocks, 0.1, momentum=0.9), torch.optim.Adam(rest, 0.05)])
    for step in range(4):
        for each, optimizers in zip((model, ddp), pairs, strict=True):
            loss_of(each, step).backward()
            chosen = optimizers if step % 3 == 0 else [optimizers[step % 2]]
            for optimizer in chosen:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        _assert_same_tensors(model, plain)


class _AverageAll(Function):
    """The mean over the ranks; its gradient is the mean of the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x / dist.get_world_size()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad / dist.get_world_size()
        dist.all_reduce(total)
        return total


class _SyncedNorm(nn.BatchNorm1d):
    """What SyncBatchNorm does, which torch has for accelerators only."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        mean = _AverageAll.apply(x.mean(0))
        variance = _AverageAll.apply((x - mean).square().mean(0))
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean, 0.1)
            self.running_var.lerp_(variance, 0.1)
        return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


@pytest.mark.parametrize("tree", TREES)
@distributed(2)
def test_synchronised_batch_norm_equals_ddp(tree: str) -> None:
    """S2.17: collectives of the model's own in forward and backward, in the default group."""
    torch.manual_seed(0)
    plain = _BatchNormed()
    for block in plain.blocks[:2]:
        block.norm = _SyncedNorm(6)
    model = copy.deepcopy(plain)
    TREES[tree](model, broadcast_buffers=True)
    ddp = _as_ddp(plain)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, ddp)]
    for step in range(3):
        losses = [loss_of(each, step) for each in (model, ddp)]
        assert_equal(losses[0].detach(), losses[1].detach())
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        _assert_same_tensors(model, plain)
        assert not _drifts(model.blocks[0].norm.running_var)


@pytest.mark.gpu
@pytest.mark.parametrize("tree", TREES)
def test_sync_batch_norm_on_a_gpu_equals_ddp(tree: str, tmp_path: Any) -> None:
    """S2.17: torch's own module, on one rank, where it is a batch norm with other kernels."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        plain = nn.SyncBatchNorm.convert_sync_batchnorm(_BatchNormed()).cuda()
        model = copy.deepcopy(plain)
        TREES[tree](model, broadcast_buffers=True)
        ddp = _as_ddp(plain)
        x = torch.randn(4, 5, device="cuda")
        for _ in range(2):
            for each in (model, ddp):
                each(x).square().mean().backward()
            _assert_same_tensors(model, plain)
            for ours, param in zip(model.parameters(), plain.parameters(), strict=True):
                assert_is_slice(ours.grad, param.grad)
    finally:
        dist.destroy_process_group()


# --- how often, and how many bytes ---


@distributed(2, 3)
def test_one_broadcast_for_a_unit_and_forward() -> None:
    """All buffers as bytes; none for a unit without."""
    model = _make_normed()
    nbytes = sum(buffer.nbytes for buffer in model.buffers())
    for _ in range(2):
        log = collectives_of(lambda: loss_of(model).backward())
        assert (log.count("broadcast"), log.nbytes("broadcast")) == (3, nbytes)
    assert collectives_of(lambda: model.blocks[2](torch.ones(1, 6))).count("broadcast") == 0


@distributed(2)
def test_no_broadcast_is_due_while_gradients_accumulate() -> None:
    """The first microbatch broadcasts, as in DDP; however it is put off."""
    model = _make_normed()

    def forward() -> int:
        return collectives_of(lambda: loss_of(model)).count("broadcast")

    def with_flag(set_flag: Callable[[nn.Module, bool], None]) -> list[int]:
        set_flag(model, False)
        counts = [forward(), forward()]
        set_flag(model, True)
        return [*counts, forward(), forward()]

    assert forward() == 3
    with no_sync(model):
        assert [forward(), forward()] == [3, 0]
    assert [forward(), forward()] == [0, 3]
    assert with_flag(set_is_last_backward) == [3, 0, 0, 3]
    assert with_flag(set_requires_all_reduce) == [3, 0, 0, 3]


@distributed(2)
def test_evaluation_broadcasts_once() -> None:
    """Afterwards the buffers are equal; in a scope of full parameters nothing is sent."""
    model = _make_normed()
    loss_of(model).backward()
    with unshard_params(model), torch.no_grad():
        assert collectives_of(lambda: loss_of(model)).events == []
    model.eval()
    with torch.no_grad():
        counts = [collectives_of(lambda: loss_of(model)).count("broadcast") for _ in range(3)]
    assert counts == [3, 0, 0]
    model.train()
    assert [collectives_of(lambda: loss_of(model)).count("broadcast") for _ in range(2)] == [0, 3]


class _Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block(5)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x) - self.blocks[0](2 * x)


@distributed(2)
def test_unit_that_a_call_runs_twice_broadcasts_once() -> None:
    """Both calls count in each rank's statistics, as in DDP."""
    torch.manual_seed(0)
    plain = _Siamese()
    model = copy.deepcopy(plain)
    shard_blocks(model, broadcast_buffers=True)
    ddp = _as_ddp(plain)
    for step in range(3):
        assert (
            collectives_of(lambda step=step: loss_of(model, step).backward()).count("broadcast")
            == 1
        )
        loss_of(ddp, step).backward()
        _assert_same_buffers(model, plain)


class _CheckpointedNormed(CheckpointsBlocks, _BatchNormed):
    """Its blocks are recomputed; the root's own forward moves nothing."""


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_recomputation_broadcasts_nothing(strategy: ShardingStrategy, use_reentrant: bool) -> None:
    """Also where the forward itself ran without gradients; it is as under DDP."""
    torch.manual_seed(0)
    plain = _CheckpointedNormed()
    plain.use_reentrant = use_reentrant
    model = copy.deepcopy(plain)
    shard_blocks(model, strategy=strategy, broadcast_buffers=True)
    ddp = _as_ddp(plain)
    for step in range(3):
        losses = [loss_of(each, step) for each in (model, ddp)]
        assert collectives_of(losses[0].backward).count("broadcast") == 0
        losses[1].backward()
        _assert_same_buffers(model, plain)
        assert _drifts(model.blocks[1].norm.running_mean)
    assert collectives_of(lambda: loss_of(model)).count("broadcast") == 3


@pytest.mark.parametrize("has_world", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(4)
def test_all_data_parallel_ranks_get_the_first_ones(
    strategy: ShardingStrategy, has_world: bool
) -> None:
    """S2.15: on a 2-D mesh in one broadcast, or in one along each axis."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = _make_normed(strategy, mesh=mesh)
    if not has_world:
        axes = (mesh.get_group("shard"), mesh.get_group("replicate"))
        for state in get_states(model):
            object.__setattr__(state.before_forward.shard_group, "joint_groups", axes)
    loss_of(model).backward()
    first = [buffer.clone() for buffer in model.buffers()]
    for buffer in first:
        dist.broadcast(torch.view_as_real(buffer) if buffer.is_complex() else buffer, 0)
    model.eval()
    with torch.no_grad():
        log = collectives_of(lambda: loss_of(model))
    assert log.count("broadcast") == 3 * (1 if has_world else 2)
    for buffer, expected in zip(model.buffers(), first, strict=True):
        assert_equal(buffer, expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(1)
def test_one_rank_alone_sends_nothing(strategy: ShardingStrategy) -> None:
    """There is nobody to send to."""
    model = _make_normed(strategy)
    assert collectives_of(lambda: loss_of(model).backward()).events == []


# --- the life of a unit ---


@distributed(2)
def test_buffers_are_those_that_the_module_has_when_it_runs() -> None:
    """Replaced, registered later, cast, loaded; the objects stay the same."""
    model = _make_normed()
    loss_of(model)
    model.register_buffer("late", torch.full((2,), float(dist.get_rank())))
    model.empty = torch.full((7,), float(dist.get_rank()))
    before = [id(buffer) for buffer in model.buffers()]
    loss_of(model)
    assert_equal(model.late, torch.zeros(2))
    assert_equal(model.empty, torch.zeros(7))
    assert [id(buffer) for buffer in model.buffers()] == before


@distributed(2)
def test_unit_of_buffers_alone() -> None:
    """A batch norm without parameters has no handle and still a mesh."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, affine=False))
    fully_shard(model[1], broadcast_buffers=True)
    fully_shard(model)
    assert get_handles(model[1]) == []
    counts = [
        collectives_of(lambda: loss_of(model).backward()).count("broadcast") for _ in range(2)
    ]
    assert counts == [1, 1]
    assert _drifts(model[1].running_mean)
    model.eval()
    loss_of(model)
    assert not _drifts(model[1].running_mean)


@distributed(2)
def test_difference_between_buffers_is_named_before_anything_is_sent() -> None:
    """Otherwise the broadcast would mix them up, or hang."""
    model = nn.Sequential(nn.Linear(5, 5))
    model.register_buffer("table", torch.zeros(3 + dist.get_rank()))
    fully_shard(model, broadcast_buffers=True)
    with pytest.raises(RuntimeError, match=r"ranks \[0\]: buffer 'table' shape \(3,\)"):
        loss_of(model)
    model = fully_shard(nn.Linear(5, 5), broadcast_buffers=dist.get_rank() == 1)
    with pytest.raises(RuntimeError, match=r"ranks \[1\]: .*broadcast_buffers=True"):
        loss_of(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_error_leaves_the_next_step_right(strategy: ShardingStrategy) -> None:
    """In a broadcast, the first or a later unit's, and in a forward after it."""
    torch.manual_seed(0)
    plain = _BatchNormed()
    model = copy.deepcopy(plain)
    shard_blocks(model, strategy=strategy, broadcast_buffers=True)
    ddp = _as_ddp(plain)
    broadcast = collectives.broadcast
    for step in range(3):
        for each in (model, ddp):
            each.zero_grad()
            loss_of(each, step).backward()
        calls: list[int] = []

        def failing(*args: Any, step: int = step, calls: list[int] = calls, **options: Any) -> Any:
            calls.append(step)
            if len(calls) > step:
                raise Planned
            return broadcast(*args, **options)

        before = [buffer.clone() for buffer in model.buffers()]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "broadcast", failing)
            with pytest.raises(Planned):
                loss_of(model)
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
        assert_at_rest(model)
    with pytest.raises(RuntimeError):
        model(torch.ones(4, 3))
    for each in (model, ddp):
        each.zero_grad()
        loss_of(each, 3).backward()
    _assert_same_tensors(model, plain)
    for ours, param in zip(model.parameters(), plain.parameters(), strict=True):
        assert_is_slice(ours.grad, param.grad)


@distributed(2)
def test_copies_broadcast_their_own_buffers() -> None:
    """Not those of the original; and the option stays."""
    model = _make_normed()
    loss_of(model).backward()
    twin = copy.deepcopy(model)
    kept = [buffer.clone() for buffer in model.buffers()]
    assert collectives_of(lambda: loss_of(twin.eval())).count("broadcast") == 3
    for buffer, value in zip(model.buffers(), kept, strict=True):
        assert_equal(buffer, value)
    loss_of(model.eval())
    _assert_same_buffers(twin, model)


@distributed(2)
def test_deleted_model_is_freed_at_once() -> None:
    """By reference counts alone."""
    model = _make_normed()
    loss_of(model).backward()
    alive = [weakref.ref(module) for module in model.modules()]
    del model
    assert all(ref() is None for ref in alive)


@distributed(2)
def test_modules_of_one_unit_broadcast_together() -> None:
    """Whichever runs first sends the buffers of all."""
    torch.manual_seed(0)
    model = nn.Sequential(_Block(5), _Block(5), nn.Linear(5, 2))
    fully_shard([model[0], model[1]], broadcast_buffers=True)
    fully_shard(model)
    for _ in range(2):
        assert collectives_of(lambda: loss_of(model).backward()).count("broadcast") == 1


# --- mixed precision ---


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_dtype_of_batch_norm_under_mixed_precision(strategy: ShardingStrategy, keeps: bool) -> None:
    """Kept modules keep their buffers' dtype and values; the others' are cast, and travel so."""
    policy = MixedPrecisionPolicy(
        param_dtype=BF16,
        reduce_dtype=F32,
        buffer_dtype=BF16,
        keep_fp32_classes=(nn.BatchNorm1d,) if keeps else (),
    )
    model = _make_normed(strategy, mp_policy=policy)
    norm = model.blocks[0].norm
    assert norm.running_mean.dtype == (F32 if keeps else BF16)
    assert norm.num_batches_tracked.dtype == torch.int64
    assert model.total.dtype == BF16
    lazy_init(model)
    for step in range(3):
        log = collectives_of(lambda step=step: loss_of(model, step).backward())
        assert log.nbytes("broadcast") == sum(buffer.nbytes for buffer in model.buffers())
        assert _drifts(norm.running_mean)
    before = norm.running_mean.clone()
    dist.broadcast(before, 0)
    with torch.no_grad():
        loss_of(model.eval())
    assert_equal(norm.running_mean, before)


@distributed(2)
def test_units_without_the_option_send_nothing() -> None:
    """Units of one tree may differ."""
    torch.manual_seed(0)
    model = _BatchNormed()
    fully_shard(model.blocks[0], broadcast_buffers=True)
    fully_shard(model)
    loss_of(model).backward()
    log = collectives_of(lambda: loss_of(model))
    assert log.nbytes("broadcast") == sum(buffer.nbytes for buffer in model.blocks[0].buffers())
    assert _drifts(model.blocks[1].norm.running_mean)
    assert collectives_of(lambda: loss_of(Net())).events == []
